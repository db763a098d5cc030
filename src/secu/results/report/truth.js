// ---------------------------------------------------------------------------------------------------------------
// Truth: clusters compared with the true labels, where these are known.

function drawTruth() {
  if (!truth || !$("confusion")) return;
  const more = OWN > truth.classes.length
    ? " There are more clusters than labels: images in an unmatched cluster do not count as correct." : "";
  $("confusion").append(truth.table ? heatTable(more) : longTable(more), mixUps() ?? "");
}

function truthPanel(title, help, ...children) {
  const caption = h("figcaption", {}, h("h3", {}, title), help && h("p", { class: "muted" }, help));
  return h("figure", { class: "panel" }, caption, ...children);
}

const clusterLink = (cluster, text) => h("button", {
  type: "button", class: "link", title: `Go to cluster ${cluster}`, onclick: () => goToCard(cluster),
}, text);

/** Return a confusion matrix with matched pairs on the diagonal. */
function heatTable(more) {
  const row = (counts, target) => h("tr", {}, h("th", { scope: "row" }, oneLine(truth.classes[target], 24)),
    counts.map((many, place) => heatCell(many, target, truth.order[place])));
  const help = "One row per label, one column per cluster; the matched pair is framed. The stronger the color, the "
    + `larger the share of the label. Your changes are not included.${more}`;
  const head = ["Label", ...truth.order.map(cluster => clusterLink(cluster, String(cluster)))];
  return truthPanel("Clusters of each label", help,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Labels and clusters" },
      table("heat", head, truth.table.map(row))));
}

function heatCell(many, target, cluster) {
  const share = truth.totals[target] ? many / truth.totals[target] : 0;
  const most = share >= 0.6; // two ranges of shades, since text is hard to read on those in between
  const kinds = [cluster === truth.match[target] && "match", most && "strong"].filter(Boolean).join(" ");
  const title = `${oneLine(truth.classes[target], 60)} in cluster ${cluster}: ${count(many)} (${percent(share)})`;
  const cell = h("td", { class: kinds, title }, many ? count(many) : "");
  cell.style.setProperty("--share", `${Math.round(most ? 60 + 40 * share : 73 * share)}%`);
  return cell;
}

/** Return one line per label, for many labels; the lowest share comes first. */
function longTable(more) {
  const found = target => (truth.totals[target] ? truth.found[target] / truth.totals[target] : 0);
  const link = cluster => (cluster === null ? "none" : clusterLink(cluster, `Cluster ${cluster}`));
  const order = [...truth.classes.keys()].sort((a, b) => found(a) - found(b));
  const line = target => h("tr", {}, h("th", { scope: "row" }, oneLine(truth.classes[target], 40)),
    [count(truth.totals[target]), link(truth.match[target]), percent(found(target))].map(cell => h("td", {}, cell)));
  const help = `The most difficult labels come first. Your changes are not included.${more}`;
  return truthPanel("Share of each label in its matched cluster", help,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Labels and their clusters" },
      table("plain", ["Label", "Images", "Matched cluster", "Share"], order.map(line))));
}

function mixUps() {
  const owner = new Map(truth.match.map((cluster, target) => [cluster, truth.classes[target]]));
  const place = cluster => `matched to ${owner.has(cluster) ? oneLine(owner.get(cluster), 30) : "no label"}`;
  const line = ([target, cluster, many]) => h("li", {}, h("strong", {}, oneLine(truth.classes[target], 30)),
    ` in cluster ${cluster} (${place(cluster)}): ${count(many)}`);
  if (!truth.mixups.length) return null;
  return truthPanel("Most frequent mix-ups", null, h("ul", { class: "mixups" }, truth.mixups.map(line)));
}
