// ---------------------------------------------------------------------------------------------------------------
// Map: points on a canvas. World coordinates run from 0 to 1; `camera` says how they fall onto the canvas.

const HUES = 10;
const canvas = $("map-canvas");
const points = content.map.index.map((index, place) => ({
  index, x: content.map.x[place] / 10_000, y: content.map.y[place] / 10_000,
  cluster: facts(index).cluster, sure: facts(index).sure ?? 0,
}));
const camera = { zoom: 1, x: 0.5, y: 0.5 }; // the world point in the middle
const chosen = { cluster: null, point: null, pictures: false, colour: "cluster" };
const MARGIN = 28, MOST_ZOOM = 60, MOST_LABELS = 50;
let colours = {}, framePending = false;

/** Colours come from the style sheet, so that both themes have their own. */
function readColours() {
  const read = name => {
    const probe = h("span", { class: name });
    canvas.parentElement.append(probe);
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
  };
  colours = Object.fromEntries(["ink", "surface", "low", "high"].map(name => [name, read(name)]));
  colours.hues = Array.from({ length: HUES }, (_, hue) => read(`hue-${hue}`));
}

/** Pixels a unit of the world takes, across and down; a wide canvas stretches the map a little to fill it. */
function scale() {
  const { width, height } = pixelsOf(canvas), short = Math.min(width, height);
  return [width, height].map(side => (Math.min(side, 1.6 * short) - 2 * MARGIN) * camera.zoom);
}

function toScreen(point) {
  const { width, height } = pixelsOf(canvas), [across, down] = scale();
  return [width / 2 + (point.x - camera.x) * across, height / 2 + (point.y - camera.y) * down];
}

function redrawMap() {
  if (framePending) return;
  framePending = true;
  requestAnimationFrame(() => { framePending = false; drawMap(); });
}

function drawMap() {
  const { width, height } = pixelsOf(canvas);
  const dense = window.devicePixelRatio || 1;
  if (!width) return;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  const pen = canvas.getContext("2d");
  pen.scale(dense, dense);
  const placed = points.map(point => [point, ...toScreen(point)])
    .filter(([, x, y]) => x > -40 && y > -40 && x < width + 40 && y < height + 40);
  const isFaint = point => chosen.cluster !== null && root(point.cluster) !== chosen.cluster;
  placed.sort((a, b) => isFaint(b[0]) - isFaint(a[0])); // the highlighted ones on top
  (chosen.pictures ? drawPictures : drawDots)(pen, placed, isFaint);
  if (chosen.colour === "cluster") drawLabels(pen, isFaint);
  if (chosen.point) drawRing(pen, ...toScreen(chosen.point));
  canvas.style.touchAction = camera.zoom > 1 ? "none" : "pan-y"; // nothing to pan: let the page scroll
}

function drawDots(pen, placed, isFaint) {
  const radius = Math.min(7, 2.6 + Math.sqrt(camera.zoom) * 0.7) * (points.length < 600 ? 1.35 : 1);
  for (const [point, x, y] of placed) {
    pen.globalAlpha = isFaint(point) ? 0.12 : 0.85;
    pen.fillStyle = colourOf(point);
    pen.beginPath();
    pen.arc(x, y, radius, 0, 7);
    pen.fill();
  }
  pen.globalAlpha = 1;
}

function colourOf(point) {
  if (chosen.colour === "cluster") return colours.hues[root(point.cluster) % HUES];
  return `color-mix(in oklab, ${colours.high} ${Math.round(100 * point.sure)}%, ${colours.low})`;
}

/** Pictures where there is room for them: a grid of places, first come first served, dots for the others. */
function drawPictures(pen, placed, isFaint) {
  const side = Math.min(72, 22 + 6 * camera.zoom), taken = new Set(), crowd = [], shown = [];
  for (const item of [...placed].reverse()) {
    const key = `${Math.round(item[1] / (side + 2))} ${Math.round(item[2] / (side + 2))}`;
    (taken.has(key) ? crowd : shown).push(item);
    taken.add(key);
  }
  drawDots(pen, crowd.reverse(), isFaint);
  pen.imageSmoothingEnabled = !content.pixelated;
  for (const [point, x, y] of shown) {
    const { sheet, image, x: left, y: top } = cellOf(point.index);
    if (!image.complete) image.ready.then(redrawMap);
    const fit = side / Math.max(sheet.width, sheet.height), w = sheet.width * fit, t = sheet.height * fit;
    pen.globalAlpha = isFaint(point) ? 0.15 : 1;
    if (image.complete) pen.drawImage(image, left, top, sheet.width, sheet.height, x - w / 2, y - t / 2, w, t);
    pen.strokeStyle = colourOf(point);
    pen.lineWidth = 2;
    pen.strokeRect(x - w / 2, y - t / 2, w, t);
  }
  pen.globalAlpha = 1;
}

/** Names in the middle of their clusters, the largest first, none over another. */
function drawLabels(pen, isFaint) {
  const boxes = [], { width, height } = pixelsOf(canvas);
  pen.font = `600 12px ${getComputedStyle(document.body).fontFamily}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (const { cluster, x, y } of labelSpots()) {
    const [left, top] = toScreen({ x, y });
    const text = oneLine(nameOf(cluster) || String(cluster), 24), half = pen.measureText(text).width / 2 + 7;
    const box = [left - half, top - 10, left + half, top + 10];
    const overlaps = other => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3];
    if (isFaint({ cluster }) || !overlaps([0, 0, width, height]) || boxes.some(overlaps)) continue;
    if (boxes.push(box) > MOST_LABELS) return;
    pen.fillStyle = colours.surface;
    pen.globalAlpha = 0.9;
    pen.beginPath();
    pen.roundRect(box[0], box[1], 2 * half, 20, 10);
    pen.fill();
    pen.globalAlpha = 1;
    pen.fillStyle = colours.ink;
    pen.fillText(text, left, top + 0.5);
  }
}

/** The point of each cluster nearest to its median: in the thick of it, even where a cluster lies in two places. */
function labelSpots() {
  const groups = Map.groupBy(points, point => root(point.cluster));
  return [...groups].sort((a, b) => b[1].length - a[1].length).map(([cluster, list]) => {
    const middle = axis => list.map(point => point[axis]).sort((a, b) => a - b)[list.length >> 1];
    const x = middle("x"), y = middle("y"), spot = nearest(list, point => Math.hypot(point.x - x, point.y - y));
    return { cluster, x: spot.x, y: spot.y };
  });
}

function nearest(list, distance) {
  let best = null, least = Infinity;
  for (const item of list) {
    const here = distance(item);
    if (here < least) [best, least] = [item, here];
  }
  return best;
}

function drawRing(pen, x, y) {
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 2;
  pen.beginPath();
  pen.arc(x, y, 9, 0, 7);
  pen.stroke();
}
