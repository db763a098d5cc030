// ---------------------------------------------------------------------------------------------------------------
// Units: everything that can be a cluster of the page. First come the run's own clusters, by number; then the parts
// into which the leaves of the tree split them; then the groups of the tree, by node. All have the fields of a card.
// A unit with children can be opened, which puts its children in its place.

const { tree } = content;
const OWN = clusters.length;
const LEAVES = tree ? tree.numbers.length : 0;
const MOST_TYPICAL = Math.max(4, ...clusters.map(cluster => cluster.typical.length));
const MOST_CLASSES = 12;
const KIND = { own: "own", part: "part", group: "group" };
let firstGroup = OWN; // the unit of the first leaf

/** Return the mean of two units' values by size; null if neither has one. */
function blend(a, b, quantity) {
  const known = [a, b].filter(unit => unit[quantity] !== null && unit.size);
  const size = known.reduce((sum, unit) => sum + unit.size, 0);
  return size ? known.reduce((sum, unit) => sum + unit.size * unit[quantity], 0) / size : null;
}

/** Return items of two lists in turn. */
function inTurn(a, b, most) {
  const turns = Array.from({ length: Math.max(a.length, b.length) }, (_, place) => [a[place], b[place]]);
  return turns.flat().filter(item => item !== undefined).slice(0, most);
}

function addClasses(a, b) {
  const counts = new Map(a);
  for (const [name, many] of b) counts.set(name, (counts.get(name) ?? 0) + many);
  return [...counts].sort((one, other) => other[1] - one[1]).slice(0, MOST_CLASSES);
}

function addUnit(unit) {
  clusters.push({ uncertain: [], outlying: [], similar: [], children: [], parent: null, ...unit });
  return clusters.length - 1;
}

/** Add the unit that two others are the children of. */
function join(left, right, kind) {
  const [a, b] = [clusters[left], clusters[right]];
  const whole = addUnit({
    ...kind,
    size: a.size + b.size,
    outliers: a.outliers + b.outliers,
    cohesion: blend(a, b, "cohesion"),
    confidence: blend(a, b, "confidence"),
    words: a.words.filter(word => b.words.includes(word)),
    classes: addClasses(a.classes, b.classes),
    typical: inTurn(a.typical, b.typical, MOST_TYPICAL),
    children: [left, right],
  });
  a.parent = whole;
  b.parent = whole;
  return whole;
}

function addPart(leaf) {
  const { size, cohesion, confidence, outliers, classes, typical } = tree.parts;
  return addUnit({
    kind: KIND.part, own: tree.parent[leaf], leaf, size: size[leaf], cohesion: cohesion[leaf], outliers: outliers[leaf],
    confidence: confidence[leaf], classes: classes[leaf], typical: typical[leaf], words: tree.leaves.words[leaf],
  });
}

/** Add the parts of all own clusters: for each, the tree as far as it concerns the cluster's own leaves. */
function addParts() {
  const leavesOf = Map.groupBy(tree.parent.keys(), leaf => tree.parent[leaf]);
  const isSplit = own => own >= 0 && leavesOf.get(own).length > 1;
  const below = tree.parent.map((own, leaf) => new Map(isSplit(own) ? [[own, addPart(leaf)]] : []));
  for (const [left, right] of tree.merges) {
    const swap = below[left].size < below[right].size; // the larger one is kept: each part moves only a few times
    const [kept, moved] = swap ? [below[right], below[left]] : [below[left], below[right]];
    for (const [own, unit] of moved) {
      const other = kept.get(own);
      const pair = swap ? [unit, other] : [other, unit];
      kept.set(own, other === undefined ? unit : join(...pair, { kind: KIND.part, own }));
    }
    below.push(kept);
  }
  for (const [own, whole] of below.at(-1)) {
    clusters[own].children = clusters[whole].children;
    for (const child of clusters[own].children) clusters[child].parent = own;
  }
}

/** Add the groups of the tree: its leaves, then its merges. */
function addGroups() {
  firstGroup = clusters.length;
  const { size, cohesion, classes, typical, words } = tree.leaves;
  tree.numbers.forEach((_, leaf) => addUnit({
    kind: KIND.group, leaf, size: size[leaf], cohesion: cohesion[leaf], confidence: null, outliers: 0,
    classes: classes[leaf], typical: typical[leaf], words: words[leaf],
  }));
  for (const [left, right] of tree.merges) join(firstGroup + left, firstGroup + right, { kind: KIND.group });
}

for (const cluster of clusters) Object.assign(cluster, { kind: KIND.own, children: [], parent: null });
if (tree) {
  addParts();
  addGroups();
}

const ROOT = clusters.length - 1; // of the tree, if there is one
const strays = new Map((tree?.strays ?? []).map(([own, leaf, home]) => [own * LEAVES + leaf, home]));

/** Return the part of an own cluster, as a leaf, that an image with this leaf is in. */
const homeOf = (own, leaf) => (tree.parent[leaf] === own ? leaf : strays.get(own * LEAVES + leaf));

/** Return from how many groups on a cut of the tree keeps the children of a group apart. */
const apartFrom = unit => (clusters[unit].children.length ? ROOT - unit + 2 : Infinity);

/** Call a function for a unit and everything below it. */
function eachBelow(unit, visit) {
  const stack = [unit];
  while (stack.length) {
    const next = stack.pop();
    visit(next);
    stack.push(...clusters[next].children);
  }
}

/** Call a function for each leaf of a part or a group. An own cluster has none: its images are found without. */
function eachLeaf(unit, visit) {
  if (clusters[unit].kind === KIND.own) return;
  eachBelow(unit, one => { if (clusters[one].leaf !== undefined) visit(clusters[one].leaf); });
}

let leavesByRow = null;

/** Return the leaf of every image, by row; the page holds them if it holds the names of all images. */
function leafOfRows() {
  leavesByRow ??= decodeLeaves();
  return leavesByRow;
}

function decodeLeaves() {
  if (!tree) return content.cluster;
  if (tree.isOwn) {
    const places = new Map(tree.numbers.map((number, leaf) => [number, leaf]));
    return content.cluster.map(cluster => places.get(cluster));
  }
  const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
  const values = new Map([...digits].map((digit, value) => [digit, value]));
  const width = content.leaf.length / content.images;
  const valueAt = (row, place) => values.get(content.leaf[row * width + place]);
  return content.cluster.map((_, row) => {
    let leaf = 0;
    for (let place = width - 1; place >= 0; place -= 1) leaf = 64 * leaf + valueAt(row, place);
    return leaf;
  });
}
