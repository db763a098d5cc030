// ---------------------------------------------------------------------------------------------------------------
// Base: the content of the report, and the few helpers everything else is built with.
// Text from outside only ever becomes a text node or an attribute here, never markup.

const $ = id => document.getElementById(id);
const content = JSON.parse($("content").textContent);
const { clusters, pictures, truth } = content;
const svgNamespace = document.querySelector("svg").namespaceURI;

const count = value => value.toLocaleString("en-US");
const percent = (value, digits = 0) => (value === null ? "–" : `${(100 * value).toFixed(digits)}%`);
const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;
const pixelsOf = element => ({ width: element.clientWidth, height: element.clientHeight });

/** Make an element: h("p", { class: "muted", onclick: f }, "text", child). */
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for a part of a drawing. */
function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(svgNamespace, tag), attributes, children);
}

/** A button: press("Close", close, { class: "quiet" }). */
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

/** A file name fit for one line: long ones lose their middle, line breaks show as a sign. */
function oneLine(text, longest = 60) {
  const flat = text.replace(/[\r\n\t\u2028\u2029]+/g, " ⏎ ");
  return flat.length <= longest ? flat : `${flat.slice(0, longest / 2 - 1)}…${flat.slice(-longest / 2)}`;
}

/** Tell a screen reader. */
const announcer = $("announce");

function announce(text) {
  (document.querySelector("dialog[open]") ?? document.body).append(announcer); // outside of it, nothing is read out
  announcer.textContent = text;
}

/** Remember something in this browser; false where it does not let us (some do not for local files). */
const memory = {
  read(key) {
    try { return window.localStorage.getItem(key); } catch { return null; }
  },
  write(key, text) {
    try { window.localStorage.setItem(key, text); return true; } catch { return false; }
  },
};
