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

/** A line, and whether it is that line in the backward pass. */
const placeWords = ({ line, backward }) => `${fileLine(line)}${backward ? " backward" : ""}`;

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
    columns: [["Collective", "minmax(118px, .8fr)"], ["Axes", "minmax(60px, .5fr)"], ["Calls", "44px", "right"], ["Sent", "70px", "right"], ["Share", "48px"], ...(hasTimes() ? [["Time", "56px", "right"]] : []), ["For", "minmax(170px, 3fr)"]],
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
    el("span", { title: `${place.line}\n${place.text}` }, placeWords(place), " ", el("code", {}, place.text)),
  ];
}

function showBorder(view) {
  const { plan } = app;
  const sides = [["arguments", "argument"], ["closed", "closed over"], ["results", "result"]];
  const entries = sides.flatMap(([side, role]) => plan.border(side).map((value) => ({ ...value, role })));
  const box = el("div", { id: "border", class: "table" });
  const sum = (role) => entries.filter((each) => each.role === role).reduce((all, each) => all + each.bytes, 0);
  const words = `${bytesText(sum("argument"))} of arguments and ${bytesText(sum("result"))} of results on a device`;
  view.replaceChildren(el("div", { class: "view-bar said" }, el("span", { class: "quiet" }, words)), box);
  foldingTable(box, entries, ({ role, path, type, stated, origin, move }) => [role, folded(path), type, stated, origin, move], {
    label: "Arguments and results",
    columns: [["", "26px"], ["Name", "minmax(150px, 2.6fr)"], ["Layout", "minmax(170px, 1.5fr)"], ["On a device", "76px", "right"], ["From", "minmax(90px, 1fr)"]],
    choose: (value) => selectName(value.path),
    row: (value) => [
      miniGrid(plan.mesh, value.type, 18),
      foldedName(value, value.role === "argument" ? null : el("span", { class: "quiet" }, `${value.role} `)),
      typeText(value.type),
      bytesText(value.bytes),
      value.stated ? el("code", {}, value.stated) : el("span", { class: "quiet" }, value.move ? `moved from ${value.move}` : value.origin),
    ],
  });
}

/** A table in which values of layers that are alike, with one key, are a row that opens. Entries have a `path` and `bytes`. */
function foldingTable(box, entries, keyOf, how) {
  const groups = groupsOf(entries, (entry) => keyOf(entry).join("|"));
  const opened = new Set();
  const rows = () => groups.flatMap((group) => (group.length < LEAST_ALIKE ? group : [foldedRow(group, opened.has(group.key)), ...(opened.has(group.key) ? group : [])]));
  const choose = (entry) => {
    if (!entry.count) return how.choose(entry);
    if (!opened.delete(entry.key)) opened.add(entry.key);
    return list.show(rows());
  };
  const list = table(box, { ...how, entries: rows(), choose });
}

const foldedRow = (group, open) => ({ ...group[0], path: folded(group[0].path), key: group.key, open, count: group.length, bytes: group.reduce((sum, each) => sum + each.bytes, 0) });

/** The name in a row of such a table, with how many it stands for. */
const foldedName = ({ path, count, open }, before) => el("span", { class: "folded-name" }, before, abbreviated(path), count ? el("span", { class: "quiet" }, ` ×${countText(count)} ${open ? "▾" : "▸"}`) : null);

/** Values that the planner lays out otherwise than propagation proposed. */
function showChanges(view) {
  const { plan } = app;
  const entries = [];
  for (let value = 0; value < plan.valueCount; value += 1) {
    if (plan.isChanged(value)) entries.push({ value, path: plan.names[value], proposed: plan.proposed(value), type: plan.type(value), bytes: plan.bytes(value) });
  }
  entries.sort((a, b) => b.bytes - a.bytes);
  const box = el("div", { id: "changes", class: "table" });
  const { layouts } = plan.data;
  const saved = layouts ? `Layouts were ${layouts}, by the planner’s model.` : "Layouts were decided op by op.";
  const words = `${saved} ${several(entries.length, "value")} differ${entries.length === 1 ? "s" : ""} from what propagation proposed.`;
  view.replaceChildren(el("div", { class: "view-bar said" }, el("span", { class: "quiet" }, words)), box);
  foldingTable(box, entries, ({ path, proposed, type }) => [folded(path), proposed, type], {
    label: "Layouts that the planner changed",
    columns: [["Value", "minmax(150px, 1fr)"], ["Proposed by propagation, and chosen", "minmax(230px, 1fr)"], ["On a device", "76px", "right"]],
    height: 46,
    choose: ({ value }) => selectValue(value),
    row: (entry) => [
      foldedName(entry),
      [entry.proposed, entry.type].map((type) => el("span", { class: "one-layout" }, miniGrid(plan.mesh, type, 16), typeText(type))),
      bytesText(entry.bytes),
    ],
  });
}

function showNotes(view) {
  const { notes, annotations, padding, recomputed, blocked, local_sorts: sorts, host } = app.plan.data;
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
    section("Each device sorts its own rows", sorts.map(([rows, axes, line]) => note(line, `${rows} rows`, `along ${axes.join(", ")}`))),
    section("Host memory", host.map(([what, type, bytes, when, line]) => note(line.replace(" (backward)", ""), what, [type, bytes, when].filter(Boolean).join(", ")))),
    section("Padding", padding.map(([type, line, bytes]) => note(line, type, `${bytesText(bytes)} of padding on a device`))),
  ].filter(Boolean);
  view.replaceChildren(el("div", { class: "pages" }, parts.length ? parts : el("p", { class: "quiet empty" }, "Nothing to note: all ops could be split as proposed.")));
}
