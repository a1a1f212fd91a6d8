// Elements, numbers as text, and news between the parts of the page.

const SVG = document.getElementById("patterns").namespaceURI;
const byId = (id) => document.getElementById(id);

/** An element with attributes, listeners (`onclick`), and children, which are elements or text. */
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same of a drawing. */
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (name.startsWith("aria-") && value !== null && value !== undefined) node.setAttribute(name, String(value));
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function scaled(amount, base, units) {
  let unit = 0;
  while (Math.abs(amount) >= base && unit < units.length - 1) {
    amount /= base;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(amount) : amount.toFixed(amount < 100 ? 1 : 0)} ${units[unit]}`;
}

const bytesText = (amount) => scaled(amount, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const flopsText = (amount) => scaled(amount, 1000, ["flop", "kflop", "Mflop", "Gflop", "Tflop", "Pflop"]);
const countText = (amount) => Math.round(amount).toLocaleString("en");
const percent = (part, whole) => (part > 0 && part < 0.0005 * whole ? "<0.1%" : whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.0995 ? 1 : 0)}%` : "0%");
const several = (count, noun) => `${countText(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A time of the cost model, whose unit is seconds, or bytes where it knows no rates. */
function timeText(amount, unit) {
  if (unit !== "seconds") return bytesText(amount);
  for (const [name, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (amount >= size) return `${(amount / size).toPrecision(3)} ${name}`;
  }
  return `${(amount * 1e9).toPrecision(2)} ns`;
}

/** Whether the cost model knows times; else its costs are bytes, which are said anyhow. */
const hasTimes = () => app.plan.unit === "seconds";

const listeners = {};
/** Calls a function whenever something of a name is reported. */
const on = (name, listener) => (listeners[name] ??= []).push(listener);
/** Reports something to all who asked for it. */
const emit = (name, ...said) => (listeners[name] ?? []).forEach((listener) => listener(...said));

const NAME_END = 12; // characters that are always shown: of a path its last entry or two

/** A name that loses its middle where there is no room: which tree it is in stands at its beginning, which leaf at its end. */
function abbreviated(name) {
  const [start, end] = name.length > 2 * NAME_END ? [name.slice(0, -NAME_END), name.slice(-NAME_END)] : [name, ""];
  return el("span", { class: "abbreviated", title: name }, el("span", {}, start), end ? el("span", {}, end) : null);
}

/** Says a text to screen readers. */
const announce = (text) => (byId("announce").textContent = text);

/** What is selected, shown and asked for: all of the page's state but what is folded. */
const app = { plan: null, plans: [], differences: null, scopes: null, steps: null, selected: null, scope: null, moment: 0, metric: "sent", tab: "graph" };
