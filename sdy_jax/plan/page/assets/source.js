// The lines of the selected scope, or of that around a line, file by file, with what each sends and makes.

function showSource(view) {
  const lines = linesOf(app.scope.kind === "line" ? app.scope.parent : app.scope);
  const most = Math.max(1, ...lines.map((line) => line.sent));
  const parts = [];
  let file = null;
  let before = 0;
  for (const line of lines) {
    if (line.file !== file) parts.push(el("h3", { class: "file" }, line.file));
    else if (line.number > before + 1) parts.push(el("div", { class: "gap", "aria-hidden": "true" }, "⋯"));
    [file, before] = [line.file, line.number];
    parts.push(sourceLine(line, most));
  }
  const code = el("div", { class: "source" }, parts.length ? parts : el("p", { class: "quiet empty" }, "This scope has no source lines."));
  view.replaceChildren(el("div", { class: "view-bar" }, crumbs()), code);
  code.querySelector(".selected")?.scrollIntoView({ block: "nearest" });
}

/** The lines of a scope's ops, by file and number. */
function linesOf(scope) {
  const found = new Map();
  for (const op of scope.ops) {
    const place = app.plan.place(op);
    if (!found.has(place.line)) found.set(place.line, newLine(place));
    const line = found.get(place.line);
    line.ops.push(op);
    line.sent += app.plan.sent[op];
    line.flops += app.plan.work(op);
  }
  return [...found.values()].sort((a, b) => a.file.localeCompare(b.file) || a.number - b.number);
}

function newLine({ line, text }) {
  const colon = line.lastIndexOf(":");
  return { line, text, file: line.slice(0, colon), number: Number(line.slice(colon + 1)), ops: [], sent: 0, flops: 0 };
}

function sourceLine(line, most) {
  const kinds = new Map();
  for (const op of line.ops) {
    const collective = app.plan.collectiveAt.get(op);
    if (collective?.counted && collective.bytes) kinds.set(collective.kind, [...(kinds.get(collective.kind) ?? []), collective]);
  }
  const marks = [...kinds].map(([kind, all]) => {
    const found = app.plan.transfersOf(all);
    const words = found.unmerged > 1 ? `${kind} ×${transfersText(found)}` : kind;
    return el("span", { class: `kind-mark ${kind}`, title: words, "aria-label": words, role: "img" }, el("span", { class: `mark ${kind}` }), countText(found.count));
  });
  const { scope } = app.selected;
  const isChosen = [scope, scope?.parent].some((each) => each?.kind === "line" && each.label === line.line);
  return el(
    "button",
    { class: `source-line${isChosen ? " selected" : ""}`, onclick: () => selectScope(app.scopes.ofOp[line.ops.find((op) => app.plan.sent[op]) ?? line.ops[0]].parent, app.scope) },
    el("span", { class: "number" }, Number.isNaN(line.number) ? "" : String(line.number)),
    el("span", { class: "heat", title: `${bytesText(line.sent)} sent` }, el("span", { style: `width:${(100 * line.sent) / most}%` })),
    el("code", { title: line.text }, line.text || line.line),
    el("span", { class: "line-facts" }, marks, line.flops ? el("span", { class: "quiet" }, flopsText(line.flops)) : null, line.sent ? el("b", {}, bytesText(line.sent)) : null),
  );
}
