// ---------------------------------------------------------------------------------------------------------------
// Base: the content of the report, and the few helpers that everything else is built with.
// Text from outside only ever becomes a text node or an attribute, never markup.

const $ = id => document.getElementById(id);
const content = JSON.parse($("content").textContent);
const { clusters, pictures, truth } = content;
const svgNamespace = document.querySelector("svg").namespaceURI;

const count = value => value.toLocaleString("en-US");
const percent = (value, digits = 0) => (value === null ? "–" : `${(100 * value).toFixed(digits)}%`);
const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;
const imageCount = value => plural(value, "image", "images");
const pixelsOf = element => ({ width: element.clientWidth, height: element.clientHeight });

/** Make an element: h("p", { class: "muted", onclick: f }, "text", child). */
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make a part of a drawing, in the same way. */
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(svgNamespace, tag), attributes, children);
}

/** Make a button: press("Close", close, { class: "quiet" }). */
function press(text, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, text);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(2).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return a file name that fits on one line: long ones lose their middle, line breaks become a visible sign. */
function oneLine(text, longest = 60) {
  const flat = text.replace(/[\r\n\t\u2028\u2029]+/g, " ⏎ ");
  return flat.length <= longest ? flat : `${flat.slice(0, longest / 2 - 1)}…${flat.slice(-longest / 2)}`;
}

/** Return the item with the smallest finite distance; null if there is none. */
function nearest(list, distance) {
  let best = null;
  let least = Infinity;
  for (const item of list) {
    const here = distance(item);
    if (here < least) [best, least] = [item, here];
  }
  return best;
}

const announcer = $("announce");

/** Announce text to screen readers. */
function announce(text) {
  (document.querySelector("dialog[open]") ?? document.body).append(announcer); // outside an open dialog it is not read
  announcer.textContent = text;
}

/** Storage in this browser; write returns false where the browser refuses (some do for local files). */
const memory = {
  read(key) {
    try { return window.localStorage.getItem(key); } catch { return null; }
  },
  write(key, text) {
    try { window.localStorage.setItem(key, text); return true; } catch { return false; }
  },
};
