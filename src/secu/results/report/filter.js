// ---------------------------------------------------------------------------------------------------------------
// Filter: only clusters of some sizes and confidences.

const LEAST_TO_FILTER = 8; // clusters; fewer are seen at a glance
const LIMITS = ["size-least", "size-most", "confidence-least", "confidence-most"];

/** Return a limit that the reader typed; null if there is none. */
function limitOf(id) {
  const value = $(id).valueAsNumber;
  return Number.isFinite(value) ? value : null;
}

const isFiltered = () => LIMITS.some(id => limitOf(id) !== null);
const isWithin = (value, least, most) => (least === null || value >= least) && (most === null || value <= most);

/** Return whether a cluster is within the limits; the confidence of groups of the tree is not known, so they pass. */
function passesFilter(cluster) {
  const [sizeLeast, sizeMost, confidenceLeast, confidenceMost] = LIMITS.map(limitOf);
  const confidence = Math.round(100 * (meanOf(cluster, "confidence") ?? NaN)); // of an empty cluster, in no range
  const isConfident = isGroup(cluster) || isWithin(confidence, confidenceLeast, confidenceMost);
  return isWithin(sizeOf(cluster), sizeLeast, sizeMost) && isConfident;
}

function clearFilter() {
  for (const id of LIMITS) $(id).value = "";
}

/** Say how many clusters are left, if not all of them. */
function describeFilter(left) {
  const all = rootsLeft().length;
  const isPart = left < all;
  $("found").textContent = isPart ? `${count(left)} of ${plural(all, "cluster", "clusters")} shown.` : "";
  $("filter").hidden = all < LEAST_TO_FILTER && !isFiltered();
  $("confidence-limits").hidden = level() !== null;
  $("clear-filter").hidden = !isFiltered() && !$("search").value.trim();
}

function setUpFilter() {
  for (const id of LIMITS) $(id).addEventListener("input", arrangeCards);
  $("clear-filter").addEventListener("click", () => {
    $("search").value = "";
    clearFilter();
    arrangeCards();
    $("search").focus();
  });
}
