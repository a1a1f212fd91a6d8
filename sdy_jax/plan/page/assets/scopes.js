// The program as a tree: name scopes, or the functions and lines of calls, then source lines, then ops.

class Scope {
  constructor(id, kind, label, parent, title = "") {
    Object.assign(this, { id, kind, label, parent, title, children: [], ops: [], op: -1 });
    Object.assign(this, { level: parent ? parent.level + 1 : 0, open: false });
    this.sums = { sent: 0, time: 0, flops: 0, held: 0, ops: 0 };
  }

  get path() {
    return this.parent ? [...this.parent.path, this] : [this];
  }

  contains(other) {
    for (let at = other; at; at = at.parent) if (at === this) return true;
    return false;
  }
}

/** Ops that compute nothing, and belong to no line. */
const TERMINATORS = new Set(["func.return", "sdy.return", "stablehlo.return"]);

const isAlone = (scopes) => scopes.length === 1 && scopes[0].kind !== "op";

/** Scopes that somebody named; einsum calls its own by the subscripts, and jax by its transformations. */
const NAMED = /^[\w.$-]*[\w.$]$/;

class Scopes {
  constructor(plan) {
    this.plan = plan;
    this.all = [];
    this.root = this._new("root", plan.data.name, null);
    this.root.open = true;
    this.ofOp = new Array(plan.opCount);
    this._at = new Map();
    this._placed = new Map();
    for (let op = 0; op < plan.opCount; op += 1) this._place(op);
    this._contract(this.root);
    this._fold(this.root);
    this.all = [];
    this._number(this.root);
  }

  _new(kind, label, parent, title = "") {
    const scope = new Scope(this.all.length, kind, label, parent, title);
    this.all.push(scope);
    parent?.children.push(scope);
    return scope;
  }

  _child(parent, kind, label, title) {
    const key = `${parent.id} ${kind} ${label}`;
    if (!this._at.has(key)) this._at.set(key, this._new(kind, label, parent, title));
    return this._at.get(key);
  }

  /** Puts an op under the line that it comes from. */
  _place(op) {
    if (TERMINATORS.has(this.plan.kind(op))) {
      this.ofOp[op] = this.root;
      return;
    }
    const number = this.plan.data.ops.place[op];
    if (!this._placed.has(number)) this._placed.set(number, this._line(this.plan.placeOf(number)));
    const line = this._placed.get(number);
    const scope = this._new("op", this.plan.shortKind(op), line);
    scope.op = op;
    this.ofOp[op] = scope;
    const [sent, time, flops, held] = [this.plan.sent[op], this.plan.sending[op], this.plan.work(op), this.plan.held(op)];
    for (let at = scope; at; at = at.parent) {
      at.ops.push(op);
      at.sums.sent += sent;
      at.sums.time += time;
      at.sums.flops += flops;
      at.sums.held += held;
      at.sums.ops += 1;
    }
  }

  _line(place) {
    let at = place.backward ? this._child(this.root, "scope", "backward pass") : this.root;
    const scopes = place.scope.split("/").filter((name) => NAMED.test(name));
    if (scopes.length) for (const name of scopes) at = this._child(at, "scope", name);
    else for (const frame of [...place.callers].reverse().map((n) => this.plan.frame(n))) at = this._child(at, "call", frame.line, frame.text);
    return this._child(at, "line", /\w:\d+$/.test(place.line) ? place.line : "no source line", place.text);
  }

  /** Calls with a single child are that child, and a call that is alone in a scope is the scope: whoever looks for lines
   * has not to open them one by one. */
  _contract(scope) {
    for (const child of scope.children) this._contract(child);
    scope.children = scope.children.map((child) => (child.kind === "call" && isAlone(child.children) ? child.children[0] : child));
    const [only] = scope.children;
    if (isAlone(scope.children) && only.kind === "call") scope.children = only.children;
    for (const child of scope.children) child.parent = scope;
  }

  /** Scopes whose names differ in numbers alone, as those of layers, are one that can be opened. */
  _fold(scope) {
    if (!scope.children.length) return;
    for (const child of scope.children) this._fold(child);
    const numbered = scope.children.filter((child) => child.kind === "scope" && folded(child.label) !== child.label);
    for (const group of groupsOf(numbered, (child) => folded(child.label))) {
      if (group.length < LEAST_ALIKE) continue;
      const layers = new Scope(this.all.length, "layers", `${group.key} × ${group.length}`, scope);
      layers.children = group;
      layers.ops = [...Int32Array.from(group.flatMap((child) => child.ops)).sort()];
      for (const name in layers.sums) layers.sums[name] = group.reduce((sum, child) => sum + child.sums[name], 0);
      for (const child of group) child.parent = layers;
      scope.children.splice(scope.children.indexOf(group[0]), 1, layers);
      scope.children = scope.children.filter((child) => child === layers || !group.includes(child));
    }
  }

  /** Lists the scopes that are left, with their levels. */
  _number(scope) {
    this.all.push(scope);
    scope.level = scope.parent ? scope.parent.level + 1 : 0;
    scope.children.forEach((child) => this._number(child));
  }

  /** The rows of the tree that are not folded away. */
  visible() {
    const rows = [];
    const walk = (scope) => {
      rows.push(scope);
      if (scope.open) scope.children.forEach(walk);
    };
    walk(this.root);
    return rows;
  }

  /** The ops of a source line, wherever it is in the tree. */
  onLine(line) {
    if (!this._lines) {
      this._lines = new Map();
      for (const scope of this.all) {
        if (scope.kind === "line") this._lines.set(scope.label, [...(this._lines.get(scope.label) ?? []), ...scope.ops]);
      }
    }
    return this._lines.get(line) ?? [];
  }

  /** Opens all scopes around one. */
  reveal(scope) {
    for (let at = scope.parent; at; at = at.parent) at.open = true;
  }
}

/** `attention.py:42` of a longer path. */
const fileLine = (line) => line.slice(line.lastIndexOf("/") + 1);
