// ---------------------------------------------------------------------------------------------------------------
// Branches: the tree as rows that open and close. Opening a row only shows what is below; "Split" and "Join" change the
// clusters of the page, as the controls do that cut the tree (levels.js).

const FIRST_ROWS = 24; // about as many are open at first
const ROWS_AT_ONCE = 100;
const ROW_PICTURES = 4;
const branches = { open: new Set(), rows: [], shown: 0, current: null, isDrawn: false, level: null };

/** Return the buttons of a card that split a cluster, and join the parts of one. */
function splitButtons(unit) {
  const { children, parent } = clusters[unit];
  const isAlone = parts(unit).length === 1;
  const isPart = parent !== null && !isGroup(unit);
  const rest = isPart ? `the other parts of cluster ${numberOf(parent)}` : "the most similar clusters";
  const split = () => { splitUnit(unit); goToCard(children[0]); };
  const joinBack = () => { joinUnit(parent); goToCard(parent); };
  return [
    children.length > 0 && isAlone && press("Split", split, {
      class: "quiet", "data-split": unit, title: "Split into two smaller clusters",
      "aria-label": `Split cluster ${numberOf(unit)}`,
    }),
    parent !== null && isAlone && press("Join", joinBack, {
      class: "quiet", "data-join": unit, title: `Join with ${rest}`,
      "aria-label": `Join cluster ${numberOf(unit)} with ${rest}`,
    }),
  ];
}

/** Return the units that a cluster is most like: its neighbors, or for a part or a group, its siblings. */
function similarUnits(unit) {
  const { kind, similar, parent, own } = clusters[unit];
  if (kind === KIND.own) return similar.map(other => other.cluster);
  const siblings = parent === null ? [] : clusters[parent].children.filter(other => other !== unit);
  return kind === KIND.part ? [...siblings, ...similarUnits(own)] : siblings;
}

/** Open the largest groups first, as far as the cut and some rows. */
function openFirst() {
  branches.open.clear();
  const waiting = [ROOT];
  while (waiting.length && 2 * branches.open.size < FIRST_ROWS) {
    waiting.sort((a, b) => b - a); // the last merges are the coarsest
    const unit = waiting.shift();
    if (level() === null ? !clusters[unit].children.length : !isOpen(unit)) continue;
    branches.open.add(unit);
    waiting.push(...clusters[unit].children);
  }
}

/** Return the rows in view as [unit, level], from top to bottom. */
function listRows() {
  const rows = [];
  const waiting = [[ROOT, 1]];
  while (waiting.length) {
    const [unit, depth] = waiting.pop();
    rows.push([unit, depth]);
    if (branches.open.has(unit)) waiting.push(...clusters[unit].children.toReversed().map(child => [child, depth + 1]));
  }
  return rows;
}

/** Return whether a group is a cluster of the page, contains some, or is a part of one. */
function standing(unit) {
  if (level() === null) return "plain";
  if (shapeNow().isActive.has(unit)) return "active";
  return activeAbove(unit) === null ? "above" : "below";
}

function countActive(unit) {
  let many = 0;
  eachBelow(unit, one => { many += shapeNow().isActive.has(one); });
  return many;
}

function countLeaves(unit) {
  let many = 0;
  eachLeaf(unit, () => { many += 1; });
  return many;
}

function nameOfRow(unit, kind) {
  const leaves = countLeaves(unit);
  if (kind === "active") return label(unit);
  if (kind === "above") return `${plural(countActive(unit), "cluster", "clusters")}`;
  return leaves === 1 ? `Leaf ${tree.numbers[clusters[unit].leaf]}` : `${count(leaves)} leaves`;
}

function branchRow([unit, depth]) {
  const { size, words, children, typical } = clusters[unit];
  const kind = standing(unit);
  const isParent = children.length > 0;
  const swatch = kind === "active" && h("span", { class: `swatch hue-${hueOf(unit)}`, "aria-hidden": "true" });
  const toggle = h("span", {
    class: isParent ? "twisty" : "twisty leaf", "aria-hidden": "true", onclick: () => toggleBranch(unit),
  });
  const title = h("span", {}, oneLine(nameOfRow(unit, kind), 40),
    words.length > 0 && h("span", { class: "muted" }, ` ${words.join(" ")}`));
  const row = h("div", {
    class: `branch ${kind}`, role: "row", "aria-level": depth, tabindex: unit === branches.current ? 0 : -1,
    "aria-expanded": isParent ? String(branches.open.has(unit)) : null, "data-unit": unit,
  },
  h("div", { role: "gridcell", class: "branch-name" }, toggle, swatch, title),
  h("div", { role: "gridcell", class: "muted branch-size" }, imageCount(size)),
  h("div", { role: "gridcell", class: "branch-pictures", "aria-hidden": "true" },
    typical.slice(0, ROW_PICTURES).map(index => thumbnail(index))),
  h("div", { role: "gridcell", class: "branch-buttons" }, branchButtons(unit, kind)));
  row.style.setProperty("--depth", Math.min(depth - 1, 12));
  return row;
}

function branchButtons(unit, kind) {
  const tabindex = unit === branches.current ? 0 : -1;
  const about = nameOfRow(unit, kind);
  const act = (text, does) => press(text, does, { class: "link", tabindex, "aria-label": `${text}: ${about}` });
  const split = () => { branches.open.add(unit); splitUnit(unit); };
  return [
    kind === "active" && act("Show card", () => goToCard(unit)),
    kind === "active" && clusters[unit].children.length > 0 && act("Split", split),
    kind === "above" && unit !== ROOT && act("Join", () => joinUnit(unit)),
  ];
}

/** Draw the rows, and keep the focus on the current one. */
function drawBranches(many = ROWS_AT_ONCE) {
  const hadFocus = $("branches").contains(document.activeElement);
  branches.rows = listRows();
  if (!branches.rows.some(([unit]) => unit === branches.current)) branches.current = ROOT;
  const place = branches.rows.findIndex(([unit]) => unit === branches.current);
  branches.shown = Math.min(branches.rows.length, Math.max(many, place + 1));
  $("branches").replaceChildren(...branches.rows.slice(0, branches.shown).map(branchRow));
  $("more-branches").hidden = branches.shown >= branches.rows.length;
  $("more-branches").textContent = `Show more rows (${count(branches.rows.length - branches.shown)} left)`;
  if (hadFocus) rowOf(branches.current).focus();
}

const rowOf = unit => $("branches").querySelector(`[data-unit="${unit}"]`);

function toggleBranch(unit, open = !branches.open.has(unit)) {
  if (!clusters[unit].children.length) return;
  if (open) branches.open.add(unit);
  else branches.open.delete(unit);
  branches.current = unit;
  drawBranches(Math.max(ROWS_AT_ONCE, branches.shown));
}

/** Make a row the single Tab stop of the tree, with its buttons. */
function goToBranch(unit, focus = true) {
  for (const one of [branches.current, unit]) {
    const row = rowOf(one);
    for (const item of row ? [row, ...row.querySelectorAll("button")] : []) item.tabIndex = one === unit ? 0 : -1;
  }
  branches.current = unit;
  if (focus) rowOf(unit)?.focus();
}

function onBranchKey(event) {
  const row = event.target.closest("[role=row]");
  if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
  const unit = Number(row.dataset.unit);
  const place = branches.rows.findIndex(([one]) => one === unit);
  const isOnRow = event.target === row;
  const { parent } = clusters[unit];
  const isShown = branches.open.has(unit);
  const go = to => branches.rows[to] && to < branches.shown && goToBranch(branches.rows[to][0]);
  const keys = {
    ArrowDown: () => go(place + 1), ArrowUp: () => go(place - 1), Home: () => go(0), End: () => go(branches.shown - 1),
    ArrowRight: () => (isShown ? go(place + 1) : toggleBranch(unit, true)),
    ArrowLeft: () => (isShown ? toggleBranch(unit, false) : parent !== null && goToBranch(parent)),
    Enter: () => isOnRow && toggleBranch(unit), " ": () => isOnRow && toggleBranch(unit),
  };
  if (!(event.key in keys) || (!isOnRow && /^(Enter| )$/.test(event.key))) return;
  event.preventDefault();
  keys[event.key]();
}

/** Update the tree after an edit. */
function refreshTree() {
  if (!tree) return;
  describeCut();
  if (!branches.isDrawn) return;
  if (level() !== branches.level) openFirst();
  branches.level = level();
  drawBranches(Math.max(ROWS_AT_ONCE, branches.shown));
}

/** Follow the rows, and draw them after the first paint. */
function setUpBranches() {
  $("branches").addEventListener("keydown", onBranchKey);
  $("branches").addEventListener("focusin", event => {
    const row = event.target.closest("[role=row]");
    if (row && Number(row.dataset.unit) !== branches.current) goToBranch(Number(row.dataset.unit), false);
  });
  $("more-branches").addEventListener("click", () => drawBranches(2 * branches.shown));
  requestAnimationFrame(() => setTimeout(() => {
    branches.isDrawn = true;
    branches.level = level();
    openFirst();
    drawBranches();
  }));
}
