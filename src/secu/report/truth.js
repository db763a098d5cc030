// ---------------------------------------------------------------------------------------------------------------
// Truth: clusters beside the true labels, where these are known.

function drawTruth() {
  if (!truth || !$("confusion")) return;
  const more = clusters.length > truth.classes.length
    ? " There are more clusters than labels: pictures in a cluster left over count as no match." : "";
  $("confusion").append(truth.table ? heatTable(more) : longTable(more), mixUps() ?? "");
}

function truthPanel(title, help, ...children) {
  const caption = h("figcaption", {}, h("h3", {}, title), help && h("p", { class: "muted" }, help));
  return h("figure", { class: "panel" }, caption, ...children);
}

const clusterLink = (cluster, text) => h("button", {
  type: "button", class: "link", title: `Go to cluster ${cluster}`, onclick: () => goToCard(cluster),
}, text);

/** A row a label, a column a cluster, matched pairs on the diagonal. */
function heatTable(more) {
  const row = (counts, target) => h("tr", {}, h("th", { scope: "row" }, oneLine(truth.classes[target], 24)),
    counts.map((many, place) => heatCell(many, target, truth.order[place])));
  const help = "A row a label, a column a cluster; framed: the matched pair. The stronger the colour, the larger the "
    + `share of the label. Before your changes.${more}`;
  const head = ["Label", ...truth.order.map(cluster => clusterLink(cluster, String(cluster)))];
  return truthPanel("Where the pictures of each label went", help,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Labels against clusters" },
      table("heat", head, truth.table.map(row))));
}

function heatCell(many, target, cluster) {
  const share = truth.totals[target] ? many / truth.totals[target] : 0;
  const most = share >= 0.6; // two ranges of shades, as text is hard to read on the ones in between
  const kinds = [cluster === truth.match[target] && "match", most && "strong"].filter(Boolean).join(" ");
  const title = `${oneLine(truth.classes[target], 60)} in cluster ${cluster}: ${count(many)} (${percent(share)})`;
  const cell = h("td", { class: kinds, title }, many ? count(many) : "");
  cell.style.setProperty("--share", `${Math.round(most ? 60 + 40 * share : 73 * share)}%`);
  return cell;
}

/** For many labels: one line each, the worst found first. */
function longTable(more) {
  const found = target => (truth.totals[target] ? truth.found[target] / truth.totals[target] : 0);
  const link = cluster => (cluster === null ? "none" : clusterLink(cluster, `Cluster ${cluster}`));
  const order = [...truth.classes.keys()].sort((a, b) => found(a) - found(b));
  const line = target => h("tr", {}, h("th", { scope: "row" }, oneLine(truth.classes[target], 40)),
    [count(truth.totals[target]), link(truth.match[target]), percent(found(target))].map(cell => h("td", {}, cell)));
  return truthPanel("How much of each label its cluster holds", `The hardest labels first. Before your changes.${more}`,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Labels and their clusters" },
      table("plain", ["Label", "Pictures", "Matched to", "Found there"], order.map(line))));
}

function mixUps() {
  const owner = new Map(truth.match.map((cluster, target) => [cluster, truth.classes[target]]));
  const place = cluster => `matched to ${owner.has(cluster) ? oneLine(owner.get(cluster), 30) : "no label"}`;
  const line = ([target, cluster, many]) => h("li", {}, h("strong", {}, oneLine(truth.classes[target], 30)),
    ` in cluster ${cluster} (${place(cluster)}): ${count(many)}`);
  if (!truth.mixups.length) return null;
  return truthPanel("Most frequent mix-ups", null, h("ul", { class: "mixups" }, truth.mixups.map(line)));
}
