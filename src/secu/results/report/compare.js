// ---------------------------------------------------------------------------------------------------------------
// Compare: the dialog that shows two clusters side by side and merges them.

function openCompare(cluster, other) {
  const choice = clusterChoice(cluster);
  if (other !== undefined) choice.value = other;
  const title = h("h2", { id: "compare-title" }, "Do these belong together?");
  const close = press("Cancel", () => $("compare").close(), { class: "quiet", id: "close-compare" });
  if (choice.options.length) {
    $("compare").replaceChildren(title, ...comparison(cluster, choice, close));
  } else {
    const none = h("p", {}, "There is no other cluster left.");
    $("compare").replaceChildren(title, none, h("div", { class: "actions" }, close));
  }
  $("compare").showModal();
}

/** Return a list of all other clusters, the similar ones first. */
function clusterChoice(cluster) {
  const similar = similarUnits(cluster).map(root);
  const near = [...new Set(similar)].filter(item => item !== cluster);
  const rest = rootsLeft().filter(item => item !== cluster && !near.includes(item));
  const option = item => h("option", { value: item }, `${fullLabel(item)} · ${count(sizeOf(item))}`);
  return h("select", { id: "compare-with" },
    near.length > 0 && h("optgroup", { label: "Similar clusters" }, near.map(option)),
    rest.length > 0 && h("optgroup", { label: "All other clusters" }, rest.map(option)));
}

function comparison(cluster, choice, close) {
  const typical = item => strip(picturesOf(item, "typical").slice(0, 12), `Most typical of ${label(item)}`);
  const theirs = h("div");
  const show = () => theirs.replaceChildren(typical(Number(choice.value)));
  const mergeNow = () => {
    const into = Number(choice.value);
    $("compare").close();
    merge(cluster, into);
    goToCard(into);
  };
  choice.addEventListener("change", show);
  show();
  return [
    h("p", { class: "muted" }, "Merging moves the first cluster into the second. You can separate them at any time."),
    h("h3", {}, nameTag(cluster), h("span", { class: "muted" }, ` · ${imageCount(sizeOf(cluster))}`)),
    typical(cluster),
    h("label", { class: "block" }, "Merge into", choice), theirs,
    h("div", { class: "actions" }, h("span", { class: "space" }), close,
      press("Merge", mergeNow, { class: "primary", id: "merge" })),
  ];
}
