// The moments at which layouts change: as annotated, each step of propagation, each line that the planner changed, partitioned.

const SPREAD = ["step", "value", "type", "axis", "dim", "source", "sourceDim", "op", "place", "level", "priority"];

class Steps {
  constructor(plan) {
    this.plan = plan;
    this.moments = [];
    this.phases = [];
    this.history = new Map(); // per name, the moments at which it changes, and its types
    this.spreads = new Map(); // per name, what gave it axes
    this.starts = new Map();
    if (plan.data.steps) this._propagation(plan.data.steps);
    this._planner();
    this._phase("partitioned");
    this._add({ title: "Partitioned", text: `the program with its ${transfersWords(plan.transfers())}`, changed: this._made() });
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

  _write(value, type) {
    if (!this.history.has(value)) this.history.set(value, []);
    this.history.get(value).push([this.moments.length, type]);
  }

  _propagation({ starts, spreads }) {
    const text = this.plan.text;
    this._phase("annotated");
    for (const [value, type, texts] of starts) {
      this._write(value, text[type]);
      this.starts.set(value, texts.map((n) => text[n]));
    }
    this._add({ title: "As annotated", text: `${several(starts.length, "value")} with stated layouts`, changed: starts.map((each) => each[0]) });
    let level = null;
    for (const step of groupedBy(spreads.map((row) => this._spread(row)), (each) => each.step)) {
      const at = `${step[0].priority}.${step[0].level}`;
      if (at !== level) this._phase(step[0].priority ? `user priority ${step[0].priority}, op priority ${step[0].level}` : `op priority ${step[0].level}`);
      level = at;
      this._propagated(step);
    }
    this.propagated = this.moments.length - 1;
  }

  _spread(row) {
    const found = {};
    SPREAD.forEach((name, n) => (found[name] = row[n]));
    for (const name of ["type", "axis", "op"]) found[name] = this.plan.text[found[name]];
    return Object.assign(found, { at: 0, op: found.op.replace(/^[a-z_]+\./, "") });
  }

  _propagated(step) {
    const changed = [...new Set(step.map((each) => each.value))];
    for (const each of step) {
      each.at = this.moments.length;
      this._write(each.value, each.type);
      if (!this.spreads.has(each.value)) this.spreads.set(each.value, []);
      this.spreads.get(each.value).push(each);
    }
    const { op, place, axis, source, dim } = step[0];
    const from = source >= 0 ? ` from ${this.plan.names[source]}` : "";
    const others = step.length > 1 ? ` and ${step.length - 1} more` : "";
    const text = `${op} at ${fileLine(this.plan.placeOf(place).line)} gives ${this.plan.names[changed[0]]} ‘${axis}’ on dim ${dim}${from}${others}`;
    this._add({ title: "Propagation", text, changed });
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
      for (const value of values) this._write(value, plan.type(value));
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
