// One step over time: scopes above compute, links below it, and memory on the same axis, drawn on a canvas.

/** Heights of a row, between groups of rows and of the axis; room for names; in pixels. */
const TIMING = { row: 17, gap: 7, axis: 20, names: 118, least: 0.5 };
/** The height of memory, as much as the view leaves; `rest` is for what stands below it. Chosen: layers are told apart from
 * the least on, and there is no more to see beyond the most. */
const MEMORY = { least: 96, most: 220, rest: 270 };
/** The width of a letter, of what is around a label, in pixels; letters from which on a part of a label says something.
 * Chosen: `wait…` does. */
const LABEL = { letter: 6.2, around: 8, least: 5 };
/** The most that a view shows of a step: its ten millionth part. Chosen: below, doubles are no times any more. */
const MOST_ZOOM = 1e7;
/** Scopes are folded below so many rows. Chosen: more leave no room for lanes. */
const MOST_DEPTH = 7;
const SLICE = ["lane", "start", "duration", "times", "op", "collective", "hidden", "phase", "host"];

/** A step as rows of boxes, each box with its start and end: what is drawn, without a canvas. */
class Timing {
  constructor(plan) {
    const { timeline } = plan.data;
    this.plan = plan;
    this.lanes = timeline.lanes;
    this.held = {}; // what was asked for, by its name
    this.trips = new Map(timeline.loops.map(([op, , , trips]) => [op, trips]));
    this.slices = timeline.slices.lane.map((_, n) => Object.fromEntries(SLICE.map((name) => [name, timeline.slices[name][n]])));
    for (const each of this.slices) each.end = each.start + each.duration;
    this.critical = this.slices.filter((each) => !each.hidden);
    this.total = this.critical.length ? this.critical.at(-1).end : 0;
    this.end = this.slices.reduce((end, each) => Math.max(end, each.end), this.total); // what moves to the host may end later
    this.measured = this._measured();
    this.end = this.measured.reduce((end, row) => Math.max(end, row.end), this.end);
    this.rows = this._withMeasured([...this._scopes(), ...this._links()]);
  }

  /** What a slice is of: an op, or a collective, whose members are told by their number. */
  collectiveOf(slice) {
    return slice.collective < 0 ? null : this.plan.collectives[slice.collective];
  }

  /** What moves from or to the host, as the notes say it. */
  movedOf(slice) {
    return slice.host < 0 ? null : this.plan.data.host[slice.host];
  }

  title(slice) {
    if (slice.host >= 0) return this.movedOf(slice)[0];
    const sent = this.collectiveOf(slice);
    if (sent) return `${sent.kind}${sent.axes ? ` over ${sent.axes}` : ""}`;
    return this.plan.place(slice.op).primitive || this.plan.shortKind(slice.op);
  }

  /** The phase, the scopes and the loops around a slice, outer ones first. */
  pathOf(slice) {
    const path = slice.phase ? [{ label: slice.phase, key: slice.phase, kind: slice.phase }] : [];
    if (slice.op < 0) return path;
    const ops = [];
    for (let op = slice.op; op >= 0; op = this.plan.data.ops.parent[op]) ops.unshift(op);
    let known = [];
    for (const op of ops) {
      const scopes = this.plan.place(op).scope.split("/").filter((name) => NAMED.test(name));
      const shared = sharedLength(known, scopes);
      path.push(...scopes.slice(shared).map((label) => ({ label, key: label, kind: "scope" })));
      if (shared === known.length) known = scopes;
      if (this.trips.has(op)) path.push({ label: `${this.plan.shortKind(op)}${this.trips.get(op) > 1 ? ` × ${this.trips.get(op)}` : ""}`, key: `loop ${op}`, kind: "loop", trips: this.trips.get(op) });
    }
    return path;
  }

  /** A row per depth of scopes, and one of what is computed or waited for. */
  _scopes() {
    const rows = [];
    const work = { name: "compute", lane: "compute", boxes: [], starts: true };
    let opened = [];
    const close = (kept, at) => {
      for (const scope of opened.slice(kept)) scope.end = at;
      opened = opened.slice(0, kept);
    };
    for (const slice of this.critical) {
      const path = this.pathOf(slice).slice(0, MOST_DEPTH);
      const kept = sharedLength(opened.map((scope) => scope.key), path.map((scope) => scope.key));
      close(kept, slice.start);
      for (const scope of path.slice(kept)) {
        const box = { ...scope, op: slice.op, start: slice.start, end: slice.end };
        (rows[opened.length] ??= { name: "", boxes: [] }).boxes.push(box);
        opened.push(box);
      }
      const kind = slice.collective >= 0 ? "exposed" : "compute";
      const label = slice.collective >= 0 ? `wait: ${this.title(slice)}` : this.title(slice);
      work.boxes.push({ start: slice.start, end: slice.end, label, kind, slice });
    }
    close(0, this.total);
    if (rows.length) rows[0].name = rows[0].boxes[0].kind === "scope" ? "scopes" : "phases";
    for (const row of rows) row.runs = runsOf(row.boxes);
    return [...rows, work];
  }

  /** The links of each set of axes, and the host's. */
  _links() {
    const kind = (slice) => (slice.host >= 0 ? "host" : slice.hidden ? "hidden" : "exposed");
    const box = (slice) => ({ start: slice.start, end: slice.end, label: this.title(slice), kind: kind(slice), slice });
    return this.lanes.slice(1).flatMap((lane, index) => rowsOf(lane, this.slices.filter((each) => each.lane === index + 1).map(box), { name: lane, starts: true }));
  }

  /** What was measured, where the step ran: rows of the same lanes. */
  _measured() {
    const { run } = this.plan.data;
    if (!run) return [];
    const { lane, start, duration, instruction, scope, backward, collective } = run.slices;
    const boxes = lane.map((_, n) => {
      const sent = collective[n] < 0 ? null : this.plan.collectives[collective[n]];
      const name = this.plan.text[instruction[n]];
      const measured = { name, scope: this.plan.text[scope[n]], backward: backward[n], sent };
      return { lane: lane[n], start: start[n], end: start[n] + duration[n], label: sent ? sent.kind : name, kind: sent ? "measured-sent" : "measured", measured };
    });
    return run.lanes.flatMap((name, number) => rowsOf(name, boxes.filter((box) => box.lane === number), { name: "measured" }));
  }

  /** Rows with what was measured of their lanes below them; of lanes that the estimate does not have at the end. */
  _withMeasured(rows) {
    const of = (lane) => this.measured.filter((row) => row.lane === lane);
    const lanes = new Set(rows.map((row) => row.lane));
    const rest = this.measured.filter((row) => !lanes.has(row.lane));
    return [...rows.flatMap((row, n) => (row.lane && row.lane !== rows[n + 1]?.lane ? [row, ...of(row.lane)] : [row])), ...rest];
  }

  /** What is waited for longest: the exposed time of collectives by what they are and the line. */
  waits() {
    const found = new Map();
    for (const slice of this.critical) {
      const sent = this.collectiveOf(slice);
      if (!sent) continue;
      const key = `${this.title(slice)} ${this.plan.placeOf(sent.place).line}`;
      const known = found.get(key) ?? { title: this.title(slice), sent, time: 0 };
      known.time += slice.duration;
      found.set(key, known);
    }
    return [...found.values()].sort((a, b) => b.time - a.time);
  }

  /** The last box of a row that starts no later, if it has not ended by then. */
  static at(boxes, time) {
    const box = boxes[countUntil(boxes, "start", time) - 1];
    return box && time < box.end ? box : null;
  }
}

/** A lane's boxes, in the order in which they start, on as many rows as overlap; the first has a name. */
function rowsOf(lane, boxes, first) {
  const rows = [];
  for (const box of boxes) {
    let row = rows.find((each) => each.end <= box.start + 1e-9 * box.end);
    if (!row) rows.push((row = { name: "", ...(rows.length ? {} : first), lane, boxes: [], end: 0 }));
    row.end = box.end;
    row.boxes.push(box);
  }
  return rows;
}

/** Scopes one behind the other that are alike, as those of layers: each knows the run that it is in. */
function runsOf(boxes) {
  const runs = [];
  for (const group of groupedBy(boxes, (box) => folded(box.label))) {
    const [{ kind, label }] = group;
    if (kind !== "scope" || group.length < LEAST_ALIKE || folded(label) === label) continue;
    const letters = group.reduce((most, box) => Math.max(most, box.label.length), 0);
    const names = new Set(group.map((box) => box.label));
    const run = { start: group[0].start, end: group.at(-1).end, count: group.length, letters, label: `${folded(label)} × ${names.size}` };
    for (const box of group) box.run = run;
    runs.push(run);
  }
  return runs;
}

/** The scope of the tree that a box is of; null of phases and loops. */
function scopeOf({ op, label }) {
  let at = app.scopes.ofOp[op];
  while (at && !(at.kind === "scope" && at.label === label)) at = at.parent;
  return at ?? null;
}

function sharedLength(some, others) {
  let count = 0;
  while (count < some.length && count < others.length && some[count] === others[count]) count += 1;
  return count;
}

/** Round times between two, so that some hundred pixels are between ticks. */
function timeTicks(from, to, width) {
  const rough = (to - from) / Math.max(1, width / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const ticks = [];
  for (let at = Math.ceil(from / step) * step; at <= to && ticks.length < 100; at += step) ticks.push(at);
  return ticks;
}

// The view.

let timeView = null;

function showTime(view) {
  const timing = (app.plan.timing ??= new Timing(app.plan));
  if (!timing.total) return view.replaceChildren(el("p", { class: "quiet empty" }, "Nothing of this program takes time."));
  timeView = new TimeView(timing);
  view.replaceChildren(timeView.bar(), el("div", { class: "pages time-page" }, timeView.box, timeView.memoryBar(), timeView.below()));
  const seen = new ResizeObserver(() => timeView.draw());
  for (const box of [timeView.box, timeView.box.parentNode]) seen.observe(box);
  return timeView.draw();
}

function rooflineText(roofline) {
  if (!roofline) return "";
  const { resources, seconds, mfu } = roofline;
  const longest = resources.reduce((best, each) => (each[1] / each[2] > best[1] / best[2] ? each : best));
  const name = ([resource]) => ({ compute: "compute (MFU " + percent(mfu, 1) + ")", memory: "memory" })[resource] ?? `links over ${resource}`;
  return `Share of peak: ${resources.map((each) => `${percent(each[1] / each[2], seconds)} ${name(each)}`).join(", ")}; bound by ${longest[0]}`;
}

class TimeView {
  constructor(timing) {
    this.timing = timing;
    [this.from, this.to] = [0, timing.end];
    this.held = this._held("kind");
    this.pressed = new Map(); // where pointers are down
    this.tip = el("div", { class: "time-tip", role: "status", hidden: true });
    this.canvas = el("canvas", {
      tabindex: "0",
      role: "img",
      "aria-label": `One step over time: ${this.summary()}. Arrow keys move, plus and minus zoom, 0 shows all`,
      onpointermove: (event) => this._move(event),
      onpointerdown: (event) => this.pressed.set(event.pointerId, event.offsetX),
      onpointerup: (event) => this.pressed.delete(event.pointerId),
      onpointercancel: (event) => this.pressed.delete(event.pointerId),
      onpointerleave: (event) => {
        this.pressed.delete(event.pointerId);
        if (event.pointerType !== "touch") this._point(null);
      },
      onclick: (event) => this._click(event),
      ondblclick: (event) => this._enter(event),
      onkeydown: (event) => this._key(event),
    });
    this.canvas.addEventListener("wheel", (event) => this._wheel(event), { passive: false });
    this.colours = new Colours();
    this.box = el("div", { class: "time-box" }, this.canvas, this.tip, this.colours.probe);
  }

  /** Compute, what is waited for and what is hidden, in words. */
  summary() {
    const { unit, data } = this.timing.plan;
    const [compute, communication, hidden] = data.time;
    return `${timeText(this.timing.total, unit)}: ${timeText(compute, unit)} compute, ${timeText(communication - hidden, unit)} waiting for collectives, ${timeText(hidden, unit)} hidden${this._ran()}`;
  }

  /** How long a call took where it ran. */
  _ran() {
    const { run } = this.timing.plan.data;
    return run ? `; measured on ${run.device} ${timeText(run.seconds, "seconds")}, ${(run.seconds / this.timing.total).toPrecision(2)} times that` : "";
  }

  /** What is held, by kind or by scope; null where nothing is known of it. */
  _held(by) {
    const { plan } = this.timing;
    return plan.data.memory?.timeline.length ? (this.timing.held[by] ??= new Held(plan, by)) : null;
  }

  bar() {
    const swatch = (kind, name) => el("span", { class: "swatch" }, el("i", { class: kind }), name);
    const button = (label, text, by) => el("button", { title: label, "aria-label": label, onclick: by }, text);
    const { host } = this.timing.plan.data;
    const kinds = [["compute", "compute"], ["exposed", "waited for"], ["hidden", "hidden"], host.length && ["host", "host"], this.timing.measured.length && ["measured", "measured"]];
    const tools = [
      kinds.filter(Boolean).map((kind) => swatch(...kind)),
      button("Zoom in (+)", "+", () => this._zoom(0.5)),
      button("Zoom out (-)", "−", () => this._zoom(2)),
      button("Whole step (0)", "all", () => this._show(0, this.timing.end)),
    ];
    return el("div", { class: "view-bar said" }, el("span", { class: "quiet" }, this.summary()), el("span", { class: "together" }, tools));
  }

  /** What memory is shown by, and what that is at the peak. */
  memoryBar() {
    const box = el("div", { class: "held-bar" });
    const show = (by) => {
      this.held = this._held(by);
      const button = (name) => el("button", { "aria-pressed": name === by, onclick: () => show(name) }, `by ${name}`);
      box.replaceChildren(el("span", { class: "quiet" }, "Memory"), ...Object.keys(HELD_BY).map(button), this.held.legend());
      this.draw();
    };
    if (this.held) show(this.held.by);
    return box;
  }

  /** What is waited for longest, and the roofline. */
  below() {
    const { plan, total } = this.timing;
    const rows = this.timing.waits().slice(0, 5).map(({ title, sent, time }) =>
      el("li", {}, el("button", { class: "link", onclick: () => selectCollective(sent) }, `${title} at ${fileLine(plan.placeOf(sent.place).line)}`), el("span", {}, ` ${timeText(time, plan.unit)}, ${percent(time, total)}`)),
    );
    const roofline = rooflineText(plan.data.roofline);
    return el("div", { class: "time-below" }, roofline ? el("p", {}, roofline) : null, rows.length ? [el("p", { class: "quiet" }, "Waited for longest:"), el("ol", {}, rows)] : null);
  }

  // Drawing.

  /** The rows with their places, and where memory begins. */
  _layout() {
    let top = TIMING.axis;
    const rows = this.timing.rows.map((row) => {
      if (row.starts) top += TIMING.gap;
      const placed = { row, top };
      top += TIMING.row;
      return placed;
    });
    top += TIMING.gap;
    const page = this.box.parentNode?.clientHeight ?? 0;
    const room = Math.max(MEMORY.least, Math.min(MEMORY.most, page - top - MEMORY.rest));
    return { rows, memory: top, room, height: top + (this.held ? room + TIMING.gap : 0) };
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width || this.asked) return;
    this.asked = requestAnimationFrame(() => {
      this.asked = 0;
      this._draw(width);
    });
  }

  _draw(width) {
    const { rows, memory, room, height } = this._layout();
    const dense = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * dense, height: height * dense });
    this.canvas.style.cssText = `width:${width}px;height:${height}px`;
    const pen = this.canvas.getContext("2d");
    const colour = (name) => this.colours.of(name);
    this.width = width;
    pen.scale(dense, dense);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this._axis(pen, colour, height);
    for (const { row, top } of rows) this._row(pen, colour, row, top);
    const { from, to } = this;
    this.held?.draw(pen, colour, { left: TIMING.names, top: memory, width: width - TIMING.names, height: room, from, to });
    this._outline(pen, colour);
  }

  _x(time) {
    return TIMING.names + ((time - this.from) / (this.to - this.from)) * (this.width - TIMING.names);
  }

  _time(x) {
    return this.from + ((x - TIMING.names) / (this.width - TIMING.names)) * (this.to - this.from);
  }

  _axis(pen, colour, height) {
    for (const at of timeTicks(this.from, this.to, this.width - TIMING.names)) {
      pen.globalAlpha = 0.13;
      pen.fillStyle = colour("text");
      pen.fillRect(this._x(at), TIMING.axis - 3, 1, height);
      pen.globalAlpha = 1;
      pen.fillStyle = colour("quiet");
      pen.textAlign = "center";
      pen.fillText(at ? timeText(at, this.timing.plan.unit) : "0", this._x(at), TIMING.axis / 2);
    }
  }

  /** The boxes of a row that are seen; of those that end in one pixel the first, so that a frame takes as long as the
   * view is wide, however many boxes there are. */
  _row(pen, colour, row, top) {
    pen.fillStyle = colour("quiet");
    pen.textAlign = "left";
    pen.fillText(row.name, 8, top + TIMING.row / 2, TIMING.names - 14);
    let n = countUntil(row.boxes, "end", this.from);
    while (n < row.boxes.length && row.boxes[n].start < this.to) {
      const box = row.boxes[n];
      const [left, right] = [Math.max(TIMING.names, this._x(box.start)), Math.min(this.width, this._x(box.end))];
      n = right - left < TIMING.least ? Math.max(n + 1, countUntil(row.boxes, "end", this._time(Math.floor(right) + 1))) : n + 1;
      const wide = Math.max(TIMING.least, right - left - (right - left > 3 ? 1 : 0));
      pen.fillStyle = colour(`time-${box.kind}`);
      pen.fillRect(left, top, wide, TIMING.row - 1.5);
      if (!(box.run && this._isCrowded(box.run))) this._label(pen, colour, box, left, wide, top);
    }
    for (const run of row.runs ?? []) if (this._isCrowded(run)) this._runLabel(pen, colour, run, top);
  }

  _label(pen, colour, box, left, wide, top) {
    const room = Math.floor((wide - LABEL.around) / LABEL.letter);
    if (room < Math.min(LABEL.least, box.label.length)) return;
    pen.fillStyle = colour(["hidden", "scope", "loop", "measured", "measured-sent"].includes(box.kind) ? "text" : "on-time");
    pen.fillText(clipped(box.label, room), left + LABEL.around / 2, top + TIMING.row / 2);
  }

  /** Whether scopes that are alike have no room for a name each. */
  _isCrowded({ start, end, count, letters }) {
    return (this._x(end) - this._x(start)) / count < LABEL.around + LABEL.letter * letters;
  }

  /** One name of them all, in the middle of what is seen of them. */
  _runLabel(pen, colour, { start, end, label }, top) {
    const [left, right] = [Math.max(TIMING.names, this._x(start)), Math.min(this.width, this._x(end))];
    const wide = LABEL.around + LABEL.letter * label.length;
    if (right - left < wide) return;
    pen.fillStyle = colour("time-scope");
    pen.fillRect((left + right - wide) / 2, top, wide, TIMING.row - 1.5);
    pen.fillStyle = colour("text");
    pen.textAlign = "center";
    pen.fillText(label, (left + right) / 2, top + TIMING.row / 2);
    pen.textAlign = "left";
  }

  _outline(pen, colour) {
    if (!this.over?.box) return;
    const { box, top } = this.over;
    const [left, right] = [Math.max(TIMING.names, this._x(box.start)), Math.min(this.width, this._x(box.end))];
    pen.strokeStyle = colour("text");
    pen.lineWidth = 1.5;
    pen.strokeRect(left, top, Math.max(1, right - left - 1), TIMING.row - 1.5);
  }

  // Pointing, zooming.

  _show(from, to) {
    const { end } = this.timing;
    const span = Math.min(end, Math.max(end / MOST_ZOOM, to - from));
    this.from = Math.max(0, Math.min(end - span, from));
    this.to = this.from + span;
    this.draw();
  }

  _zoom(factor, at = (this.from + this.to) / 2) {
    this._show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  _wheel(event) {
    if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) < Math.abs(event.deltaY) && !event.altKey && !event.shiftKey) {
      this._zoom(1.0015 ** event.deltaY, this._time(event.offsetX));
    } else {
      const by = ((event.deltaX || event.deltaY) * (this.to - this.from)) / (this.width - TIMING.names);
      this._show(this.from + by, this.to + by);
    }
    event.preventDefault();
  }

  _key(event) {
    const span = this.to - this.from;
    const doing = {
      ArrowLeft: () => this._show(this.from - span / 8, this.to - span / 8),
      ArrowRight: () => this._show(this.from + span / 8, this.to + span / 8),
      "+": () => this._zoom(0.5),
      "=": () => this._zoom(0.5),
      "-": () => this._zoom(2),
      0: () => this._show(0, this.timing.end),
      Home: () => this._show(0, span),
      End: () => this._show(this.timing.end - span, this.timing.end),
    }[event.key];
    if (!doing) return;
    doing();
    event.preventDefault();
    event.stopPropagation();
  }

  _boxAt(event) {
    const { rows, memory } = this._layout();
    if (this.held && event.offsetX >= TIMING.names && memory <= event.offsetY) return { point: this.held.at(this._time(event.offsetX)), top: memory };
    const placed = rows.find(({ top }) => top <= event.offsetY && event.offsetY < top + TIMING.row);
    const box = placed && event.offsetX >= TIMING.names ? Timing.at(placed.row.boxes, this._time(event.offsetX)) : null;
    return box ? { box, top: placed.top } : null;
  }

  _move(event) {
    const grip = this.pressed.get(event.pointerId);
    if (grip === undefined || !event.buttons) return this._point(this._boxAt(event), event);
    this.dragged = this.dragged || Math.abs(event.offsetX - grip) > 3;
    const other = [...this.pressed].find(([id]) => id !== event.pointerId);
    this.pressed.set(event.pointerId, event.offsetX);
    if (other) return this._pinch(grip, event.offsetX, other[1]);
    const by = ((grip - event.offsetX) * (this.to - this.from)) / (this.width - TIMING.names);
    return this._show(this.from + by, this.to + by);
  }

  /** Two fingers stay on the times that they are on: one moves, `other` rests. */
  _pinch(was, now, other) {
    const each = (this._time(was) - this._time(other)) / (now - other); // the time of a pixel
    if (Math.abs(now - other) < LABEL.around || each <= 0) return;
    const from = this._time(other) - (other - TIMING.names) * each;
    this._show(from, from + each * (this.width - TIMING.names));
  }

  _point(over, event) {
    this.over = over;
    this.tip.hidden = !over;
    if (over) {
      this.tip.replaceChildren(...(over.point ? this._saidOfMemory(over.point) : this._said(over.box)));
      this._placeTip(over, event);
    }
    this.draw();
  }

  /** Beside the pointer, below a row and above memory; within the window. */
  _placeTip({ top, point }, event) {
    const box = this.box.getBoundingClientRect();
    const { offsetWidth: wide, offsetHeight: high } = this.tip;
    const left = box.left + Math.max(4, Math.min(event.offsetX + 14, this.width - wide - 8));
    const [least, most] = [Math.max(4, byId("view").getBoundingClientRect().top), window.innerHeight - 4 - high];
    const [above, below] = [box.top + top - 6 - high, box.top + top + TIMING.row + 6];
    const place = point || below > most ? above : below;
    this.tip.style.cssText = `left:${left}px;top:${place < least ? most : place}px`;
  }

  /** What is said of memory at a moment: all of it, and by which op. */
  _saidOfMemory(point) {
    const { plan } = this.timing;
    const { line } = plan.place(point.op);
    const all = point.sizes.reduce((sum, size) => sum + size, 0);
    return [el("b", {}, `${bytesText(all)} held`), facts([...this.held.said(point), ["while", `${plan.shortKind(point.op)} at ${fileLine(line)}`]])];
  }

  /** What is said of a box: how long, how often, and of which op or collective. */
  _said({ label, start, end, slice, trips, kind, measured }) {
    const { plan, total } = this.timing;
    if (measured) return [el("b", {}, label), facts(this._saidOfMeasured(end - start, measured))];
    const said = [["takes", `${timeText(end - start, plan.unit)}, ${percent(end - start, total)} of the step`]];
    if (trips > 1) said.push(["drawn as", `one trip, as wide as all ${trips}`]);
    if (slice) {
      const [sent, moved] = [this.timing.collectiveOf(slice), this.timing.movedOf(slice)];
      if (moved) said.push(["moves", `${moved[1]}${moved[2] ? `, ${moved[2]}` : ""}`], ["line", moved[4]]);
      if (slice.times > 1) said.push(["runs", `${countText(slice.times)} times, ${timeText(slice.duration / slice.times, plan.unit)} each`]);
      if (slice.op >= 0 && !sent && !moved && plan.data.ops.flops[slice.op]) said.push(["computes", `${flopsText(plan.data.ops.flops[slice.op])} each time`]);
      if (sent) said.push(["sends", `${bytesText(sent.bytes)} each time`], ["for", sent.cause], ["is", kind === "hidden" ? "hidden beside work" : "waited for"]);
      const place = moved ? null : sent ? plan.placeOf(sent.place) : slice.op >= 0 ? plan.place(slice.op) : null;
      if (place) said.push(["scope", place.scope], ["line", `${fileLine(place.line)} ${place.text}`]);
    }
    return [el("b", {}, label), facts(said)];
  }

  _saidOfMeasured(seconds, { name, scope, backward, sent }) {
    const place = sent ? app.plan.placeOf(sent.place) : null;
    return [["took", timeText(seconds, "seconds")], ["instruction", name], ["scope", scope], ["pass", backward ? "backward" : ""], ["for", sent?.cause], ["line", place && `${fileLine(place.line)} ${place.text}`]];
  }

  /** A click selects what a box is of; in a dragged view it does not. A finger, which does not hover, has it said as well. */
  _click(event) {
    const over = this.dragged ? null : this._boxAt(event);
    if (event.pointerType === "touch" && !this.dragged) this._point(over, event);
    this.dragged = false;
    if (over?.point) selectOp(over.point.op);
    else if (over) this._select(over.box);
  }

  _select(box) {
    const { slice, measured } = box;
    const sent = measured ? measured.sent : slice && this.timing.collectiveOf(slice);
    const scope = slice || measured ? null : scopeOf(box);
    if (sent) selectCollective(sent);
    else if (slice?.op >= 0) selectOp(slice.op);
    else if (scope) selectScope(scope);
  }

  /** A double click fills the view with a box. */
  _enter(event) {
    const over = this._boxAt(event);
    if (over?.box) this._show(over.box.start, over.box.end);
  }
}

/** The colours of the style as a canvas takes them, which knows neither variables nor `light-dark`: those that an element
 * has. */
class Colours {
  constructor() {
    this.probe = el("i", { hidden: true });
    this.known = new Map();
  }

  of(name) {
    if (!this.known.has(name)) {
      this.probe.style.color = `var(--${name})`;
      this.known.set(name, getComputedStyle(this.probe).color);
    }
    return this.known.get(name);
  }
}

/** How many of some boxes, in the order of time, start or end (`edge`) no later than a moment. */
function countUntil(boxes, edge, time) {
  let [low, high] = [0, boxes.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (boxes[middle][edge] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

// What is said at a place of the page does not move with the page.
document.addEventListener("scroll", () => timeView?._point(null), { capture: true, passive: true });

on("theme", () => {
  timeView?.colours.known.clear();
  timeView?.draw();
});
