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
  return `${fixed(amount, unit === 0 ? 0 : 1)} ${units[unit]}`;
}

/** A number with so many decimals, ties to even: as the plan's text rounds. */
function fixed(amount, decimals) {
  const moved = amount * 10 ** decimals;
  const rounded = Math.abs(moved % 1) === 0.5 ? 2 * Math.round(moved / 2) : Math.round(moved);
  return (rounded / 10 ** decimals).toFixed(decimals);
}

const bytesText = (amount) => scaled(amount, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const flopsText = (amount) => scaled(amount, 1000, ["flop", "kflop", "Mflop", "Gflop", "Tflop"]);
const grouped = new Intl.NumberFormat("en"); // made once: it takes as long as a thousand numbers
const countText = (amount) => grouped.format(Math.round(amount));
const percent = (part, whole) => (part > 0 && part < 0.0005 * whole ? "<0.1%" : whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.0995 ? 1 : 0)}%` : "0%");
const several = (count, noun) => `${countText(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A time of the cost model, whose unit is seconds, or bytes where it knows no rates: as the plan's text writes it. */
function timeText(amount, unit) {
  if (unit !== "seconds") return bytesText(amount);
  for (const name of ["s", "ms"]) {
    if (amount >= 0.9995) return `${amount >= 1000 ? amount.toFixed(0) : Number(amount.toPrecision(3))} ${name}`;
    amount *= 1000;
  }
  return `${Number(amount.toPrecision(3))} us`;
}

const beforeMerging = ({ count, unmerged }) => (unmerged === count ? "" : ` (${countText(unmerged)} before merging)`);
/** `14 (62 before merging)`. */
const transfersText = (found) => `${countText(found.count)}${beforeMerging(found)}`;
/** `14 collectives (62 before merging)`. */
const transfersWords = (found) => `${several(found.count, "collective")}${beforeMerging(found)}`;

/** Whether the cost model knows times; else its costs are bytes, which are said anyhow. */
const hasTimes = () => app.plan.unit === "seconds";

const listeners = {};
/** Calls a function whenever something of a name is reported. */
const on = (name, listener) => (listeners[name] ??= []).push(listener);
/** Reports something to all who asked for it. */
const emit = (name, ...said) => (listeners[name] ?? []).forEach((listener) => listener(...said));

/** A text of so many letters at most, without its middle: which tree it is in stands at its beginning, which leaf at its
 * end. Of a short one the number at the end alone. */
function clipped(text, letters) {
  if (text.length <= letters) return text;
  const digits = /\d*$/.exec(text)[0].length;
  const end = letters < NAME_END ? Math.min(digits, letters - 1) : Math.floor((letters - 1) / 2);
  return `${text.slice(0, letters - 1 - end)}…${end > 0 ? text.slice(-end) : ""}`;
}

/** Names that differ in numbers alone are alike: `layers[*].up`, `layer_*`. */
const folded = (name) => name.replace(/\d+/g, "*");

/** From so many on names that are alike are one. Chosen: two are read as fast as one with its number. */
const LEAST_ALIKE = 3;

/** Entries in groups of those with one key, in the order in which these begin: arrays with the `key`. */
function groupsOf(entries, keyOf) {
  const found = new Map();
  for (const entry of entries) {
    const key = keyOf(entry);
    if (!found.has(key)) found.set(key, Object.assign([], { key }));
    found.get(key).push(entry);
  }
  return [...found.values()];
}

const NAME_END = 12; // characters that are always shown: of a path its last entry
const NAME_TAIL = 30; // those that are shown as long as there is room: its last two or three
const NAME_START = 4; // fewer characters before the end are not cut

/** A name that loses what follows its beginning where there is no room, and then what is before its end: names of one tree
 * begin alike, and often end alike (`['attention_norm']['scale']`), and are told apart by the entries before the last. */
function abbreviated(name) {
  const tail = tailOf(name);
  const parts = name.length < NAME_END + NAME_START ? [name] : [name.slice(0, -tail), name.slice(-tail, -NAME_END), name.slice(-NAME_END)];
  return el("span", { class: "abbreviated", title: name }, parts.filter(Boolean).map((part) => el("span", {}, part)));
}

/** The length of the longest end of a path that is whole entries and not longer than it may be; else as much as it may be. */
function tailOf(name) {
  const most = name.length - NAME_START;
  const starts = [...name.matchAll(/[[./]/g)].map((match) => name.length - match.index);
  return starts.find((length) => NAME_END <= length && length <= Math.min(NAME_TAIL, most)) ?? Math.max(NAME_END, Math.min(NAME_TAIL, most - NAME_START));
}

/** Says a text to screen readers. */
const announce = (text) => (byId("announce").textContent = text);

/** What is selected, shown and asked for: all of the page's state but what is folded. */
const app = { plan: null, plans: [], differences: null, scopes: null, steps: null, selected: null, scope: null, moment: 0, metric: "sent", tab: "graph" };
