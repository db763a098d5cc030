// ---------------------------------------------------------------------------------------------------------------
// Charts: the bars of the overview and the training curves.

function drawSizes() {
  const order = rootsLeft().map(cluster => [cluster, sizeOf(cluster)]).sort((a, b) => b[1] - a[1]);
  const most = order[0][1];
  const least = order.at(-1)[1];
  const text = (cluster, size) => `${label(cluster)}: ${imageCount(size)}`;
  const isDense = order.length > 60;
  const bars = order.map(([cluster, size]) =>
    bar(size / most, text(cluster, size), isDense ? "accent" : `hue-${hueOf(cluster)}`, () => goToCard(cluster)));
  $("sizes").replaceChildren(...bars);
  $("sizes").setAttribute("role", "img");
  $("sizes").setAttribute("aria-label", `Cluster sizes from ${count(least)} to ${imageCount(most)}`);
  $("sizes").classList.toggle("dense", isDense);
  const few = order.length <= 20;
  const under = few ? order.map(([cluster]) => numberOf(cluster)) : ["largest", "smallest"];
  $("sizes-axis").classList.toggle("even", few);
  $("sizes-axis").replaceChildren(...under.map(word => h("span", {}, word)));
}

function drawConfidence() {
  const counts = $("confidence").dataset.counts.split(",").map(Number);
  const most = Math.max(...counts, 1);
  const text = (many, tenth) => `${10 * tenth} to ${10 * tenth + 10}% confidence: ${imageCount(many)}`;
  $("confidence").replaceChildren(...counts.map((many, tenth) => bar(many / most, text(many, tenth), "accent")));
  $("confidence").setAttribute("role", "img");
  $("confidence").setAttribute("aria-label", counts.map(text).join("; "));
}

function bar(height, title, hue, onclick = null) {
  const kind = onclick ? "bar-column pick" : "bar-column";
  const column = h("span", { class: kind, title, onclick }, h("span", { class: hue }));
  column.firstChild.style.height = `${Math.max(height * 100, height ? 1.5 : 0)}%`;
  return column;
}

// Curves: what is drawn, how it is explained, and how its numbers are formatted.

const whole = value => count(Math.round(value));
const LOSSES = { loss: "Images", center_loss: "Centers" };
const words = name => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");
const CHARTS = [
  {
    title: "Loss", help: "What training minimizes. It need not reach zero.",
    lines: Object.fromEntries(content.losses.map(name => [name, LOSSES[name] ?? words(name)])),
    format: value => (value >= 100 ? whole(value) : value.toFixed(2)),
  },
  {
    title: "Cluster sizes", help: "If the two curves diverge, one cluster is absorbing the others.",
    lines: { largest: "Largest", smallest: "Smallest" }, format: whole,
  },
  {
    title: "Images that changed cluster", help: "Share of images since the previous epoch. If it ends low, the clusters have settled.",
    lines: { changed: "Changed" }, format: value => percent(value),
  },
  {
    title: "Agreement with true labels", help: "For comparison only, never used for training.",
    lines: { acc: "ACC", nmi: "NMI", ari: "ARI" }, format: value => value.toFixed(2),
  },
];
const FRAME = { height: 210, left: 46, right: 8, top: 12, bottom: 26 };

/** Draw all curves at the width that the page gives them; called again when that changes. */
function drawCurves() {
  const { curves } = content;
  const column = parseFloat(getComputedStyle($("charts")).gridTemplateColumns);
  const width = Math.max(200, Math.floor(column - 42)); // minus a panel's padding and border
  $("charts").replaceChildren();
  for (const chart of CHARTS) {
    const known = Object.entries(chart.lines).filter(([key]) => curves[key]);
    const series = known.map(([key, name], place) => ({ name, values: curves[key], line: `line-${place % 3}` }));
    if (series.length) $("charts").append(curveChart(chart, series, curves.epoch, width));
  }
  if (!curves.epoch.length) $("charts").append(h("p", { class: "muted" }, "No epochs were recorded."));
}

function curveChart({ title, help, format }, series, epochs, width) {
  const { x, y, range } = axes(series.flatMap(one => one.values), epochs, width);
  const cursor = svg("line", { class: "cursor", y1: FRAME.top, y2: FRAME.height - FRAME.bottom });
  const legend = h("p", { class: "legend" });
  const ends = series.map(one => `${one.name} ${format(lastOf(one.values) ?? 0)} at the end`).join(", ");
  const shape = { width, height: FRAME.height, class: "curve", role: "img", "aria-label": `${title}: ${ends}` };
  const drawing = svg("svg", shape,
    gridLines(range, y, width, format), epochNames(epochs, x), cursor,
    series.map(one => svg("path", { class: one.line, d: pathOf(one.values, epochs, x, y) })));
  const read = place => {
    legend.replaceChildren(...legendOf(series, epochs, place, format));
    cursor.style.visibility = place === null ? "hidden" : "visible";
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(epochs[place ?? 0]));
  };
  drawing.addEventListener("pointermove", event => {
    const spot = event.clientX - drawing.getBoundingClientRect().left;
    read(nearest([...epochs.keys()], place => Math.abs(x(epochs[place]) - spot)));
  });
  drawing.addEventListener("pointerleave", () => read(null));
  read(null);
  const caption = h("figcaption", {}, h("h3", {}, title), h("p", { class: "muted" }, help));
  return h("figure", { class: "panel" }, caption, drawing, legend);
}

/** Return the values at one epoch, or at the end. */
function legendOf(series, epochs, place, format) {
  const value = one => (place === null ? lastOf(one.values) : one.values[place]);
  const key = one => h("span", {}, h("span", { class: `key ${one.line}`, "aria-hidden": "true" }), `${one.name} `,
    h("strong", {}, value(one) === null ? "–" : format(value(one))));
  const when = h("span", { class: "muted" }, place === null ? "At the end" : `Epoch ${epochs[place] + 1}`);
  return [when, ...series.map(key)];
}

/** Map epochs and values onto the drawing; zero is included unless all values are far above it. */
function axes(values, epochs, width) {
  const known = values.filter(value => value !== null);
  let low = Math.min(...known);
  let high = Math.max(...known);
  if (low > 0 && low < high / 2) low = 0;
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const first = epochs[0];
  const last = epochs.at(-1);
  const across = width - FRAME.left - FRAME.right;
  const down = FRAME.height - FRAME.top - FRAME.bottom;
  return {
    range: [low, high],
    x: epoch => FRAME.left + (last > first ? (epoch - first) / (last - first) : 0.5) * across,
    y: value => FRAME.top + (1 - (value - low) / (high - low)) * down,
  };
}

function gridLines([low, high], y, width, format) {
  const raw = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(digit => digit * power).find(size => size >= raw);
  const values = Array.from({ length: 8 }, (_, number) => (Math.ceil(low / step) + number) * step);
  return values.filter(value => value <= high + step * 1e-6).map(value => [
    svg("line", { class: "grid-line", x1: FRAME.left, x2: width - FRAME.right, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: FRAME.left - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)),
  ]);
}

function epochNames(epochs, x) {
  const name = (epoch, anchor) =>
    svg("text", { class: "tick", x: x(epoch), y: FRAME.height - 6, "text-anchor": anchor }, `epoch ${epoch + 1}`);
  return epochs.length > 1 ? [name(epochs[0], "start"), name(epochs.at(-1), "end")] : [name(epochs[0], "middle")];
}

/** Return a line through all known values; epochs without one are skipped. */
function pathOf(values, epochs, x, y) {
  const spot = (value, place) => `${x(epochs[place]).toFixed(1)} ${y(value).toFixed(1)}`;
  const spots = values.flatMap((value, place) => (value === null ? [] : spot(value, place)));
  return `M${spots.join("L")}${spots.length === 1 ? "h.1" : ""}`;
}

const lastOf = values => values.findLast(value => value !== null) ?? null;

/** Draw the same numbers as a table, when it is first opened. */
function drawNumbers() {
  const titles = {
    epoch: "Epoch", loss: "Loss", center_loss: "Center loss", largest: "Largest", smallest: "Smallest",
    changed: "Changed", lr: "Learning rate", acc: "ACC", nmi: "NMI", ari: "ARI",
  };
  const names = Object.keys(content.curves);
  const rounded = (name, value) => (name === "epoch" ? value + 1 : Number(value.toPrecision(4)));
  const text = (name, value) => (value === null ? "" : String(rounded(name, value)));
  const line = place => h("tr", {}, names.map(name => h("td", {}, text(name, content.curves[name][place]))));
  const lines = content.curves.epoch.map((_, place) => line(place));
  $("numbers").append(table("plain", names.map(name => titles[name] ?? words(name)), lines));
}

function table(kind, head, rows) {
  const cells = head.map(cell => h("th", { scope: "col" }, cell));
  return h("table", { class: kind }, h("thead", {}, h("tr", {}, cells)), h("tbody", {}, rows));
}
