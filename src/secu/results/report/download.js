// ---------------------------------------------------------------------------------------------------------------
// Download: one row per image, with the edits. With very many images the page does not hold every name; the reader
// then opens the table that does, and gets it back with the edits.

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/** Keep spreadsheets from reading a field as a formula; numbers stay numbers. The same as disarm in cells.py. */
const disarm = text => (/^'*[=+\-@\t\r]/.test(text) && !NUMBER.test(text) ? `'${text}` : text);
const rearm = text => (/^'+[=+\-@\t\r]/.test(text) ? text.slice(1) : text);

function csvField(value) {
  const text = disarm(String(value));
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/**
 * Return the table of images, each given as [id, cluster, whether it is marked as wrong, leaf]. If clusters were split
 * or the tree was cut, there is a column for the leaf, and images of a cluster may be part of different ones.
 */
function csv(list) {
  const known = new Map(shapeNow().active.map(unit => [unit, [nameOf(unit), numberOf(root(unit))]]));
  const leafCells = isRegrouped() ? leaf => [tree.numbers[leaf]] : () => [];
  const rows = list.map(([id, cluster, wrong, leaf]) =>
    [id, cluster, ...known.get(holder(cluster, leaf)), wrong ? "yes" : "no", ...leafCells(leaf)]);
  const header = ["id", "cluster", "name", "merged_cluster", "marked_wrong", ...(isRegrouped() ? ["leaf"] : [])];
  return [header, ...rows].map(row => `${row.map(csvField).join(",")}\r\n`).join("");
}

function save(list) {
  const address = URL.createObjectURL(new Blob([csv(list)], { type: "text/csv;charset=utf-8" }));
  h("a", { href: address, download: "names.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
  toast(`Downloaded names.csv with ${plural(list.length, "row", "rows")}.`, false);
}

function download() {
  if (content.ids) {
    const leaves = leafOfRows();
    save(content.ids.map((id, index) => [id, content.cluster[index], isWrong(index), leaves[index]]));
    return;
  }
  $("table").value = "";
  $("table-note").hidden = true;
  $("table-dialog").showModal();
}

/** Return whether an image with this own cluster and leaf can be placed. */
const isKnown = (own, leaf) => leaf !== undefined && holder(own, leaf) !== undefined;

function readCsv(text) {
  const rows = [[]];
  for (const [, quoted, plain, end] of text.matchAll(/(?:"([^"]*(?:""[^"]*)*)"|([^",\r\n]*))(,|\r?\n|$)/g)) {
    rows.at(-1).push(quoted === undefined ? plain : quoted.replaceAll('""', '"'));
    if (end !== ",") rows.push([]);
  }
  return rows.filter(row => row.length > 1);
}

/** Shorten a name as the page's own names were; the same as shorten in limits.py. */
function asShown(name) {
  const letters = Array.from(name);
  const half = pictures.nameLength / 2;
  if (letters.length <= pictures.nameLength) return name;
  return `${letters.slice(0, half - 1).join("")}…${letters.slice(-half).join("")}`;
}

/** Return a function from id and row to a picture; shortened names may be equal, so that the order of rows decides. */
function pictureFinder() {
  const places = new Map(pictures.name.map((name, number) => [name, number]));
  if (pictures.nameLength === null) return name => places.get(name);
  return (name, row) => (pictures.name[placeOf.get(row)] === asShown(name) ? placeOf.get(row) : undefined);
}

/** Return a table with the edits, if it belongs to this report: it must agree with what the page knows. */
async function takeTable(file) {
  const [header = [], ...rows] = readCsv(await file.text());
  const id = header.indexOf("id");
  const cluster = header.indexOf("cluster");
  const leaf = header.indexOf("leaf");
  const places = new Map((tree?.numbers ?? []).map((number, place) => [number, place]));
  const find = pictureFinder();
  const list = rows.map((row, number) => {
    const name = rearm(row[id] ?? "");
    const picture = find(name, number);
    const itsLeaf = places.get(Number(row[tree?.isOwn ? cluster : leaf]));
    return [name, Number(row[cluster]), isWrong(pictures.index[picture]), itsLeaf, pictures.cluster[picture]];
  });
  const known = list.filter(([, number, , , expected]) => number === expected);
  const isPlaced = ([, number, , itsLeaf]) => number in clusters && number < OWN
    && (!isRegrouped() || isKnown(number, itsLeaf));
  const possible = list.every(isPlaced);
  if (!possible || known.length < pictures.name.length / 2) {
    $("table-note").hidden = false;
    return;
  }
  $("table-dialog").close();
  save(list);
}

$("table").addEventListener("change", event => { if (event.target.files.length) takeTable(event.target.files[0]); });
$("close-table").addEventListener("click", () => $("table-dialog").close());
