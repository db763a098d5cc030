// ---------------------------------------------------------------------------------------------------------------
// Map: points on a canvas. World coordinates run from 0 to 1; `camera` maps them onto the canvas.

const HUES = 10;
const MAP_UNITS = 10_000;
const canvas = $("map-canvas");
const imagePoints = content.map.index.map((index, place) => ({
  index, x: content.map.x[place] / MAP_UNITS, y: content.map.y[place] / MAP_UNITS,
  cluster: facts(index).cluster, leaf: facts(index).leaf, confidence: facts(index).confidence ?? 0,
}));
let points = imagePoints; // or those of the clusters (dots.js)
const camera = { zoom: 1, x: 0.5, y: 0.5 }; // the world point in the middle of the canvas
const chosen = { cluster: null, point: null, pictures: false, color: "cluster", kind: "images" };
const MARGIN = 28;
const MOST_ZOOM = 60;
const MOST_LABELS = 50;
let colors = {};
let framePending = false;

/** Read the colors from the style sheet, since each theme has its own. */
function readColors() {
  const read = name => {
    const probe = h("span", { class: name });
    canvas.parentElement.append(probe);
    const { color } = getComputedStyle(probe);
    probe.remove();
    return color;
  };
  colors = Object.fromEntries(["ink", "surface", "low", "high"].map(name => [name, read(name)]));
  colors.hues = Array.from({ length: HUES }, (_, hue) => read(`hue-${hue}`));
}

/** Return the pixels per world unit, across and down; a wide canvas stretches the map a little to fill it. */
function scale() {
  const { width, height } = pixelsOf(canvas);
  const short = Math.min(width, height);
  return [width, height].map(side => (Math.min(side, 1.6 * short) - 2 * MARGIN) * camera.zoom);
}

function toScreen(point) {
  const { width, height } = pixelsOf(canvas);
  const [across, down] = scale();
  return [width / 2 + (point.x - camera.x) * across, height / 2 + (point.y - camera.y) * down];
}

function redrawMap() {
  if (framePending) return;
  framePending = true;
  requestAnimationFrame(() => { framePending = false; drawMap(); });
}

function drawMap() {
  const { width, height } = pixelsOf(canvas);
  const density = window.devicePixelRatio || 1;
  if (!width) return;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  const placed = points.map(point => [point, ...toScreen(point)])
    .filter(([, x, y]) => x > -40 && y > -40 && x < width + 40 && y < height + 40);
  const isFaint = point => chosen.cluster !== null && point.whole !== chosen.cluster;
  const order = (a, b) => isFaint(b) - isFaint(a) || (b.size ?? 0) - (a.size ?? 0); // highlighted and small ones on top
  placed.sort((a, b) => order(a[0], b[0]));
  (chosen.pictures ? drawPictures : drawDots)(pen, placed, isFaint);
  if (chosen.color === "cluster") drawLabels(pen, isFaint);
  if (chosen.point) drawRing(pen, ...toScreen(chosen.point), Math.max(9, radiusOf(chosen.point) + 3));
  canvas.style.touchAction = camera.zoom > 1 ? "none" : "pan-y"; // nothing to pan: let the page scroll
}

function drawDots(pen, placed, isFaint) {
  for (const [point, x, y] of placed) {
    pen.globalAlpha = isFaint(point) ? 0.12 : 0.85;
    pen.fillStyle = colorOf(point);
    pen.beginPath();
    pen.arc(x, y, radiusOf(point), 0, 7);
    pen.fill();
  }
  pen.globalAlpha = 1;
}

function colorOf(point) {
  if (chosen.color === "cluster") return colors.hues[hueOf(point.whole)];
  return `color-mix(in oklab, ${colors.high} ${Math.round(100 * point.confidence)}%, ${colors.low})`;
}

/** Draw pictures where there is room: one per cell of a grid, first come first served; the others are dots. */
function drawPictures(pen, placed, isFaint) {
  const side = pictureSide();
  const taken = new Set();
  const crowded = [];
  const shown = [];
  for (const item of [...placed].reverse()) {
    const key = `${Math.round(item[1] / (side + 2))} ${Math.round(item[2] / (side + 2))}`;
    (taken.has(key) ? crowded : shown).push(item);
    taken.add(key);
  }
  drawDots(pen, crowded.reverse(), isFaint);
  pen.imageSmoothingEnabled = !content.pixelated;
  for (const [point, x, y] of shown) drawPicture(pen, point, x, y, side, isFaint(point));
  pen.globalAlpha = 1;
}

/** Return the longest side of a picture on the map in pixels; a few clusters have room for larger ones. */
function pictureSide() {
  return Math.min(72, (hasRoom() ? 42 : 22) + 6 * camera.zoom);
}

function drawPicture(pen, point, x, y, side, faint) {
  const { sheet, image, x: left, y: top } = cellOf(point.index);
  const fit = side / Math.max(sheet.width, sheet.height);
  const width = sheet.width * fit;
  const height = sheet.height * fit;
  const corner = [x - width / 2, y - height / 2];
  pen.globalAlpha = faint ? 0.15 : 1;
  if (image.complete) pen.drawImage(image, left, top, sheet.width, sheet.height, ...corner, width, height);
  else image.ready.then(redrawMap);
  pen.strokeStyle = colorOf(point);
  pen.lineWidth = 2;
  pen.strokeRect(...corner, width, height);
}

/** Draw names in the middle of their clusters, the largest first, without overlaps. */
function drawLabels(pen, isFaint) {
  const boxes = [];
  const { width, height } = pixelsOf(canvas);
  const below = chosen.kind === "clusters" && chosen.pictures ? pictureSide() / 2 + 12 : 0; // each is of one picture
  pen.font = `600 12px ${getComputedStyle(document.body).fontFamily}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (const { whole, x, y } of labelSpots()) {
    const [left, top] = toScreen({ x, y });
    const text = oneLine(nameOf(whole) || numberOf(whole), 24);
    const half = pen.measureText(text).width / 2 + 7;
    const middle = top + below;
    const box = [left - half, middle - 10, left + half, middle + 10];
    const overlaps = other => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3];
    if (isFaint({ whole }) || !overlaps([0, 0, width, height]) || boxes.some(overlaps)) continue;
    if (boxes.push(box) > MOST_LABELS) return;
    pen.fillStyle = colors.surface;
    pen.globalAlpha = 0.9;
    pen.beginPath();
    pen.roundRect(box[0], box[1], 2 * half, 20, 10);
    pen.fill();
    pen.globalAlpha = 1;
    pen.fillStyle = colors.ink;
    pen.fillText(text, left, middle + 0.5);
  }
}

/** Return each cluster's point nearest to its median: inside the cluster, even if that is in two places. */
function labelSpots() {
  if (chosen.kind === "clusters") return labeledDots();
  const groups = Map.groupBy(points, point => point.whole);
  return [...groups].sort((a, b) => b[1].length - a[1].length).map(([whole, list]) => {
    const middle = axis => list.map(point => point[axis]).sort((a, b) => a - b)[list.length >> 1];
    const x = middle("x");
    const y = middle("y");
    const spot = nearest(list, point => Math.hypot(point.x - x, point.y - y));
    return { whole, x: spot.x, y: spot.y };
  });
}

function drawRing(pen, x, y, radius) {
  pen.strokeStyle = colors.ink;
  pen.lineWidth = 2;
  pen.beginPath();
  pen.arc(x, y, radius, 0, 7);
  pen.stroke();
}
