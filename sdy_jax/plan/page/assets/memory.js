// What a device holds over the program, as an area; under the pointer or the keyboard's cursor, the largest values.

const HIGH = 104;
const LEFT = 62; // where the axis of bytes is
const BOTTOM = 86; // where the axis of ops is
let cursor = { op: -1, pinned: false };

function startMemory() {
  on("plan", () => {
    cursor = { op: -1 };
    showMemory();
  });
  on("select", showSpan);
  new ResizeObserver(showMemory).observe(byId("memory"));
}

function showMemory() {
  const box = byId("memory");
  const { memory } = app.plan.data;
  if (!memory || !memory.timeline.length) return box.replaceChildren(el("p", { class: "quiet empty" }, "Nothing is known of the memory of this program."));
  if (box.clientWidth <= LEFT) return; // it is not shown
  const peak = peakOf(memory);
  const chart = el("div", {
    class: "chart",
    tabindex: "0",
    role: "slider",
    "aria-label": "Memory while the program runs; arrow keys move along it",
    "aria-valuemin": 0,
    "aria-valuemax": memory.timeline.length - 1,
    onkeydown: moveInMemory,
    onpointermove: (event) => pointAt(opAt(event)),
    onpointerdown: (event) => pointAt(opAt(event)),
    onpointerleave: (event) => event.pointerType === "touch" || pointAt(peak),
    onclick: (event) => selectOp(opAt(event)),
  });
  const live = el("div", { class: "live" });
  box.replaceChildren(memoryHead(memory), el("div", { class: "memory-row" }, chart, live));
  chart.append(area(memory, chart.clientWidth));
  pointAt(peak);
  showSpan();
}

function memoryHead(memory) {
  const swatch = (kind, name, amount) => el("span", { class: "swatch" }, el("i", { class: kind }), `${name} ${bytesText(amount)}`);
  return el(
    "div",
    { class: "panel-head" },
    el("h2", {}, "Memory of a device"),
    el("span", { class: "quiet" }, `peak ${bytesText(memory.peak)}`),
    el("span", { class: "push" }),
    swatch("arguments", "arguments", memory.arguments),
    el("span", { class: "swatch" }, el("i", { class: "results" }), resultsText(memory)),
    swatch("temporaries", "temporaries, at most", memory.temporaries),
  );
}

const peakOf = (memory) => memory.timeline.reduce((best, size, op) => (size > memory.timeline[best] ? op : best), 0);
const alwaysHeld = (memory) => memory.arguments + memory.own;

/** All results, and how much of them lies in arguments that are held anyhow. */
const resultsText = ({ results, shared }) => `results ${bytesText(results)}${shared ? ` (${bytesText(shared)} of them in donated arguments)` : ""}`;

/** The area: per column of points the largest of its ops. */
function area(memory, width) {
  const { timeline } = memory;
  const floor = alwaysHeld(memory);
  const columns = timelineColumns(timeline, width - LEFT);
  const top = Math.max(1, floor + Math.max(...columns));
  const y = (size) => BOTTOM - (size / top) * (BOTTOM - 12);
  const points = columns.map((size, x) => `${LEFT + x} ${y(floor + size).toFixed(1)}`);
  const peak = peakOf(memory);
  const [px, py] = [xOf(peak, timeline.length, width), y(floor + timeline[peak])];
  const box = (kind, from, to) => svg("rect", { class: kind, x: LEFT, y: y(to), width: width - LEFT, height: y(from) - y(to) });
  const drawn = svg("svg", { width, height: HIGH, viewBox: `0 0 ${width} ${HIGH}`, "aria-hidden": "true" });
  drawn.append(
    svg("path", { class: "temporaries", d: `M${LEFT} ${y(floor)}L${points.join("L")}L${width} ${y(floor)}z` }),
    box("results", memory.arguments, floor),
    box("arguments", 0, memory.arguments),
    svg("path", { class: "outline", d: `M${points.join("L")}` }),
    byteAxis(top, y, width),
    opAxis(timeline.length, width),
    svg("rect", { class: "span", x: LEFT, y: BOTTOM - 5, width: 0, height: 5, rx: 2 }),
    svg("circle", { class: "peak", cx: px, cy: py, r: 3.5 }),
    svg("line", { class: "cursor", x1: LEFT, x2: LEFT, y1: 0, y2: BOTTOM }),
  );
  return drawn;
}

/** Lines at round numbers of bytes: of two, five or ten times a power of ten of their unit, two to four of them. */
function byteAxis(top, y, width) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(top) / 10));
  const rough = top / unit / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1 / unit, power * [1, 2, 5, 10].find((each) => each * power >= rough)) * unit;
  const ticks = [];
  for (let size = 0; size <= top; size += step) {
    ticks.push(svg("line", { x1: LEFT, x2: width, y1: y(size), y2: y(size) }), svg("text", { x: LEFT - 6, y: y(size) + 3.5, "text-anchor": "end" }, size ? bytesText(size) : "0"));
  }
  return svg("g", { class: "ticks" }, ticks);
}

/** Numbers of ops at the ends and in the middle. */
function opAxis(count, width) {
  const at = (op, anchor) => svg("text", { x: op ? xOf(op, count, width) : LEFT, y: HIGH - 4, "text-anchor": anchor }, `op ${countText(op)}`);
  return svg("g", { class: "ticks" }, at(0, "start"), count > 2 ? at(Math.floor(count / 2), "middle") : null, count > 1 ? at(count - 1, "end") : null);
}

function timelineColumns(timeline, width) {
  const count = Math.max(1, Math.floor(width));
  const found = new Array(count + 1).fill(0);
  const wide = timeline.length < count;
  if (wide) return found.map((_, x) => timeline[Math.min(timeline.length - 1, Math.floor((x * timeline.length) / count))]);
  timeline.forEach((size, op) => {
    const x = Math.floor((op * count) / timeline.length);
    found[x] = Math.max(found[x], size);
  });
  found[count] = timeline.at(-1);
  return found;
}

const xOf = (op, count, width) => LEFT + ((op + 0.5) * (width - LEFT)) / count;

function opAt(event) {
  const chart = byId("memory").querySelector(".chart");
  const { left, width } = chart.getBoundingClientRect();
  const count = app.plan.data.memory.timeline.length;
  return Math.max(0, Math.min(count - 1, Math.floor(((event.clientX - left - LEFT) * count) / (width - LEFT))));
}

/** Puts the cursor at an op, and lists what is held while it runs. */
function pointAt(op) {
  cursor.op = op;
  const { memory } = app.plan.data;
  const chart = byId("memory").querySelector(".chart");
  const line = chart.querySelector(".cursor");
  const x = xOf(op, memory.timeline.length, chart.clientWidth);
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
  const size = alwaysHeld(memory) + memory.timeline[op];
  const live = memory.buffers.filter(([, , first, last]) => first <= op && op <= last).sort((a, b) => b[1] - a[1]);
  const where = op === peakOf(memory) ? "at the peak" : `at op ${op}`;
  const name = `${bytesText(size)} ${where}: ${app.plan.shortKind(op)} at ${fileLine(app.plan.place(op).line)}`;
  chart.setAttribute("aria-valuenow", op);
  chart.setAttribute("aria-valuetext", `${name}; largest: ${live.slice(0, 3).map(([value, bytes]) => `${app.plan.names[value]} ${bytesText(bytes)}`).join(", ")}`);
  const rows = live.slice(0, 4).map(([value, bytes]) =>
    el("li", {}, el("button", { class: "link", title: app.plan.names[value], onclick: () => selectValue(value) }, miniGrid(app.plan.mesh, app.plan.type(value), 12), abbreviated(app.plan.names[value])), el("span", {}, bytesText(bytes))),
  );
  byId("memory").querySelector(".live").replaceChildren(el("p", { title: name }, name), el("ol", {}, rows));
}

function moveInMemory(event) {
  const { timeline } = app.plan.data.memory;
  const page = Math.max(1, Math.round(timeline.length / 40));
  const moves = { ArrowRight: 1, ArrowLeft: -1, PageUp: page, PageDown: -page, Home: -Infinity, End: Infinity };
  if (event.key in moves) pointAt(Math.max(0, Math.min(timeline.length - 1, cursor.op + moves[event.key])));
  else if (event.key === "p") pointAt(peakOf(app.plan.data.memory));
  else if (event.key === "Enter") selectOp(cursor.op);
  else return;
  event.preventDefault();
}

/** The time for which the selected value is held. */
function showSpan() {
  const chart = byId("memory").querySelector(".chart");
  if (!chart) return;
  const { selected, plan } = app;
  const op = selected?.scope?.op ?? -1;
  const value = selected?.value ?? (op >= 0 ? plan.data.ops.results[op][0] : undefined);
  const buffer = plan.buffers.get(value);
  const scope = selected?.scope;
  const [first, last] = buffer ? buffer.slice(2) : scope?.parent && scope.ops.length ? [scope.ops[0], scope.ops.at(-1)] : [0, -1];
  const count = plan.data.memory.timeline.length;
  const span = chart.querySelector(".span");
  const [from, to] = [first - 0.5, last + 0.5].map((op) => xOf(op, count, chart.clientWidth));
  span.setAttribute("x", from);
  span.setAttribute("width", last < first ? 0 : Math.max(2, to - from));
}
