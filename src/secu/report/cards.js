// ---------------------------------------------------------------------------------------------------------------
// Cards: one a cluster that is left, a page at a time; search and order; the dialog that compares and merges two.

const PAGE = 24;
const MOST = Object.fromEntries(["typical", "uncertain", "strange"]
  .map(kind => [kind, Math.max(...clusters.map(cluster => cluster[kind].length))]));
const view = { order: [], shown: 0, merges: "" };

/** The size-weighted mean over the parts of a cluster. */
function meanOf(cluster, quantity) {
  const known = parts(cluster).map(part => clusters[part]).filter(part => part[quantity] !== null && part.size);
  const size = known.reduce((sum, part) => sum + part.size, 0);
  return size ? known.reduce((sum, part) => sum + part.size * part[quantity], 0) / size : null;
}

/** The pictures of all parts, taking turns, so that each is seen; no more than one part alone could have. */
function picturesOf(cluster, kind) {
  const rows = parts(cluster).map(part => clusters[part][kind]);
  const turns = Array.from({ length: MOST[kind] }, (_, place) => rows.map(row => row[place]));
  return turns.flat().filter(index => index !== undefined).slice(0, MOST[kind]);
}

const missing = (value, instead) => (value === null ? instead : value);
const orders = {
  number: (a, b) => a - b,
  large: (a, b) => sizeOf(b) - sizeOf(a),
  small: (a, b) => sizeOf(a) - sizeOf(b),
  loose: (a, b) => missing(meanOf(a, "cohesion"), 2) - missing(meanOf(b, "cohesion"), 2),
  tight: (a, b) => missing(meanOf(b, "cohesion"), -2) - missing(meanOf(a, "cohesion"), -2),
  unsure: (a, b) => missing(meanOf(a, "sure"), 2) - missing(meanOf(b, "sure"), 2),
  unnamed: (a, b) => Boolean(nameOf(a)) - Boolean(nameOf(b)) || a - b,
};

/** The clusters with a picture whose name holds a word. Numbers mean clusters; of very many pictures no name is here. */
function holders(word) {
  if (!content.ids || word.length < 3 || !/\D/.test(word)) return new Set();
  return new Set(content.cluster.filter((_, index) => content.ids[index].toLowerCase().includes(word)));
}

function matches(cluster, words) {
  const names = parts(cluster).flatMap(part => [`cluster ${part}`, ...clusters[part].classes.map(([name]) => name)]);
  const text = [nameOf(cluster), ...names].join("\n").toLowerCase();
  return words.every(([word, held]) => text.includes(word) || parts(cluster).some(part => held.has(part)));
}

/** Choose and sort the cards, and draw the first of them. */
function arrangeCards() {
  const query = $("search").value.trim().toLowerCase();
  const isMeant = cluster => query !== "" && parts(cluster).includes(Number(query)); // its very number: comes first
  const words = query.split(/\s+/).map(word => [word, holders(word)]);
  view.order = rootsLeft().filter(cluster => matches(cluster, words)).sort(orders[$("sort").value]);
  view.order.sort((a, b) => isMeant(b) - isMeant(a));
  view.merges = JSON.stringify(edits.merged);
  redrawCards(PAGE);
}

function redrawCards(many) {
  view.shown = 0;
  $("cards").replaceChildren();
  showMore(many);
  if (!view.order.length) $("cards").append(h("p", { class: "muted" }, "No cluster matches the search."));
}

/** Draw the next cards: a page, then twice as many each time. */
function showMore(many = Math.max(PAGE, view.shown)) {
  const next = view.order.slice(view.shown, view.shown + many);
  $("cards").append(...next.map(card));
  view.shown += next.length;
  $("more").hidden = view.shown >= view.order.length;
  $("more").textContent = `Show more clusters (${count(view.order.length - view.shown)} left)`;
}

/** Bring a cluster's card into view and the focus onto it. */
function goToCard(cluster) {
  const whole = root(cluster);
  if (!view.order.includes(whole)) {
    $("search").value = "";
    arrangeCards();
  }
  const place = view.order.indexOf(whole);
  if (place >= view.shown) showMore(place + 1 - view.shown);
  const article = $(`card-${whole}`);
  article.scrollIntoView({ block: "start" });
  article.focus({ preventScroll: true });
}

const largest = () => Math.max(...clusters.map(cluster => cluster.size));

/** Text that follows a cluster's name. */
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
  const size = sizeOf(cluster);
  const outliers = parts(cluster).reduce((sum, part) => sum + clusters[part].outliers, 0);
  const cohesion = meanOf(cluster, "cohesion");
  const name = h("input", {
    id: `name-${cluster}`, class: "name", maxlength: 80, placeholder: "Name this cluster", autocomplete: "off",
    "data-naming": cluster, "aria-label": `Name of cluster ${cluster}`, value: nameOf(cluster),
    onchange: event => rename(cluster, event.target.value),
    onkeydown: event => { if (event.key === "Enter") rename(cluster, event.target.value); },
  });
  return h("article", { class: "card", id: `card-${cluster}`, tabindex: -1, "aria-label": `Cluster ${cluster}` },
    h("header", {},
      h("h3", {}, h("span", { class: `swatch hue-${cluster % HUES}`, "aria-hidden": "true" }), `Cluster ${cluster}`),
      name),
    h("dl", { class: "meters" },
      meter("Pictures", size / largest(), count(size), "How many pictures; the bar compares with the largest cluster"),
      meter("Tightness", cohesion, cohesion === null ? "–" : cohesion.toFixed(2),
        "Mean closeness (cosine) to the middle of the cluster: 1 means all alike"),
      meter("How sure", meanOf(cluster, "sure"), percent(meanOf(cluster, "sure")), "Mean confidence of its pictures")),
    labelsOf(cluster),
    parts(cluster).slice(1).map(part => h("p", { class: "part" }, `Includes cluster ${part} `,
      press("Separate again", () => separate(part), { class: "link" }))),
    row("Most typical", picturesOf(cluster, "typical"), "Closest to the middle of the cluster"),
    h("div", { class: clusters.length > 40 ? "halves narrow" : "halves" },
      row("Least certain", picturesOf(cluster, "uncertain"), "Might belong elsewhere"),
      row(`Outliers · ${count(outliers)}`, picturesOf(cluster, "strange"), "Fit no cluster well")),
    size ? null : h("p", { class: "muted" }, "No picture was sorted into this cluster."),
    lookAlikes(cluster),
    h("div", { class: "actions" },
      press("Compare & merge", () => openCompare(cluster), { class: "quiet", "data-compare": cluster }),
      press("Show on map", () => showOnMap(cluster), { class: "quiet" })));
}

/** What the true labels say about a cluster, where they are known. */
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

function lookAlikes(cluster) {
  const near = clusters[cluster].alike.filter(other => root(other.cluster) !== cluster);
  if (!near.length) return null;
  const help = "The number: pictures of this cluster that have the other as second choice";
  const chip = other => h("button", {
    type: "button", class: "chip", onclick: () => openCompare(cluster, root(other.cluster)),
    title: `Closeness of the two middles: ${other.cosine.toFixed(2)}. ${help}. Pick to compare.`,
  }, h("span", { class: `swatch hue-${root(other.cluster) % HUES}`, "aria-hidden": "true" }), nameTag(other.cluster),
  h("span", { class: "muted" }, ` ${count(other.second)}`),
  h("span", { class: "hidden" }, " pictures have it as second choice"));
  const title = h("h4", { title: help }, "Looks like");
  return h("div", { class: "row" }, title, h("div", { class: "chips" }, near.map(chip)));
}

// Compare and merge

function openCompare(cluster, other) {
  const near = [...new Set(clusters[cluster].alike.map(item => root(item.cluster)))].filter(item => item !== cluster);
  const rest = rootsLeft().filter(item => item !== cluster && !near.includes(item));
  const option = item => h("option", { value: item }, `${fullLabel(item)} · ${count(sizeOf(item))}`);
  const choice = h("select", { id: "compare-with", onchange: show },
    near.length > 0 && h("optgroup", { label: "Looks alike" }, near.map(option)),
    rest.length > 0 && h("optgroup", { label: "All others" }, rest.map(option)));
  const theirs = h("div"), size = sizeOf(cluster);
  const join = press("Merge", mergeNow, { class: "primary", id: "merge" });
  function show() {
    const list = picturesOf(Number(choice.value), "typical").slice(0, 12);
    theirs.replaceChildren(strip(list, `Most typical of ${label(Number(choice.value))}`));
  }
  function mergeNow() {
    const into = Number(choice.value);
    $("compare").close();
    merge(cluster, into);
    goToCard(into);
  }
  if (other !== undefined) choice.value = other;
  const close = press("Cancel", () => $("compare").close(), { class: "quiet", id: "close-compare" });
  const mine = strip(picturesOf(cluster, "typical").slice(0, 12), `Most typical of ${label(cluster)}`);
  const title = h("h2", { id: "compare-title" }, "Do these belong together?");
  if (!choice.options.length) {
    const none = h("p", {}, "There is no other cluster left.");
    $("compare").replaceChildren(title, none, h("div", { class: "actions" }, close));
  } else {
    $("compare").replaceChildren(title,
      h("p", { class: "muted" }, "Merging puts the first into the second. You can separate them again at any time."),
      h("h3", {}, nameTag(cluster), h("span", { class: "muted" }, ` · ${plural(size, "picture", "pictures")}`)),
      mine,
      h("label", { class: "block" }, "Merge into", choice), theirs,
      h("div", { class: "actions" }, h("span", { class: "space" }), close, join));
    show();
  }
  $("compare").showModal();
}

/** After an edit: texts and marks where they stand; all cards only where clusters came or went. */
function refreshCards() {
  for (const button of document.querySelectorAll("[data-index]")) button.refresh();
  for (const tag of document.querySelectorAll("[data-label]")) tag.textContent = oneLine(label(+tag.dataset.label), 30);
  for (const input of document.querySelectorAll("[data-naming]")) input.value = nameOf(Number(input.dataset.naming));
  if (view.merges !== JSON.stringify(edits.merged)) {
    const many = view.shown;
    arrangeCards();
    if (many > view.shown) showMore(many - view.shown);
  }
}
