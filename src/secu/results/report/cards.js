// ---------------------------------------------------------------------------------------------------------------
// Cards: one per remaining cluster, a page at a time; search and order.

const PAGE = 24;
const MOST = Object.fromEntries(["typical", "uncertain", "outlying"]
  .map(kind => [kind, Math.max(...clusters.map(cluster => cluster[kind].length))]));
const view = { order: [], shown: 0, grouping: "" };

/** Return the size-weighted mean over the parts of a cluster. */
function meanOf(cluster, quantity) {
  const known = parts(cluster).map(part => clusters[part]).filter(part => part[quantity] !== null && part.size);
  const size = known.reduce((sum, part) => sum + part.size, 0);
  return size ? known.reduce((sum, part) => sum + part.size * part[quantity], 0) / size : null;
}

/** Return pictures of all parts in turn, no more than a single cluster could have. */
function picturesOf(cluster, kind) {
  const rows = parts(cluster).map(part => clusters[part][kind]);
  const turns = Array.from({ length: MOST[kind] }, (_, place) => rows.map(row => row[place]));
  return turns.flat().filter(index => index !== undefined).slice(0, MOST[kind]);
}

const orElse = (value, instead) => (value === null ? instead : value);
const orders = {
  number: () => 0, // as they are
  large: (a, b) => sizeOf(b) - sizeOf(a),
  small: (a, b) => sizeOf(a) - sizeOf(b),
  loose: (a, b) => orElse(meanOf(a, "cohesion"), 2) - orElse(meanOf(b, "cohesion"), 2),
  tight: (a, b) => orElse(meanOf(b, "cohesion"), -2) - orElse(meanOf(a, "cohesion"), -2),
  uncertain: (a, b) => orElse(meanOf(a, "confidence"), 2) - orElse(meanOf(b, "confidence"), 2),
  unnamed: (a, b) => Boolean(nameOf(a)) - Boolean(nameOf(b)),
};

let lowerIds = null;

/** Return the clusters with a file name that contains a word, if the page holds names. Numbers mean clusters. */
function holdersOf(word) {
  if (!content.ids || word.length < 3 || !/\D/.test(word)) return new Set();
  lowerIds ??= content.ids.map(id => id.toLowerCase());
  const leaves = leafOfRows();
  const found = new Set();
  lowerIds.forEach((id, row) => { if (id.includes(word)) found.add(holder(content.cluster[row], leaves[row])); });
  return found;
}

function matches(cluster, words) {
  const classesOf = part => clusters[part].classes.map(([name]) => name);
  const namesOf = part => [`cluster ${numberOf(part)}`, ...clusters[part].words, ...classesOf(part)];
  const names = parts(cluster).flatMap(namesOf);
  const text = [nameOf(cluster), ...names].join("\n").toLowerCase();
  return words.every(([word, held]) => text.includes(word) || parts(cluster).some(part => held.has(part)));
}

/** Choose and sort the cards, and draw the first page. */
function arrangeCards() {
  const query = $("search").value.trim().toLowerCase();
  const isExact = cluster => parts(cluster).some(part => numberOf(part) === query); // its own number: comes first
  const words = query.split(/\s+/).map(word => [word, holdersOf(word)]);
  view.order = rootsLeft().filter(cluster => matches(cluster, words) && passesFilter(cluster));
  view.order.sort(orders[$("sort").value]);
  view.order.sort((a, b) => isExact(b) - isExact(a));
  view.grouping = groupingNow();
  redrawCards(PAGE);
  describeFilter(view.order.length);
}

const groupingNow = () => JSON.stringify([edits.merged, edits.cut, edits.open]);

function redrawCards(many) {
  view.shown = 0;
  $("cards").replaceChildren();
  showMore(many);
  if (!view.order.length) $("cards").append(h("p", { class: "muted" }, "No cluster matches your search and filters."));
}

/** Draw the next cards: one page, then twice as many each time. */
function showMore(many = Math.max(PAGE, view.shown)) {
  const next = view.order.slice(view.shown, view.shown + many);
  $("cards").append(...next.map(card));
  view.shown += next.length;
  $("more").hidden = view.shown >= view.order.length;
  $("more").textContent = `Show more clusters (${count(view.order.length - view.shown)} left)`;
}

/** Scroll to a cluster's card and focus it. */
function goToCard(cluster) {
  const whole = root(cluster);
  if (!view.order.includes(whole)) {
    $("search").value = "";
    clearFilter();
    arrangeCards();
  }
  const place = view.order.indexOf(whole);
  if (place >= view.shown) showMore(place + 1 - view.shown);
  const article = $(`card-${whole}`);
  article.scrollIntoView({ block: "start" });
  article.focus({ preventScroll: true });
}

const largest = () => Math.max(...shapeNow().active.map(cluster => clusters[cluster].size));

/** Return text that follows a cluster's name when it changes. */
function nameTag(cluster) {
  return h("span", { "data-label": cluster }, oneLine(label(cluster), 30));
}

function meter(term, value, text, help) {
  const bar = h("span", { class: "meter", "aria-hidden": "true" }, h("span"));
  bar.firstChild.style.width = `${100 * Math.max(0, Math.min(1, value ?? 0))}%`;
  return h("div", { title: help }, h("dt", {}, term), h("dd", {}, text), bar);
}

function row(title, list, help) {
  return list.length ? h("div", { class: "row" }, h("h4", { title: help }, title), strip(list, title)) : null;
}

function card(cluster) {
  const title = `Cluster ${numberOf(cluster)}`;
  return h("article", { class: "card", id: `card-${cluster}`, tabindex: -1, "aria-label": title },
    h("header", {},
      h("h3", {}, h("span", { class: `swatch hue-${hueOf(cluster)}`, "aria-hidden": "true" }), title),
      nameInput(cluster)),
    meters(cluster),
    suggestionOf(cluster),
    labelsOf(cluster),
    parts(cluster).slice(1).map(part => h("p", { class: "part" }, `Includes cluster ${numberOf(part)} `,
      press("Separate", () => separate(part), {
        class: "link", "aria-label": `Separate cluster ${numberOf(part)}`,
      }))),
    pictureRows(cluster),
    sizeOf(cluster) ? null : h("p", { class: "muted" }, "This cluster is empty."),
    similarTo(cluster),
    h("div", { class: "actions" },
      press("Compare & merge", () => openCompare(cluster), { class: "quiet", "data-compare": cluster }),
      splitButtons(cluster),
      press("Show on map", () => showOnMap(cluster), { class: "quiet" })));
}

function nameInput(cluster) {
  return h("input", {
    id: `name-${cluster}`, class: "name", maxlength: 80, placeholder: "Name this cluster", autocomplete: "off",
    "data-naming": cluster, "aria-label": `Name of cluster ${numberOf(cluster)}`, value: nameOf(cluster),
    onchange: event => rename(cluster, event.target.value),
    onkeydown: event => { if (event.key === "Enter") rename(cluster, event.target.value); },
  });
}

/** Return the words that set a cluster apart, which a click takes as its name. */
function suggestionOf(cluster) {
  const words = [...new Set(parts(cluster).flatMap(part => clusters[part].words))].slice(0, 3).join(" ");
  if (!words) return null;
  const help = "Words in file names, folders or columns that are frequent in this cluster and rare in others";
  return h("p", { class: "labels" }, h("span", { class: "muted", title: help }, "Suggested name: "),
    press(words, () => rename(cluster, words), {
      class: "link", "aria-label": `Name cluster ${numberOf(cluster)} ${words}`,
    }));
}

function meters(cluster) {
  const size = sizeOf(cluster);
  const cohesion = meanOf(cluster, "cohesion");
  const confidence = meanOf(cluster, "confidence");
  return h("dl", { class: "meters" },
    meter("Images", size / largest(), count(size), "Number of images; the bar compares it with the largest cluster"),
    meter("Cohesion", cohesion, cohesion === null ? "–" : cohesion.toFixed(2),
      `Mean similarity (cosine) to the center of the ${isGroup(cluster) ? "leaf" : "cluster"}: 1 means all look alike`),
    isGroup(cluster) ? null : meter("Confidence", confidence, percent(confidence), "Mean confidence of its images"));
}

function pictureRows(cluster) {
  const outliers = parts(cluster).reduce((sum, part) => sum + clusters[part].outliers, 0);
  return [
    row("Most typical", picturesOf(cluster, "typical"), "Closest to the center of the cluster"),
    h("div", { class: OWN > 40 ? "halves narrow" : "halves" },
      row("Least confident", picturesOf(cluster, "uncertain"), "May belong to another cluster"),
      row(`Outliers · ${count(outliers)}`, picturesOf(cluster, "outlying"), "Do not fit any cluster well")),
  ];
}

/** Return the most frequent true labels of a cluster, where they are known. */
function labelsOf(cluster) {
  const counts = new Map();
  for (const part of parts(cluster)) {
    for (const [name, many] of clusters[part].classes) counts.set(name, (counts.get(name) ?? 0) + many);
  }
  if (!counts.size) return null;
  const best = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 3);
  const texts = best.map(([name, many]) => `${oneLine(name, 30)} (${percent(many / sizeOf(cluster))})`);
  return h("p", { class: "labels" }, h("span", { class: "muted" }, "True labels: "), texts.join(", "));
}

function similarTo(cluster) {
  const near = clusters[cluster].similar.filter(other => root(other.cluster) !== cluster);
  if (!near.length) return null;
  const help = "The number counts images of this cluster whose second choice is the other one";
  const chip = other => h("button", {
    type: "button", class: "chip", onclick: () => openCompare(cluster, root(other.cluster)),
    title: `Similarity of the two centers: ${other.cosine.toFixed(2)}. ${help}. Click to compare.`,
  }, h("span", { class: `swatch hue-${hueOf(root(other.cluster))}`, "aria-hidden": "true" }), nameTag(other.cluster),
  h("span", { class: "muted" }, ` ${count(other.second)}`),
  h("span", { class: "hidden" }, " images have it as their second choice"));
  const title = h("h4", { title: help }, "Similar clusters");
  return h("div", { class: "row" }, title, h("div", { class: "chips" }, near.map(chip)));
}

/** Update the cards after an edit: texts and marks in place; all cards only if clusters were merged or separated. */
function refreshCards() {
  for (const button of document.querySelectorAll("[data-index]")) button.refresh();
  for (const tag of document.querySelectorAll("[data-label]")) tag.textContent = oneLine(label(+tag.dataset.label), 30);
  for (const input of document.querySelectorAll("[data-naming]")) input.value = nameOf(Number(input.dataset.naming));
  if (view.grouping !== groupingNow()) {
    const many = view.shown;
    arrangeCards();
    if (many > view.shown) showMore(many - view.shown);
  }
}
