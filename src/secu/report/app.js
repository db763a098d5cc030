// ---------------------------------------------------------------------------------------------------------------
// App: what happens first, and what belongs to the page as a whole.

const THEME = "secu-report-theme";

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  readColours();
  redrawMap();
}

function toggleTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = (document.documentElement.dataset.theme ?? system) === "dark" ? "light" : "dark";
  memory.write(THEME, theme);
  setTheme(theme);
  announce(`${theme === "dark" ? "Dark" : "Light"} colours`);
}

function describeEdits() {
  const said = [
    [Object.keys(edits.names).length, "cluster named", "clusters named"],
    [Object.keys(edits.merged).length, "merged", "merged"],
    [Object.keys(edits.wrong).length, "picture marked as wrong", "pictures marked as wrong"],
  ].filter(([many]) => many).map(([many, one, more]) => plural(many, one, more));
  const clean = `${plural(rootsLeft().length, "cluster", "clusters")}, no changes yet.`;
  $("edits").textContent = said.length ? `Your changes: ${said.join(", ")}.` : clean;
  $("clear").hidden = !said.length;
  $("undo").disabled = !edits.undo.length;
}

/** Show in the bar which section is being read. */
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

function start() {
  setUpMap();
  setTheme(memory.read(THEME));
  restoreEdits();
  listeners.push(refreshCards, refreshPicture, refreshMap, drawSizes, describeEdits);
  arrangeCards();
  refreshMap();
  drawSizes();
  drawSureness();
  new ResizeObserver(drawCurves).observe($("charts"));
  $("numbers").closest("details").addEventListener("toggle", drawNumbers, { once: true });
  drawTruth();
  describeEdits();
  followSections();
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

start();
