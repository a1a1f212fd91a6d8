// Tables: collectives alike together, the border, changed layouts, notes.

/** A table of rows with a head; `row(entry)` gives cells. */
function table(box, { columns, entries, row, choose, label, height = 30 }) {
  const head = el("div", { class: "row head", role: "row", style: `grid-template-columns:${columns.map((each) => each[1]).join(" ")}` });
  head.append(...columns.map(([name, , align]) => el("span", { role: "columnheader", class: align ?? "" }, name)));
  const list = new Windowed(box, {
    height,
    role: "table",
    rowRole: "row",
    label,
    head,
    choose,
    row: (entry) => {
      const cells = row(entry).map((cell, n) => el("span", { role: "cell", class: columns[n][2] ?? "" }, cell));
      return el("div", { style: head.style.cssText }, cells);
    },
  });
  list.show(entries);
  return list;
}

const shareBar = (part, whole, kind = "") => el("span", { class: `bar-cell ${kind}`, title: percent(part, whole) }, el("span", { style: `width:${whole ? (100 * part) / whole : 0}%` }));

/** Collectives of one kind, axes, type and line. */
function alike(collectives) {
  const found = new Map();
  for (const each of collectives) {
    const { line } = app.plan.placeOf(each.place);
    const key = [each.kind, each.axes, each.type, line].join("|");
    if (!found.has(key)) found.set(key, { first: each, line, all: [], sent: 0, time: 0, hidden: 0 });
    const group = found.get(key);
    group.all.push(each);
    group.sent += each.total;
    group.time += each.time;
    group.hidden += each.hidden;
  }
  return [...found.values()].sort((a, b) => b.sent - a.sent || b.time - a.time);
}

let sortedBy = "sent";

function showCollectives(view) {
  const { plan } = app;
  const inside = app.scope && app.scope.parent ? new Set(app.scope.ops) : null;
  const counted = inside ? plan.counted.filter((each) => inside.has(each.op >= 0 ? each.op : each.serves)) : plan.counted;
  const groups = alike(counted).sort((a, b) => b[sortedBy] - a[sortedBy]);
  const sum = (name) => groups.reduce((all, group) => all + group[name], 0);
  const [sent, time] = [sum("sent"), sum("time")];
  const box = el("div", { id: "collectives", class: "table" });
  const sorted = el("select", { "aria-label": "Order", onchange: (event) => ((sortedBy = event.target.value), showCollectives(view)) });
  for (const [name, label] of [["sent", "largest first"], ["time", "longest first"]]) sorted.append(el("option", { value: name, selected: sortedBy === name }, label));
  const words = [transfersWords(plan.transfersOf(counted)), bytesText(sent), ...(hasTimes() ? [timeText(time, plan.unit)] : [])].join(", ");
  view.replaceChildren(el("div", { class: "view-bar" }, crumbs(), el("span", { class: "quiet" }, words), sorted), box);
  table(box, {
    label: "Collectives, those alike together",
    columns: [["Collective", "minmax(130px, 1fr)"], ["Axes", "minmax(86px, .6fr)"], ["Calls", "48px", "right"], ["Sent", "72px", "right"], ["Share", "64px"], ...(hasTimes() ? [["Time", "64px", "right"]] : []), ["For", "minmax(120px, 2.4fr)"]],
    entries: groups,
    choose: (group) => selectCollective(group.first, app.scope),
    row: (group) => collectiveCells(group, sent),
  });
}

function collectiveCells(group, sent) {
  const { first, all } = group;
  const runs = app.plan.transfersOf(all);
  const place = app.plan.placeOf(first.place);
  return [
    [el("span", { class: `mark ${first.kind}`, "aria-hidden": "true" }), first.kind, first.ahead ? el("span", { class: "chip" }, "ahead") : null],
    first.axes,
    el("span", { title: transfersWords(runs) }, `${countText(runs.unmerged)}×${first.known ? "" : "?"}`),
    bytesText(group.sent),
    shareBar(group.sent, sent, first.kind),
    ...(hasTimes() ? [timeText(group.time, app.plan.unit)] : []),
    [el("code", { title: `${place.line}\n${place.text}` }, place.text || fileLine(place.line)), " ", el("span", { class: "quiet" }, fileLine(place.line))],
  ];
}

function showBorder(view) {
  const { plan } = app;
  const sides = [["arguments", "argument"], ["closed", "closed over"], ["results", "result"]];
  const entries = sides.flatMap(([side, role]) => plan.border(side).map((value) => ({ ...value, role })));
  const box = el("div", { id: "border", class: "table" });
  const sum = (role) => entries.filter((each) => each.role === role).reduce((all, each) => all + each.bytes, 0);
  const words = `${bytesText(sum("argument"))} of arguments and ${bytesText(sum("result"))} of results on a device`;
  view.replaceChildren(el("div", { class: "view-bar" }, el("span", { class: "quiet" }, words)), box);
  const groups = groupsOf(entries, ({ role, path, type, stated, origin, move }) => [role, folded(path), type, stated, origin, move].join("|"));
  const opened = new Set();
  const rows = () => groups.flatMap((group) => (group.length < LEAST_ALIKE ? group : [foldedRow(group), ...(opened.has(group.key) ? group : [])]));
  const list = table(box, {
    label: "Arguments and results",
    columns: [["", "26px"], ["Name", "minmax(150px, 2fr)"], ["Layout", "minmax(170px, 1.5fr)"], ["On a device", "76px", "right"], ["From", "minmax(90px, 1fr)"]],
    entries: rows(),
    choose: (value) => {
      if (!value.count) return selectName(value.path);
      if (!opened.delete(value.key)) opened.add(value.key);
      return list.show(rows());
    },
    row: (value) => [
      miniGrid(plan.mesh, value.type, 18),
      [value.role === "argument" ? null : el("span", { class: "quiet" }, `${value.role} `), abbreviated(value.path), value.count ? el("span", { class: "quiet" }, ` ×${countText(value.count)}`) : null],
      typeText(value.type),
      bytesText(value.bytes),
      value.stated ? el("code", {}, value.stated) : el("span", { class: "quiet" }, value.move ? `moved from ${value.move}` : value.origin),
    ],
  });
}

/** Arguments of layers that are alike, as one row, which opens. */
const foldedRow = (group) => ({ ...group[0], path: folded(group[0].path), key: group.key, count: group.length, bytes: group.reduce((sum, each) => sum + each.bytes, 0) });

/** Values that the planner lays out otherwise than propagation proposed. */
function showChanges(view) {
  const { plan } = app;
  const entries = [];
  for (let value = 0; value < plan.valueCount; value += 1) if (plan.isChanged(value)) entries.push(value);
  entries.sort((a, b) => plan.bytes(b) - plan.bytes(a));
  const box = el("div", { id: "changes", class: "table" });
  const { layouts } = plan.data;
  const saved = layouts ? `Layouts were ${layouts}, by the planner’s model.` : "Layouts were decided op by op.";
  const words = `${saved} ${several(entries.length, "value")} differ${entries.length === 1 ? "s" : ""} from what propagation proposed.`;
  view.replaceChildren(el("div", { class: "view-bar" }, el("span", { class: "quiet" }, words)), box);
  table(box, {
    label: "Layouts that the planner changed",
    columns: [["Value", "minmax(130px, 1.3fr)"], ["", "24px"], ["Proposed by propagation", "minmax(150px, 1.2fr)"], ["", "24px"], ["Chosen", "minmax(150px, 1.2fr)"], ["On a device", "76px", "right"]],
    entries,
    choose: (value) => selectValue(value),
    row: (value) => [
      abbreviated(plan.names[value]),
      miniGrid(plan.mesh, plan.proposed(value), 18),
      typeText(plan.proposed(value)),
      miniGrid(plan.mesh, plan.type(value), 18),
      typeText(plan.type(value)),
      bytesText(plan.bytes(value)),
    ],
  });
}

function showNotes(view) {
  const { notes, annotations, padding, recomputed, blocked, host } = app.plan.data;
  const [gone, again] = recomputed || [[], []];
  const said = annotations.map(([kind, text, type, place]) => ({ line: app.plan.placeOf(place).line, what: `${kind} ${text}`, rest: type }));
  const section = (title, items) => (items.length ? el("section", {}, el("h3", {}, `${title} (${items.length})`), el("ul", { class: "notes" }, items)) : null);
  const note = (line, head, text) => el("li", {}, el("button", { class: "link", onclick: () => selectLine(line) }, fileLine(line)), el("b", {}, head), el("span", {}, text));
  const parts = [
    section("Notes", notes.map(([op, line, message, scope]) => note(line, scope ? `${op} in ${scope}` : op, message))),
    section("Annotations in the function", said.map(({ line, what, rest }) => note(line, what, rest))),
    section("Computed again instead of being held", gone.map(([type, line, bytes]) => note(line, type, `${bytesText(bytes)} on a device`))),
    section("Runs again for that", again.map(([op, line, flops]) => note(line, op, `${flopsText(flops)} on a device`))),
    section("Computed part by part", blocked.map(([type, line, dim, parts, bytes]) => note(line, type, `${parts} parts of dimension ${dim}, ${bytesText(bytes)} on a device together`))),
    section("Host memory", host.map(([what, type, bytes, when, line]) => note(line.replace(" (backward)", ""), what, [type, bytes, when].filter(Boolean).join(", ")))),
    section("Padding", padding.map(([type, line, bytes]) => note(line, type, `${bytesText(bytes)} of padding on a device`))),
  ].filter(Boolean);
  view.replaceChildren(el("div", { class: "pages" }, parts.length ? parts : el("p", { class: "quiet empty" }, "Nothing to note: all ops could be split as proposed.")));
}
