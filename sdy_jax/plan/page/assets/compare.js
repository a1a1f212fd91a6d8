// Two plans beside each other: the one before on the left, this one on the right.

const MOST_PAIRS = 200; // rows that are added at once

function showCompare(view) {
  const { causes, border, collectives, values } = app.differences;
  const box = el("div", { class: "pages compare" }, totals(), causesOf(causes));
  box.append(
    pairs("Collectives", collectives.map(collectiveRow).filter((row) => row.before?.bytes || row.after?.bytes), {
      label: ({ after, before }) => groupLabel(after ?? before),
      side: (which, collective, { count }) => [el("b", {}, bytesText(collective.total * count)), el("span", { class: "quiet" }, ` ×${countText(count * collective.times)}`)],
      choose: ({ before, after }) => openCollective(after ? 0 : 1, after ?? before),
      cost: ({ bytes }) => bytes,
    }),
    pairs("Arguments and results", borderRows(border), {
      label: ({ name, count }) => [abbreviated(name), count > 1 ? el("span", { class: "quiet" }, ` ×${count}`) : null],
      side: layoutIn,
      choose: ({ path, after }) => openIn(after ? 0 : 1, path),
    }),
    pairs("Values", values.map(([name, before, after, line, count]) => ({ name, before, after, line, count })), {
      label: ({ name, count }) => [abbreviated(name), count > 1 ? el("span", { class: "quiet" }, ` ×${count}`) : null],
      side: layoutIn,
      choose: ({ name }) => openIn(0, name),
    }),
  );
  view.replaceChildren(box);
}

/** Changes of the border; those of layers that are alike are one, which is the first of them. */
function borderRows(border) {
  const rows = border.map(([side, path, before, after]) => ({ side, path, name: path, before, after, count: 1 }));
  const groups = groupsOf(rows, ({ side, path, before, after }) => [side, folded(path), before, after].join("|"));
  return groups.flatMap((group) => (group.length < LEAST_ALIKE ? group : [{ ...group[0], name: folded(group[0].path), count: group.length }]));
}

/** What the user changed, the edited line first; each line once. */
function causesOf(causes) {
  if (!causes.length) return el("p", { class: "quiet" }, "The plans do not differ.");
  const items = [...groupedBy(causes, ([line, , text]) => `${line} ${text}`)].map((group) => {
    const [[line, , text]] = group;
    return el("li", {}, line ? el("b", { title: line }, fileLine(line)) : null, text ? el("code", { class: "block-code" }, text) : null, group.map(([, what]) => el("p", {}, what)));
  });
  return el("section", {}, el("h3", {}, "What changed"), el("ul", { class: "causes" }, items));
}

function collectiveRow([before, after, count, bytes]) {
  const [now, then] = app.plans.map((each) => each.plan);
  return { before: then.collectives[before], after: now.collectives[after], count, bytes };
}

const layoutIn = (which, type) => [miniGrid(app.plans[1 - which].plan.mesh, type, 16), typeText(type)];

function groupLabel(collective) {
  const plan = app.plans.map((each) => each.plan).find((each) => each.collectives.includes(collective));
  const { line, text } = plan.placeOf(collective.place);
  return [el("span", { class: `mark ${collective.kind}` }), `${collective.kind} `, el("span", { class: "quiet", title: text }, `${collective.axes} · ${fileLine(line)}`)];
}

const AMOUNTS = { "on the wire": "Sent by a device", "of memory": "Memory of a device", estimated: "Estimated time", collectives: "Collectives", computed: "Operations of a device" };
const AMOUNT_TEXTS = { bytes: bytesText, seconds: (amount) => timeText(amount, "seconds"), transfers: countText, flop: flopsText };

function totals() {
  const rows = app.differences.amounts.map(([name, one, other, unit]) => [AMOUNTS[name] ?? name, one, other, AMOUNT_TEXTS[unit]]);
  const cells = rows.map(([name, one, other, text]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, text(one)), el("td", {}, text(other)), el("td", {}, changeChip(one, other))));
  const top = el("tr", {}, el("td"), el("th", { scope: "col" }, "before"), el("th", { scope: "col" }, "now"), el("th", { scope: "col" }, "change"));
  return el("table", { class: "totals" }, el("thead", {}, top), el("tbody", {}, cells));
}

function changeChip(one, other) {
  if (Math.abs(one - other) <= 0.0005 * one) return el("span", { class: "quiet" }, "same");
  return el("span", { class: `change ${other > one ? "more" : "less"}` }, one ? shareText(one, other) : "new");
}

/** `+6.1%`, `−12%`, `×2.5`: as the text of a comparison rounds, with a decimal of what is small. */
function shareText(one, other) {
  const part = (other - one) / one;
  if (part >= 1) return `×${(other / one).toFixed(other / one < 9.95 ? 1 : 0)}`;
  return `${part > 0 ? "+" : "−"}${Math.abs(100 * part).toFixed(Math.abs(part) < 0.1 ? 1 : 0)}%`;
}

/**
 * A section of rows, each with what it is about, and what is `before` and `after`, one of which may be missing.
 * @param how `label(row)`, `side(which, entry, row)` for before (0) and now (1), `choose(row)`, and maybe `cost(row)` in
 *   bytes.
 */
function pairs(title, rows, how) {
  const heading = el("h3", {}, `${title} `, el("span", { class: "quiet" }, rows.length ? several(rows.length, "change") : "no changes"));
  const list = el("div", { class: "pair-list" });
  const top = rows.length ? el("div", { class: "pair-head", "aria-hidden": "true" }, ["", "before", "now", how.cost ? "change" : ""].map((name) => el("span", {}, name))) : null;
  const more = (from) => {
    list.append(...rows.slice(from, from + MOST_PAIRS).map((row) => pairRow(row, how)));
    const left = rows.length - from - MOST_PAIRS;
    if (left <= 0) return;
    const button = el("button", { class: "link", onclick: () => (button.remove(), more(from + MOST_PAIRS)) }, `${left} more`);
    list.append(button);
  };
  more(0);
  return el("section", { class: `pairs${how.cost ? " priced" : ""}` }, heading, top, list);
}

function pairRow(row, how) {
  const { before, after } = row;
  const kind = !before ? "added" : !after ? "removed" : "altered";
  const half = (which, entry) => el("span", { class: `half ${which ? "now" : "before"}${entry ? "" : " none"}` }, entry ? how.side(which, entry, row) : "–");
  const amount = how.cost?.(row) ?? 0;
  const chip = el("span", { class: `change ${amount > 0 ? "more" : "less"}` }, amount ? `${amount > 0 ? "+" : "−"}${bytesText(Math.abs(amount))}` : "");
  return el("button", { class: `pair ${kind}`, onclick: () => how.choose(row) }, el("span", { class: "pair-name" }, how.label(row)), half(0, before), half(1, after), how.cost ? chip : null);
}

/** The scopes of the present plan in which something differs from the other one. */
function differingScopes() {
  const found = new Set();
  for (const op of app.differences ? [...differingCollectives(), ...differingValues()] : []) {
    for (let at = app.scopes.ofOp[op]; at && !found.has(at); at = at.parent) found.add(at);
  }
  return found;
}

/** Differences name the first of those alike, of which there is one in each layer. */
function differingCollectives() {
  const { plan } = app;
  const which = plan === app.plans[0].plan ? 1 : 0;
  const key = (each) => [each.kind, each.axes, each.type, plan.placeOf(each.place).line].join("|");
  const keys = new Set(app.differences.collectives.flatMap((row) => (row[which] < 0 ? [] : [key(plan.collectives[row[which]])])));
  return plan.collectives.filter((each) => keys.has(key(each))).map((each) => (each.op >= 0 ? each.op : each.serves));
}

function differingValues() {
  const { plan } = app;
  const makes = (op, type) => plan.data.ops.results[op].some((value) => plan.type(value) === type);
  return app.differences.values.flatMap(([name]) => {
    const value = plan.numbers.get(name);
    const first = app.scopes.ofOp[plan.maker(value)];
    return first ? app.scopes.onLine(first.parent.label).filter((op) => makes(op, plan.type(value))) : [];
  });
}

/** Shows a value in one of the plans. */
function openIn(which, name) {
  usePlan(which);
  selectName(name);
}

function openCollective(which, collective) {
  usePlan(which);
  selectCollective(collective);
}
