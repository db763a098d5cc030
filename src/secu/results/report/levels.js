// ---------------------------------------------------------------------------------------------------------------
// Levels: the controls that cut the tree, a slider and a number.

/** Return the levels that the slider has: all, or of a large tree some, closer together where groups are few. */
function sliderLevels() {
  if (LEAVES <= 100) return Array.from({ length: LEAVES - 1 }, (_, place) => place + 2);
  const steps = Array.from({ length: 100 }, (_, step) => Math.round(2 * (LEAVES / 2) ** (step / 99)));
  return [...new Set(steps)];
}

/** Set slider, number and button to a number of groups. */
function showLevel(groups) {
  const levels = sliderLevels();
  const known = Math.max(2, Math.min(LEAVES, Math.round(groups) || 2));
  $("level").value = known;
  $("slider").value = levels.indexOf(nearest(levels, one => Math.abs(Math.log(one / known))));
  $("slider").setAttribute("aria-valuetext", plural(known, "group", "groups"));
  $("cut").textContent = `Cut into ${plural(known, "group", "groups")}`;
}

function describeCut() {
  const active = shapeNow().active.length;
  const isPlain = rootsLeft().length === level() && !Object.keys(edits.open).some(unit => isGroup(unit));
  const command = name => h("code", {}, `secu ${name} --level ${active}`);
  const same = isPlain ? [" They are the same as those of ", command("sort"), " and ", command("predict"), "."] : [];
  const cut = [`The cards show ${plural(active, "group", "groups")} of the tree, numbered from 0.`, ...same];
  const own = ["The cards show the run's own clusters. Cut the tree to group its leaves instead."];
  $("cut-note").replaceChildren(...(level() === null ? own : cut));
  $("uncut").hidden = level() === null;
}

function setUpTree() {
  if (!tree) return;
  $("slider").max = sliderLevels().length - 1;
  $("level").max = LEAVES;
  showLevel(level() ?? Math.min(OWN, LEAVES));
  describeCut();
  $("slider").addEventListener("input", () => showLevel(sliderLevels()[$("slider").valueAsNumber]));
  $("level").addEventListener("change", () => { if ($("level").value) showLevel($("level").valueAsNumber); });
  $("level").addEventListener("input", () => {
    const typed = $("level").valueAsNumber;
    $("cut").textContent = typed >= 2 && typed <= LEAVES ? `Cut into ${plural(typed, "group", "groups")}` : "Cut";
  });
  $("cut").addEventListener("click", () => {
    showLevel($("level").valueAsNumber);
    cutAt($("level").valueAsNumber);
  });
  $("uncut").addEventListener("click", () => cutAt(null));
  setUpBranches();
}
