// ---------------------------------------------------------------------------------------------------------------
// Near-duplicates: groups of images that are the same picture.

function drawDuplicates() {
  const { groups, sizes, total } = content.duplicates;
  if (!groups.length) return;
  const all = plural(total, "group", "groups");
  $("duplicates-count").textContent = groups.length < total ? `The ${groups.length} largest of ${all}.` : `${all}.`;
  $("duplicate-groups").append(...groups.map((list, place) => duplicateGroup(list, sizes[place])));
}

function duplicateGroup(list, size) {
  const { name } = facts(list[0]);
  const label = `Same picture as ${oneLine(name, 120)}`;
  const shown = size > list.length && h("span", { class: "muted" }, ` · ${count(list.length)} shown`);
  return h("article", { class: "panel same", "aria-label": label },
    h("h3", {}, imageCount(size), shown), strip(list, label), h("p", { class: "muted" }, `Kept: ${oneLine(name)}`));
}
