// The moments at which layouts change: as annotated, each step of propagation, each line that the planner changed, partitioned.

const SPREAD = ["step", "value", "type", "axis", "dim", "source", "sourceDim", "op", "place", "level", "priority"];

class Steps {
  constructor(plan) {
    this.plan = plan;
    this.moments = [];
    this.phases = [];
    if (plan.data.steps) this._propagation(plan.data.steps);
    this._planner();
    this._phase("partitioned");
    this._add({ title: "Partitioned", text: `the program with its ${several(plan.transfers().count, "collective")}`, changed: this._made() });
  }

  /** Per name the moments at which it changes, and its types. */
  get history() {
    return this._found.history;
  }

  /** Per name what gave it axes. */
  get spreads() {
    return this._found.spreads;
  }

  /** Per name the annotations that it begins with. */
  get starts() {
    return this._found.starts;
  }

  /** What moments say by names. Read when it is first asked for: who opens a page does not step at once. */
  get _found() {
    return (this._read ??= this._byName());
  }

  get last() {
    return this.moments.length - 1;
  }

  /** The type of a value at a moment. */
  typeAt(value, moment) {
    const final = this.plan.type(value);
    if (moment >= this.last || !this.plan.data.steps) return final;
    let found = null;
    for (const [at, type] of this.history.get(value) ?? []) {
      if (at > moment) break;
      found = type;
    }
    if (found !== null) return found;
    const proposed = this.plan.proposed(value);
    return moment >= this.propagated && proposed ? proposed : plainType(final);
  }

  changedAt(moment) {
    return this.moments[moment].changed;
  }

  phaseAt(moment) {
    return this.phases.findLast((phase) => phase.first <= moment);
  }

  _phase(name) {
    this.phases.push({ name, first: this.moments.length });
  }

  _add(moment) {
    this.moments.push(moment);
  }

  _propagation({ starts, spreads }) {
    this._phase("annotated");
    this._add({ title: "As annotated", text: `${several(starts.length, "value")} with stated layouts`, changed: starts.map((each) => each[0]) });
    let phase = "";
    for (const [first, end] of runsOfSteps(spreads)) {
      const [level, priority] = spreads[first].slice(SPREAD.indexOf("level"));
      const next = priority ? `user priority ${priority}, op priority ${level}` : `op priority ${level}`;
      if (next !== phase) this._phase(next);
      phase = next;
      this._add(new PropagationStep(this.plan, this.moments.length, first, end));
    }
    this.propagated = this.moments.length - 1;
  }

  _byName() {
    const [steps, strings] = [this.plan.data.steps, this.plan.text];
    const found = { history: new Map(), spreads: new Map(), starts: new Map() };
    const add = (map, name, entry) => (map.get(name) ?? map.set(name, []).get(name)).push(entry);
    for (const [value, type, texts] of steps?.starts ?? []) {
      add(found.history, value, [0, strings[type]]);
      found.starts.set(value, texts.map((n) => strings[n]));
    }
    this.moments.forEach((moment, at) => {
      if (moment instanceof PropagationStep) {
        for (const each of moment.spreads()) {
          add(found.history, each.value, [at, each.type]);
          add(found.spreads, each.value, each);
        }
      } else if (moment.title === "Planner") {
        for (const value of moment.changed) add(found.history, value, [at, this.plan.type(value)]);
      }
    });
    return found;
  }

  /** What the planner lays out otherwise than propagation proposed, by lines. */
  _planner() {
    const plan = this.plan;
    const byLine = new Map();
    for (let value = 0; value < plan.valueCount; value += 1) {
      if (!plan.isChanged(value)) continue;
      const maker = plan.maker(value);
      const line = maker < 0 ? "arguments" : plan.place(maker).line;
      if (!byLine.has(line)) byLine.set(line, []);
      byLine.get(line).push(value);
    }
    if (byLine.size) this._phase("planner");
    for (const [line, values] of byLine) {
      const [first] = values;
      const text = `${several(values.length, "value")} at ${fileLine(line)}: ${plan.type(first)} instead of ${plan.proposed(first)}`;
      this._add({ title: "Planner", text, changed: values });
    }
  }

  /** The values that only the partitioned program has. */
  _made() {
    const found = [];
    for (let value = 0; value < this.plan.valueCount; value += 1) {
      if (!this.plan.proposed(value) && this.plan.collectiveAt.has(this.plan.maker(value))) found.push(value);
    }
    return found;
  }
}

/** A step of propagation: rows of the plan, each of which gives a value an axis, read when they are looked at. */
class PropagationStep {
  constructor(plan, at, first, end) {
    Object.assign(this, { plan, at, first, end, title: "Propagation" });
  }

  spreads() {
    return this._rows().map((row) => {
      const found = { at: this.at };
      SPREAD.forEach((name, n) => (found[name] = row[n]));
      for (const name of ["type", "axis", "op"]) found[name] = this.plan.text[found[name]];
      return Object.assign(found, { op: found.op.replace(/^[a-z_]+\./, "") });
    });
  }

  get changed() {
    return [...new Set(this._rows().map((row) => row[SPREAD.indexOf("value")]))];
  }

  get text() {
    const { plan, changed } = this;
    const { op, place, axis, source, dim } = this.spreads()[0];
    const from = source >= 0 ? ` from ${plan.names[source]}` : "";
    const others = this.end - this.first > 1 ? ` and ${this.end - this.first - 1} more` : "";
    return `${op} at ${fileLine(plan.placeOf(place).line)} gives ${plan.names[changed[0]]} ‘${axis}’ on dim ${dim}${from}${others}`;
  }

  _rows() {
    return this.plan.data.steps.spreads.slice(this.first, this.end);
  }
}

/** Where the rows of each step begin and end. */
function* runsOfSteps(rows) {
  for (let first = 0, end; first < rows.length; first = end) {
    for (end = first + 1; end < rows.length && rows[end][0] === rows[first][0]; ) end += 1;
    yield [first, end];
  }
}

/** Runs of entries with one key. */
function* groupedBy(entries, key) {
  let run = [];
  for (const entry of entries) {
    if (run.length && key(run[0]) !== key(entry)) {
      yield run;
      run = [];
    }
    run.push(entry);
  }
  if (run.length) yield run;
}
