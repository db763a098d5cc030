// ---------------------------------------------------------------------------------------------------------------
// App: what happens first, and what belongs to the page as a whole.

const THEME = "secu-report-theme";

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  readColors();
  redrawMap();
}

function toggleTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = (document.documentElement.dataset.theme ?? system) === "dark" ? "light" : "dark";
  memory.write(THEME, theme);
  setTheme(theme);
  announce(`${theme === "dark" ? "Dark" : "Light"} theme`);
}

function describeEdits() {
  const changes = [
    [shapeNow().active.filter(unit => edits.names[unit]).length, "cluster named", "clusters named"],
    [shapeNow().active.length - rootsLeft().length, "cluster merged", "clusters merged"],
    [level() === null ? shapeNow().active.length - OWN : 0, "split", "splits"],
    [Object.keys(edits.wrong).length, "image marked as wrong", "images marked as wrong"],
  ].filter(([many]) => many).map(([many, one, more]) => plural(many, one, more));
  if (level() !== null) changes.unshift(`the tree is cut into ${count(shapeNow().active.length)} groups`);
  const unchanged = `${plural(rootsLeft().length, "cluster", "clusters")}, no changes yet.`;
  $("edits").textContent = changes.length ? `Your changes: ${changes.join(", ")}.` : unchanged;
  $("clear").hidden = !changes.length;
  $("undo").disabled = !edits.undo.length;
}

/** Highlight the current section in the navigation bar. */
function followSections() {
  const links = [...document.querySelectorAll("nav a")];
  const watch = new IntersectionObserver(entries => {
    for (const entry of entries.filter(one => one.isIntersecting)) {
      for (const link of links) {
        if (link.hash === `#${entry.target.id}`) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    }
  }, { rootMargin: "-30% 0px -65% 0px" });
  document.querySelectorAll("main > section").forEach(section => watch.observe(section));
}

function onKey(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if ((event.ctrlKey || event.metaKey) && !event.shiftKey && event.key.toLowerCase() === "z" && !typing) {
    event.preventDefault();
    undo();
  }
}

function listen() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());
  document.addEventListener("keydown", onKey);
  $("undo").addEventListener("click", undo);
  $("toast-undo").addEventListener("click", undo);
  $("clear").addEventListener("click", startOver);
  $("download").addEventListener("click", download);
  $("theme").addEventListener("click", toggleTheme);
  $("search").addEventListener("input", arrangeCards);
  $("sort").addEventListener("change", arrangeCards);
  $("more").addEventListener("click", () => showMore());
}

function start() {
  setUpMap();
  setTheme(memory.read(THEME));
  restoreEdits();
  listeners.push(refreshCards, refreshPicture, refreshMap, drawSizes, describeEdits, refreshTree);
  arrangeCards();
  refreshMap();
  drawSizes();
  drawConfidence();
  new ResizeObserver(drawCurves).observe($("charts"));
  $("numbers").closest("details").addEventListener("toggle", drawNumbers, { once: true });
  drawTruth();
  drawDuplicates();
  setUpTree();
  setUpFilter();
  describeEdits();
  followSections();
  listen();
}

start();
