// ---------------------------------------------------------------------------------------------------------------
// Explore: navigation on the map by pointer, wheel, touch and keyboard.

function zoomBy(factor, x, y) {
  const { width, height } = pixelsOf(canvas);
  const before = scale();
  camera.zoom = Math.min(MOST_ZOOM, Math.max(1, camera.zoom * factor));
  const after = scale();
  const right = (x ?? width / 2) - width / 2;
  const down = (y ?? height / 2) - height / 2;
  moveBy(right / before[0] - right / after[0], down / before[1] - down / after[1]);
}

function moveBy(x, y) {
  const clamp = camera.zoom === 1 ? () => 0.5 : value => Math.min(1, Math.max(0, value));
  camera.x = clamp(camera.x + x);
  camera.y = clamp(camera.y + y);
  hideTip();
  redrawMap();
}

function fitMap() {
  camera.zoom = 1;
  moveBy(0, 0);
}

function pointAt(x, y, reach) {
  const visible = points.filter(point => chosen.cluster === null || point.whole === chosen.cluster);
  const distance = point => {
    const [left, top] = toScreen(point);
    return Math.hypot(left - x, top - y) - (point.isCluster ? radiusOf(point) : 0);
  };
  const best = nearest(visible, distance);
  return best && distance(best) <= reach ? best : null;
}

function choosePoint(point) {
  if (point === chosen.point) return;
  hideTip();
  chosen.point = point;
  if (point) showTip(point);
  redrawMap();
}

function showTip(point) {
  const tip = $("map-tip");
  const [x, y] = toScreen(point);
  const { width, height } = pixelsOf(canvas);
  const [name, line] = describePoint(point);
  tip.replaceChildren(thumbnail(point.index), h("strong", {}, oneLine(name, 48)), h("span", {}, line));
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(width - tip.offsetWidth - 4, x + 14))}px`;
  tip.style.top = `${y + 14 + tip.offsetHeight > height ? Math.max(4, y - 14 - tip.offsetHeight) : y + 14}px`;
}

function hideTip() {
  $("map-tip").hidden = true;
  chosen.point = null;
}

/** Go to the nearest point in a direction, from the chosen point or from the middle. */
function stepTo(right, down) {
  const { width, height } = pixelsOf(canvas);
  const [fromX, fromY] = chosen.point ? toScreen(chosen.point) : [width / 2, height / 2];
  const cost = point => {
    const [x, y] = toScreen(point);
    const along = (x - fromX) * right + (y - fromY) * down;
    const aside = Math.abs((x - fromX) * down) + Math.abs((y - fromY) * right);
    const visible = chosen.cluster === null || point.whole === chosen.cluster;
    return point === chosen.point || along <= 0.5 || !visible ? Infinity : along + 2.5 * aside;
  };
  const next = nearest(points, cost);
  if (!next) return;
  const [x, y] = toScreen(next);
  if (x < 0 || y < 0 || x > width || y > height) moveBy(next.x - camera.x, next.y - camera.y);
  choosePoint(next);
  const [name, line] = describePoint(next);
  announce(`${oneLine(name, 80)}, ${line}`);
}

function showOnMap(cluster) {
  $("map-cluster").value = cluster;
  chosen.cluster = cluster;
  $("map").scrollIntoView({ block: "start" });
  canvas.focus({ preventScroll: true });
  redrawMap();
}

/** Update the list of clusters to highlight, which changes with merges. */
function refreshMap() {
  const option = cluster => h("option", { value: cluster }, fullLabel(cluster));
  if (chosen.cluster !== null) chosen.cluster = root(chosen.cluster);
  $("map-cluster").replaceChildren(h("option", { value: "" }, "All clusters"), ...rootsLeft().map(option));
  $("map-cluster").value = chosen.cluster ?? "";
  placePoints();
  describeMap();
  redrawMap();
}

const spotOf = event => [event.offsetX, event.offsetY];

/** Follow pointers: one drags, two pinch; a press that does not move is a click. */
function followPointers() {
  const pointers = new Map();
  let moved = 0;
  const sum = axis => [...pointers.values()].reduce((total, spot) => total + spot[axis], 0);
  const middle = () => [sum(0) / pointers.size, sum(1) / pointers.size];
  const span = () => { const [a, b] = [...pointers.values()]; return b ? Math.hypot(a[0] - b[0], a[1] - b[1]) : 0; };
  const drag = event => {
    const before = middle();
    const apart = span();
    pointers.set(event.pointerId, spotOf(event));
    const now = middle();
    moved += Math.hypot(now[0] - before[0], now[1] - before[1]) + Math.abs(span() - apart);
    if (moved < 5) return;
    if (apart) zoomBy(span() / apart, ...now);
    const [across, down] = scale();
    moveBy((before[0] - now[0]) / across, (before[1] - now[1]) / down);
  };
  const release = event => {
    const known = pointers.delete(event.pointerId);
    const isClick = known && event.type === "pointerup" && moved < 5 && !pointers.size;
    const point = isClick ? pointAt(...spotOf(event), 20) : null;
    if (point) openPoint(point);
  };
  canvas.addEventListener("pointerdown", event => {
    if (!pointers.size) moved = 0;
    pointers.set(event.pointerId, spotOf(event));
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (pointers.has(event.pointerId)) drag(event);
    else if (event.pointerType === "mouse") choosePoint(pointAt(...spotOf(event), 16));
  });
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => choosePoint(null));
}

function followWheel(event) {
  if (camera.zoom === 1 && event.deltaY > 0) return; // everything is in view: the page scrolls
  event.preventDefault();
  zoomBy(Math.exp(-event.deltaY * 0.0022), ...spotOf(event));
}

function followKeys() {
  const keys = {
    ArrowRight: () => stepTo(1, 0), ArrowLeft: () => stepTo(-1, 0),
    ArrowDown: () => stepTo(0, 1), ArrowUp: () => stepTo(0, -1),
    "+": () => zoomBy(1.5), "=": () => zoomBy(1.5), "-": () => zoomBy(1 / 1.5), 0: fitMap,
    Enter: () => chosen.point && openPoint(chosen.point), Escape: () => choosePoint(null),
  };
  canvas.addEventListener("keydown", event => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
}

function followControls() {
  $("zoom-in").addEventListener("click", () => zoomBy(1.6));
  $("zoom-out").addEventListener("click", () => zoomBy(1 / 1.6));
  $("zoom-all").addEventListener("click", fitMap);
  $("map").addEventListener("change", () => {
    chosen.cluster = $("map-cluster").value === "" ? null : Number($("map-cluster").value);
    chosen.color = $("map-color").value;
    chosen.pictures = $("map-pictures").checked;
    chosen.kind = $("map-kind").value;
    placePoints();
    describeMap();
    redrawMap();
  });
}

function setUpMap() {
  followPointers();
  canvas.addEventListener("wheel", followWheel, { passive: false });
  followKeys();
  followControls();
  new ResizeObserver(redrawMap).observe(canvas);
}
