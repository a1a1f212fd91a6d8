// What a device holds over the time of a step, in layers by kind or by scope, drawn below the lanes.

const ALWAYS = ["weights", "optimizer state", "arguments", "results"];
const KINDS = [...ALWAYS, "gathered", "activations", "gradients", "recomputed", "temporaries"];
/** Scopes that have a layer of their own; the others are one. Chosen: as many as there are colours. */
const MOST_SCOPES = 7;

/** Layers that are alike have one name: `layer_*`. */
const foldedScope = (scope) => folded(scope) || "no scope";

const HELD_BY = {
  kind: (plan, [, , , , kind]) => kind,
  scope: (plan, [value]) => (plan.maker(value) < 0 ? "no scope" : foldedScope(plan.place(plan.maker(value)).scope)),
};

/** What is held, `layers` from below with their names, and `points` in time, each with the bytes of all layers. */
class Held {
  constructor(plan, by) {
    const { memory, timeline } = plan.data;
    Object.assign(this, { memory, by, always: memory.always, layers: [], points: [] });
    const labels = memory.buffers.map((buffer) => HELD_BY[by](plan, buffer));
    const found = this._temporaries(labels);
    const names = this._order(found);
    this.layers = [...this.always.map(([kind]) => kind), ...names];
    const base = this.always.map(([, bytes]) => bytes);
    memory.timeline.forEach((size, op) => {
      const sizes = [...base, ...names.map((name) => found.get(name)[op])];
      const point = { at: timeline.starts[op], op, sizes, total: size };
      if (this.points.length && this.points.at(-1).at === point.at) {
        if (point.total > this.points.at(-1).total) this.points[this.points.length - 1] = point;
      } else this.points.push(point);
    });
    this.most = this.points.reduce((best, point) => (point.total > best.total ? point : best), this.points[0]);
  }

  /** The bytes of temporaries at each op by labels. Where an op's are not all there at one moment, each has its share. */
  _temporaries(labels) {
    const { timeline, temporaries, buffers } = this.memory;
    const found = new Map([...new Set(labels)].map((label) => [label, new Float64Array(timeline.length + 1)]));
    buffers.forEach(([, bytes, first, last], n) => {
      const changes = found.get(labels[n]);
      changes[first] += bytes;
      changes[last + 1] -= bytes;
    });
    const all = new Float64Array(timeline.length);
    for (const sizes of found.values()) sizes.forEach((_, op) => op && (sizes[op] += sizes[op - 1]));
    for (const sizes of found.values()) all.forEach((_, op) => (all[op] += sizes[op]));
    for (const sizes of found.values()) all.forEach((size, op) => size > temporaries && (sizes[op] *= temporaries / size));
    return found;
  }

  /** The names of layers: kinds in their order, the largest scopes with the rest as one. */
  _order(found) {
    if (this.by === "kind") return KINDS.filter((kind) => found.has(kind));
    const most = (name) => found.get(name).reduce((best, size) => Math.max(best, size), 0);
    const names = [...found.keys()].sort((a, b) => most(b) - most(a));
    const rest = names.splice(MOST_SCOPES);
    if (!rest.length) return names;
    const sum = found.get(rest[0]).map((_, op) => rest.reduce((all, name) => all + found.get(name)[op], 0));
    found.set("other scopes", sum);
    return [...names, "other scopes"];
  }

  /** The colour of a layer, as a variable of the style. */
  colour(layer) {
    const name = this.layers[layer];
    if (KINDS.includes(name)) return `held-${name.replace(" ", "-")}`;
    return `held-${layer - this.always.length}`;
  }

  /** What is held at a moment. */
  at(time) {
    return this.points[Math.max(0, countUntil(this.points, "at", time) - 1)];
  }

  /** Per pixel of a view the point in it at which most is held, or the last one before it. */
  columns(from, to, width) {
    const found = [];
    for (let n = Math.max(0, countUntil(this.points, "at", from) - 1); n < this.points.length && this.points[n].at < to; n += 1) {
      const x = Math.max(0, Math.floor(((this.points[n].at - from) / (to - from)) * width));
      if (!found.length || found.at(-1).x < x) found.push({ x, point: this.points[n] });
      else if (found.at(-1).point.total < this.points[n].total) found.at(-1).point = this.points[n];
    }
    return found;
  }

  /** Draws the layers into a box, with the limit as a line. */
  draw(pen, colour, { left, top, width, height, from, to }) {
    const { memory, layers } = this;
    const shown = memory.available && memory.available < 1.5 * memory.peak ? Math.max(memory.peak, memory.available) : memory.peak;
    const high = (size) => (size / (1.06 * shown)) * (height - 14);
    const columns = this.columns(from, to, width);
    let below = columns.map(() => 0);
    layers.forEach((_, layer) => {
      pen.fillStyle = colour(this.colour(layer));
      for (let first = 0, n = 1; n <= columns.length; n += 1) {
        const size = columns[first].point.sizes[layer];
        if (n < columns.length && below[n] === below[first] && columns[n].point.sizes[layer] === size) continue;
        const [x, next] = [columns[first].x, columns[n]?.x ?? width];
        if (size) pen.fillRect(left + x, top + height - high(below[first] + size), next - x, high(size));
        first = n;
      }
      below = below.map((size, n) => size + columns[n].point.sizes[layer]);
    });
    pen.fillStyle = colour("quiet");
    pen.textAlign = "left";
    pen.fillText("memory", 8, top + 22);
    pen.fillText(`peak ${bytesText(memory.peak)}`, 8, top + 36, left - 14);
    if (!memory.available) return;
    pen.fillText(`of ${bytesText(memory.available)}`, 8, top + 50, left - 14);
    if (memory.available > shown) return;
    pen.fillStyle = colour("more");
    pen.fillRect(left, top + height - high(memory.available), width, 1.5);
    pen.textAlign = "right";
    pen.fillText("limit", left + width - 4, top + height - high(memory.available) - 7);
  }

  /** What a layer is called: of results those that lie in arguments are held by these. */
  _label(name) {
    return name === "results" && this.memory.shared ? "results not in donated arguments" : name;
  }

  /** The layers with what they hold at a point, the largest first. */
  said(point) {
    const rows = this.layers.map((name, layer) => [this._label(name), point.sizes[layer]]).filter(([, size]) => size > 0);
    return rows.sort((a, b) => b[1] - a[1]).map(([name, size]) => [name, bytesText(size)]);
  }

  /** The layers with their colours and what they hold at the peak. */
  legend() {
    const { most } = this;
    const swatch = (name, layer) => (most.sizes[layer] > 0 ? el("span", { class: "swatch" }, el("i", { style: `background:var(--${this.colour(layer)})` }), `${this._label(name)} ${bytesText(most.sizes[layer])}`) : null);
    return el("p", { class: "held-legend" }, el("span", { class: "quiet" }, "At the peak: "), this.layers.map(swatch));
  }
}
