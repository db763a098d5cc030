// ---------------------------------------------------------------------------------------------------------------
// Pictures: cells of the sprite sheets, drawn on demand; and the dialog that shows one of them.

const placeOf = new Map(pictures.index.map((index, place) => [index, place]));
const sheetImages = new Map();

/** Return where a picture is: the geometry and image of its sheet, and the corner of its cell. */
function cellOf(index) {
  const place = placeOf.get(index);
  const tier = place < content.onCards ? 0 : 1;
  const sheet = content.sheets[tier];
  const number = tier ? place - content.onCards : place;
  const onSheet = number % (sheet.columns * sheet.rows);
  return {
    sheet,
    image: sheetImage(tier, Math.floor(number / (sheet.columns * sheet.rows))),
    x: (onSheet % sheet.columns) * sheet.pitch[0],
    y: Math.floor(onSheet / sheet.columns) * sheet.pitch[1],
  };
}

/** Decode a sheet the first time it is needed. */
function sheetImage(tier, number) {
  const key = `${tier}-${number}`;
  if (!sheetImages.has(key)) {
    const image = new Image();
    image.src = `data:image/jpeg;base64,${content.sheets[tier].jpegs[number]}`;
    image.ready = image.decode();
    sheetImages.set(key, image);
  }
  return sheetImages.get(key);
}

/** Return a canvas with one picture: unlike a background sprite, it never shows the edge of a neighbor. */
function thumbnail(index) {
  const { sheet: { width, height }, image, x, y } = cellOf(index);
  const drawing = h("canvas", { width, height, class: content.pixelated ? "thumb crisp" : "thumb" });
  image.ready.then(() => drawing.getContext("2d").drawImage(image, x, y, width, height, 0, 0, width, height));
  return drawing;
}

function facts(index) {
  const place = placeOf.get(index);
  const target = pictures.target[place];
  return {
    name: pictures.name[place],
    cluster: pictures.cluster[place],
    leaf: pictures.leaf[place],
    confidence: pictures.confidence[place],
    second: pictures.second[place],
    secondConfidence: pictures.secondConfidence[place],
    cosine: pictures.cosine[place],
    outlier: pictures.outlier[place] === 1,
    truth: target === undefined || target < 0 ? null : truth.classes[target],
  };
}

/** Return a picture that can be opened and marked. */
function pictureButton(index, list) {
  const { name, confidence } = facts(index);
  const mark = () => (isWrong(index) ? ", marked as wrong" : "");
  const button = h("button", {
    type: "button", class: "pic", "data-index": index, title: oneLine(name, 200),
    onclick: () => openPicture(index, list),
  }, thumbnail(index));
  button.refresh = () => {
    button.classList.toggle("wrong", isWrong(index));
    button.setAttribute("aria-label", `${oneLine(name, 120)}, ${percent(confidence)} confidence${mark()}`);
  };
  button.refresh();
  return button;
}

/** Return a row of pictures that is a single Tab stop; arrow keys move inside it, W marks. */
function strip(list, name) {
  const buttons = list.map(index => pictureButton(index, list));
  const row = h("div", { class: "strip", role: "group", "aria-label": name }, buttons);
  buttons.forEach((button, place) => { button.tabIndex = place ? -1 : 0; });
  row.addEventListener("keydown", event => {
    const place = buttons.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (place < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.toLowerCase() === "w") toggleWrong(list[place]);
    if (!step) return;
    event.preventDefault();
    const next = buttons[(place + step + buttons.length) % buttons.length];
    buttons.forEach(button => { button.tabIndex = button === next ? 0 : -1; });
    next.focus();
  });
  return row;
}

// The dialog

let opened = { index: 0, list: [] };

function openPicture(index, list) {
  opened = { index, list };
  showPicture();
  if (!$("picture").open) $("picture").showModal();
}

function showPicture() {
  const { index, list } = opened;
  const step = by => { opened.index = list[(list.indexOf(index) + by + list.length) % list.length]; showPicture(); };
  $("picture").replaceChildren(
    h("div", { class: isWrong(index) ? "stage wrong" : "stage" }, thumbnail(index)),
    h("h2", { id: "picture-title", class: "file" }, facts(index).name),
    factList(index, facts(index)),
    h("div", { class: "actions" },
      list.length > 1 && press("← Previous", () => step(-1), { class: "quiet", id: "previous" }),
      list.length > 1 && press("Next →", () => step(1), { class: "quiet", id: "next" }),
      h("span", { class: "space" }),
      press(isWrong(index) ? "Unmark" : "Mark as wrong", () => toggleWrong(index), { id: "mark" }),
      press("Close", () => $("picture").close(), { class: "primary", id: "close-picture" })));
}

function factList(index, { cluster, confidence, second, secondConfidence, cosine, outlier, truth: trueLabel }) {
  const line = (term, value) => h("div", {}, h("dt", {}, term), h("dd", {}, value));
  const whole = wholeOf(index);
  const isCut = level() !== null; // confidence and second choice are those of the run's own clusters
  return h("dl", { class: "facts" },
    line("Cluster", isCut ? label(whole) : `${label(whole)}, ${percent(confidence)} confidence`),
    second === cluster || isCut ? null : line("Second choice", `${label(second)}, ${percent(secondConfidence)}`),
    line("Similarity to the center", cosine === null ? "–" : cosine.toFixed(2)),
    outlier && line("Note", "Likely an outlier: it does not fit any cluster well"),
    trueLabel === null ? null : line("True label", trueLabel));
}

/** Redraw the dialog and keep the focus on the same button. */
function refreshPicture() {
  const focused = document.activeElement?.id;
  if (!$("picture").open) return;
  showPicture();
  if (focused) $(focused)?.focus();
}

$("picture").addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const button = { ArrowLeft: "previous", ArrowRight: "next", w: "mark", W: "mark" }[event.key];
  if (!button || !$(button)) return;
  event.preventDefault();
  $(button).click();
  $(button)?.focus();
});
