// ---------------------------------------------------------------------------------------------------------------
// Cut: which units are the clusters of the page. Without a level these are the run's own clusters, with one the groups
// of the tree cut at that level; in both cases the reader may have opened some (split) or closed some (joined).

const TO_OPEN = 1;
const TO_CLOSE = -1;
let shape = null; // what follows from the edits; computed when it is first needed after an edit

const level = () => edits.cut.level ?? null;
const isGroup = unit => clusters[unit].kind === KIND.group;

/** Return whether the level alone opens a unit. */
const isOpenByLevel = unit => isGroup(unit) && level() !== null && apartFrom(unit) <= level();

function isOpen(unit) {
  if (!clusters[unit].children.length) return false;
  return unit in edits.open ? edits.open[unit] === TO_OPEN : isOpenByLevel(unit);
}

function shapeNow() {
  shape ??= findShape();
  return shape;
}

function findShape() {
  const active = [];
  const holders = new Int32Array(LEAVES); // of each leaf; without a level, of the part with that leaf
  const waiting = level() === null ? Array.from({ length: OWN }, (_, own) => OWN - 1 - own) : [ROOT];
  while (waiting.length) {
    const unit = waiting.pop();
    if (isOpen(unit)) waiting.push(...clusters[unit].children.toReversed());
    else active.push(unit);
  }
  for (const unit of active) eachLeaf(unit, leaf => { holders[leaf] = unit; });
  const numbers = groupNumbers(holders);
  if (level() !== null) active.sort((a, b) => numbers.get(a) - numbers.get(b));
  return { active, isActive: new Set(active), holders, numbers, ...findWholes(active) };
}

/** Number groups by their first leaf, as the program does. */
const groupNumbers = holders => new Map([...new Set(holders)].map((unit, number) => [unit, number]));

/** Follow the merges of the active units. */
function findWholes(active) {
  const known = new Set(active);
  const wholes = new Map();
  const parts = new Map();
  for (const unit of active) {
    let whole = unit;
    let steps = 0;
    for (; steps < active.length && known.has(edits.merged[whole]); steps += 1) whole = edits.merged[whole];
    wholes.set(unit, whole);
    if (!parts.has(whole)) parts.set(whole, [whole]);
    if (unit !== whole) parts.get(whole).push(unit);
  }
  return { wholes, parts, roots: active.filter(unit => wholes.get(unit) === unit) };
}

/** Return the active unit of an image with this own cluster and leaf. */
function holder(own, leaf) {
  if (level() !== null) return shapeNow().holders[leaf];
  return isOpen(own) ? shapeNow().holders[homeOf(own, leaf)] : own;
}

/** Return the cluster of the page that a shown picture is in. */
const wholeOf = index => root(holderOf(index));
const holderOf = index => holder(facts(index).cluster, facts(index).leaf);

/** Return the nearest active unit at or above a unit; null if there is none. */
function activeAbove(unit) {
  let above = unit;
  while (above !== null && !shapeNow().isActive.has(above)) above = clusters[above].parent;
  return above;
}

/** Return the active unit that stands for any other: the one above it, or the one of its most typical image. */
function heir(unit) {
  const [typical] = clusters[unit].typical;
  return activeAbove(unit) ?? (typical === undefined ? shapeNow().active[0] : holderOf(typical));
}

/** Return the number of a cluster as it is shown: 3, or 3a and 3b for its parts, or the number of a group. */
function numberOf(unit) {
  const { kind, parent } = clusters[unit];
  if (kind === KIND.own) return String(unit);
  if (kind === KIND.group) return String(shapeNow().numbers.get(unit) ?? shapeNow().numbers.get(heir(unit)));
  return `${numberOf(parent)}${clusters[parent].children[0] === unit ? "a" : "b"}`;
}

const hueOf = unit => (isGroup(unit) ? Number(numberOf(unit)) : unit) % HUES;

/** Return the changes that drop all merges from and into some units, which are about to leave the page. */
function unmerged(units) {
  const leaving = new Set(units.map(Number));
  return Object.entries(edits.merged)
    .filter(([from, into]) => leaving.has(Number(from)) || leaving.has(into)).map(([from]) => ["merged", from, null]);
}

function splitUnit(unit) {
  const opened = isOpenByLevel(unit) ? null : TO_OPEN;
  change([["open", unit, opened], ...unmerged([unit])], `${label(unit)} is now two clusters.`);
}

/** Close a unit: all active units below it become one again. */
function joinUnit(unit) {
  const below = [];
  eachBelow(unit, one => below.push(one));
  const reopened = below.filter(one => one in edits.open).map(one => ["open", one, null]);
  const changes = [...unmerged(below), ...reopened, ["open", unit, isOpenByLevel(unit) ? TO_CLOSE : null]];
  change(changes, "The parts are one cluster again.");
}

/** Cut the tree into groups; null goes back to the run's own clusters. */
function cutAt(groups) {
  const known = Object.keys(edits.open).filter(unit => isGroup(unit)).map(unit => ["open", unit, null]);
  const groupsMerged = unmerged(Object.keys(edits.merged).filter(unit => isGroup(unit)));
  const message = groups === null ? "These are the run's own clusters." : `The tree is cut into ${groups} groups.`;
  change([["cut", "level", groups], ...known, ...groupsMerged], message);
}

/** Return whether the clusters are other than the run's own, or merges of these. */
const isRegrouped = () => level() !== null || shapeNow().active.length > OWN;
