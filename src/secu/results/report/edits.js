// ---------------------------------------------------------------------------------------------------------------
// Edits: names, merges, marks, and where the tree is cut (cut.js). Maps from a key to a value; every edit is a list of
// changes to them, and the previous values are kept, so that everything can be undone, even after a reload.

const KEY = `secu-report-${content.fingerprint}`;
const MOST_UNDO = 500;
const edits = { cut: {}, open: {}, names: {}, merged: {}, wrong: {}, undo: [] };
const listeners = [];

/** Make changes [kind, key, value]; an empty value removes an entry. */
function change(changes, message) {
  const before = changes.map(([kind, key]) => [kind, key, edits[kind][key] ?? null]);
  apply(changes);
  edits.undo = [...edits.undo, before].slice(-MOST_UNDO);
  publish(message);
}

function undo() {
  const before = edits.undo.pop();
  if (!before) return;
  apply([...before].reverse());
  publish("Undone.", false);
}

function apply(changes) {
  for (const [kind, key, value] of changes) {
    if (value === null || value === "" || value === false) delete edits[kind][key];
    else edits[kind][key] = value;
  }
  shape = null;
}

function publish(message, offerUndo = true) {
  if (!memory.write(KEY, JSON.stringify(edits))) $("blocked").hidden = false;
  listeners.forEach(listener => listener());
  toast(message, offerUndo);
}

/** Load stored edits; whatever cannot be an edit of this report is ignored. */
function restoreEdits() {
  let stored = {};
  try { stored = JSON.parse(memory.read(KEY)) ?? {}; } catch { /* not ours: start fresh */ }
  const isPlace = (key, list) => /^\d+$/.test(key) && Number(key) < list.length;
  const valid = {
    cut: (key, value) => key === "level" && Number.isInteger(value) && value >= 2 && value <= LEAVES,
    open: (key, value) => isPlace(key, clusters) && (value === TO_OPEN || value === TO_CLOSE),
    names: (key, value) => isPlace(key, clusters) && typeof value === "string",
    merged: (key, value) => isPlace(key, clusters) && isPlace(value, clusters) && typeof value === "number",
    wrong: (key, value) => placeOf.has(Number(key)) && value === true,
  };
  for (const kind of Object.keys(valid)) {
    for (const [key, value] of Object.entries(stored[kind] ?? {})) {
      if (!valid[kind](key, value) || (kind === "merged" && leadsTo(value, Number(key)))) continue;
      apply([[kind, key, value]]);
    }
  }
  const isChange = ([kind, key, value]) => kind in valid && (value === null || valid[kind](key, value));
  const isStep = step => Array.isArray(step) && step.every(item => Array.isArray(item) && isChange(item));
  edits.undo = Array.isArray(stored.undo) && stored.undo.every(isStep) ? stored.undo : [];
  $("blocked").hidden = memory.write(KEY, JSON.stringify(edits));
}

/** Return whether following the merges from one cluster leads to another, or back to it. */
function leadsTo(from, to) {
  for (let cluster = from; cluster !== undefined; cluster = edits.merged[cluster]) if (cluster === to) return true;
  return false;
}

/** Return the cluster of the page that a unit is now part of: itself, unless it was merged, split or joined. */
function root(unit) {
  const { wholes } = shapeNow();
  return wholes.get(unit) ?? wholes.get(heir(unit));
}

/** Return all clusters that are merged with this one, itself first. */
const parts = cluster => shapeNow().parts.get(cluster) ?? [cluster];

/** Return the reader's name for a cluster, or that of a part where the whole has none; may be empty. */
function nameOf(cluster) {
  const whole = root(cluster);
  return parts(whole).map(part => edits.names[part]).find(Boolean) ?? "";
}

function label(cluster) {
  return nameOf(cluster) || `Cluster ${numberOf(root(cluster))}`;
}

/** Return name and number, for lists to choose from. */
function fullLabel(cluster) {
  return `${oneLine(label(cluster), 40)}${nameOf(cluster) ? ` (cluster ${numberOf(cluster)})` : ""}`;
}

const sizeOf = cluster => parts(cluster).reduce((sum, part) => sum + clusters[part].size, 0);
const rootsLeft = () => shapeNow().roots;
const isWrong = index => index in edits.wrong;

function rename(cluster, text) {
  const name = text.trim();
  if (name === nameOf(cluster)) return;
  // An empty name would reveal the name of a part, so the names of the parts are cleared as well.
  const cleared = parts(cluster).filter(part => edits.names[part]).map(part => ["names", part, null]);
  const number = numberOf(cluster);
  const message = name ? `Cluster ${number} is now “${name}”.` : `The name of cluster ${number} was removed.`;
  change([...cleared, ["names", cluster, name]], message);
}

function merge(from, into) {
  const message = `${label(from)} is now part of ${label(into)}.`;
  change([["merged", root(from), root(into)]], message);
}

function separate(cluster) {
  change([["merged", cluster, null]], `Cluster ${numberOf(cluster)} is separate again.`);
}

function toggleWrong(index) {
  const wrong = !isWrong(index);
  change([["wrong", index, wrong]], wrong ? "Marked as wrong." : "No longer marked as wrong.");
}

function startOver() {
  const kinds = ["cut", "open", "names", "merged", "wrong"];
  change(kinds.flatMap(kind => Object.keys(edits[kind]).map(key => [kind, key, null])), "All changes were removed.");
}

let toastTimer = 0;

function toast(message, offerUndo) {
  announce(message);
  $("status").textContent = message;
  $("toast-undo").hidden = !offerUndo;
  $("toast").hidden = Boolean(document.querySelector("dialog[open]")); // it would be behind the dialog
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { $("toast").hidden = true; }, 6000);
}
