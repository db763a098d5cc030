// ---------------------------------------------------------------------------------------------------------------
// Dots: what the map shows, images or clusters. A cluster is a dot at its center, sized by its number of images.

const DOTS_SHARE = 0.22; // of the canvas that all clusters cover together
const LARGEST_DOT = 26; // fits into the margin of the map
const SMALLEST_DOT = 2.5;
const LEAST_LABELED = 13; // radius in pixels
const FEW_DOTS = 60; // clusters that have room for labels and larger pictures

/** Return the positions of the leaves of a unit, each with its number of images. */
function leafSpots(unit) {
  const { x, y, leafX, leafY } = content.centers;
  const sizes = isGroup(unit) ? tree.leaves.size : tree.parts.size;
  const spots = [];
  eachLeaf(unit, leaf => {
    const own = tree.numbers[leaf]; // if every leaf is an own cluster
    spots.push(tree.isOwn ? [x[own], y[own], sizes[leaf]] : [leafX[leaf], leafY[leaf], sizes[leaf]]);
  });
  return spots;
}

/** Return the middle of a cluster of the page: the mean of the positions of all its parts, by size. */
function middleOf(whole) {
  const { x, y } = content.centers;
  const spots = parts(whole).flatMap(unit =>
    (clusters[unit].kind === KIND.own ? [[x[unit], y[unit], clusters[unit].size]] : leafSpots(unit)));
  const total = spots.reduce((sum, [, , size]) => sum + size, 0);
  const mean = axis => spots.reduce((sum, spot) => sum + spot[axis] * spot[2], 0) / total;
  return { x: mean(0), y: mean(1) };
}

/** Return a dot for each cluster of the page that has images. */
function clusterDots() {
  return rootsLeft().filter(sizeOf).map(whole => ({
    whole, size: sizeOf(whole), index: picturesOf(whole, "typical")[0], isCluster: true,
    confidence: meanOf(whole, "confidence") ?? 0, ...middleOf(whole),
  }));
}

/** Compute which points the map shows, and the cluster of each; called after every edit. */
function placePoints() {
  for (const point of imagePoints) point.whole = root(holder(point.cluster, point.leaf));
  points = chosen.kind === "clusters" ? clusterDots() : imagePoints;
  chosen.point = null;
  const most = Math.max(...points.map(point => point.size ?? 0));
  const total = points.reduce((sum, point) => sum + (point.size ?? 0), 0);
  if (chosen.kind !== "clusters") return;
  for (const point of points) Object.assign(point, { share: point.size / most, total: total / most });
}

const hasRoom = () => chosen.kind === "clusters" && points.length <= FEW_DOTS;

/** Return the dots that have room for their number, or a name, the largest first. */
function labeledDots() {
  const list = points.filter(point => hasRoom() || nameOf(point.whole) || radiusOf(point) >= LEAST_LABELED);
  return list.sort((a, b) => b.size - a.size);
}

/** Return the radius of a point in pixels. */
function radiusOf(point) {
  if (!point.isCluster) {
    return Math.min(7, 2.6 + Math.sqrt(camera.zoom) * 0.7) * (points.length < 600 ? 1.35 : 1);
  }
  const { width, height } = pixelsOf(canvas);
  const largestDot = Math.min(LARGEST_DOT, Math.sqrt(DOTS_SHARE * width * height / (Math.PI * point.total)));
  return Math.max(SMALLEST_DOT, largestDot * Math.sqrt(point.share)) * Math.min(3, Math.sqrt(camera.zoom));
}

/** Return what a point is: its name, and a line about it. */
function describePoint(point) {
  const about = point.isCluster ? imageCount(point.size) : oneLine(label(point.whole), 30);
  const line = level() === null ? `${about} · ${percent(point.confidence)} confidence` : about;
  return [point.isCluster ? label(point.whole) : facts(point.index).name, line];
}

function openPoint(point) {
  if (point.isCluster) goToCard(point.whole);
  else openPicture(point.index, [point.index]);
}

function describeMap() {
  const all = imagePoints.length === content.images ? "All" : `A sample of ${count(imagePoints.length)} of`;
  const images = `${all} ${imageCount(content.images)}, laid out with ${content.map.method}.`;
  const dots = `${plural(points.length, "cluster", "clusters")} by their centers. Larger dots contain more images.`;
  const what = chosen.kind === "clusters" ? "clusters" : "images";
  $("map-count").textContent = chosen.kind === "clusters" ? dots : images;
  canvas.setAttribute("aria-label", `Map of the ${what}. Arrow keys move from one to the next, Enter opens one, `
    + "plus and minus zoom, zero shows everything.");
}
