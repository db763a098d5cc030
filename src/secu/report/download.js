// ---------------------------------------------------------------------------------------------------------------
// Download: a row a picture, with the edits. Of very many pictures the page does not hold every name; the reader then
// hands in the table that does, and it comes back with the edits.

/** A spreadsheet must take every field as text, so quotes are doubled and a formula is disarmed. */
function csvField(value) {
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** The table of pictures, each [id, cluster, whether it is marked as wrong]. */
function csv(list) {
  const wholes = clusters.map((_, cluster) => [nameOf(cluster), root(cluster)]);
  const rows = list.map(([id, cluster, wrong]) => [id, cluster, ...wholes[cluster], wrong ? "yes" : "no"]);
  const header = ["id", "cluster", "name", "merged_cluster", "marked_wrong"];
  return [header, ...rows].map(row => `${row.map(csvField).join(",")}\r\n`).join("");
}

function save(list) {
  const address = URL.createObjectURL(new Blob([csv(list)], { type: "text/csv;charset=utf-8" }));
  h("a", { href: address, download: "names.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
  toast(`names.csv: ${plural(list.length, "row", "rows")}.`, false);
}

function download() {
  if (content.ids) {
    save(content.ids.map((id, index) => [id, content.cluster[index], isWrong(index)]));
    return;
  }
  $("table").value = "";
  $("table-note").hidden = true;
  $("bring").showModal();
}

function readCsv(text) {
  const rows = [[]];
  for (const [, quoted, plain, end] of text.matchAll(/(?:"([^"]*(?:""[^"]*)*)"|([^",\r\n]*))(,|\r?\n|$)/g)) {
    rows.at(-1).push(quoted === undefined ? plain : quoted.replaceAll('""', '"'));
    if (end !== ",") rows.push([]);
  }
  return rows.filter(row => row.length > 1);
}

/** Give a table back with the edits, if it is the one of this report: what is known of its pictures must be in it. */
async function takeTable(file) {
  const [header = [], ...rows] = readCsv(await file.text());
  const [id, cluster] = [header.indexOf("id"), header.indexOf("cluster")];
  const place = new Map(pictures.name.map((name, number) => [name, number]));
  const list = rows.map(row => [row[id], Number(row[cluster]), isWrong(pictures.index[place.get(row[id])])]);
  const known = list.filter(([name, number]) => pictures.cluster[place.get(name)] === number);
  const possible = list.every(([, number]) => number in clusters);
  if (!possible || known.length < pictures.name.length / 2) {
    $("table-note").hidden = false;
    return;
  }
  $("bring").close();
  save(list);
}

$("table").addEventListener("change", event => { if (event.target.files.length) takeTable(event.target.files[0]); });
$("close-bring").addEventListener("click", () => $("bring").close());
