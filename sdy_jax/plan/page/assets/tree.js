// The tree on the left: scopes and source lines, with what they send or compute as bars.

const METRICS = {
  sent: { text: bytesText, unit: "bytes sent" },
  time: { text: (amount) => timeText(amount, app.plan.unit), unit: "of collectives" },
  flops: { text: flopsText, unit: "per device" },
  held: { text: bytesText, unit: "made" },
  ops: { text: countText, unit: "ops" },
};

let treeList = null;

function startTree() {
  treeList = new Windowed(byId("tree"), {
    height: 26,
    role: "tree",
    rowRole: "treeitem",
    label: "Scopes, source lines and ops",
    row: treeRow,
    choose: (scope, opens) => {
      if (opens && scope.children.length) setOpen(scope, !scope.open || app.selected?.scope !== scope);
      selectScope(scope);
    },
    move: moveInTree,
  });
  byId("metric").onchange = (event) => {
    app.metric = event.target.value;
    treeList.redraw();
  };
  on("plan", () => {
    byId("metric").querySelector("[value=time]").hidden = !hasTimes();
    treeList.active = 0;
    showTree();
  });
  on("moment", () => treeList.redraw());
  on("select", () => {
    const scope = app.selected?.scope;
    if (!scope) return treeList.redraw();
    app.scopes.reveal(scope);
    showTree();
    treeList.activate(treeList.entries.indexOf(scope));
  });
}

function showTree() {
  const rows = app.scopes.visible();
  byId("program").style.cssText = `--rows:${rows.length}`;
  treeList.show(rows);
}

function setOpen(scope, open) {
  scope.open = open;
  showTree();
}

function moveInTree(scope, key) {
  if (key === "ArrowRight" && scope.children.length) {
    if (!scope.open) setOpen(scope, true);
    else selectScope(scope.children[0]);
    return true;
  }
  if (key === "ArrowLeft") {
    if (scope.open && scope.children.length) setOpen(scope, false);
    else if (scope.parent) selectScope(scope.parent);
    return true;
  }
  return false;
}

function treeRow(scope) {
  const { sums, kind } = scope;
  const amount = sums[app.metric];
  const whole = app.scopes.root.sums[app.metric];
  const { text } = METRICS[app.metric];
  const collective = scope.op >= 0 ? app.plan.collectiveAt.get(scope.op) : null;
  const caret = el("span", { class: `caret${scope.children.length ? "" : " none"}${scope.open ? " open" : ""}`, "aria-hidden": "true" });
  const row = el(
    "div",
    { class: `scope ${kind}`, style: `--level:${scope.level}`, title: treeTitle(scope), "aria-level": scope.level + 1 },
    caret,
    scope.op >= 0 ? opMark(scope.op, collective) : null,
    el("span", { class: "label" }, scopeLabel(scope)),
    changedMark(scope),
    app.differing.has(scope) ? el("span", { class: "differs", title: "differs between the plans" }, "±") : null,
    el("span", { class: "amount" }, amount ? text(amount) : ""),
    el("span", { class: `share${amount ? "" : " none"}`, "aria-hidden": "true" }, el("span", { style: `width:${whole ? (100 * amount) / whole : 0}%` })),
  );
  if (scope.children.length) row.setAttribute("aria-expanded", scope.open);
  row.setAttribute("aria-selected", app.selected?.scope === scope);
  return row;
}

/** A line's text says more than its number. */
function scopeLabel(scope) {
  if (scope.kind === "op") return [opName(scope.op), " ", el("span", { class: "quiet" }, resultType(scope.op))];
  if (!scope.title) return [fileLine(scope.label)];
  return [el("code", {}, scope.title), " ", el("span", { class: "quiet" }, fileLine(scope.label))];
}

function treeTitle(scope) {
  const where = scope.kind === "op" ? app.plan.names[app.plan.data.ops.results[scope.op][0]] ?? "" : scope.label;
  return `${where}${scope.title ? `\n${scope.title}` : ""}\n${several(scope.sums.ops, "op")}, ${bytesText(scope.sums.sent)} sent`;
}

function opMark(op, collective) {
  if (collective) return el("span", { class: `mark ${collective.kind}`, "aria-hidden": "true" });
  const [value] = app.plan.data.ops.results[op];
  if (value === undefined) return el("span", { class: "mark none", "aria-hidden": "true" });
  return el("span", { class: "grid-mark", "aria-hidden": "true" }, miniGrid(app.plan.mesh, app.steps.typeAt(value, app.moment), 14));
}

const opName = (op) => {
  const times = app.plan.data.ops.times[op];
  return `${app.plan.shortKind(op)}${times > 1 ? ` ×${countText(times)}` : ""}`;
};

const resultType = (op) => {
  const [value] = app.plan.data.ops.results[op];
  return value === undefined ? "" : app.steps.typeAt(value, app.moment);
};

/** A dot where a layout changes in the present step. */
function changedMark(scope) {
  if (app.moment >= app.steps.last || !app.changedScopes.has(scope)) return null;
  return el("span", { class: "changed", title: "changes in this step" });
}
