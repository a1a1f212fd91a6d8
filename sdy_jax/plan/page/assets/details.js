// The panel on the right: all about what is selected.

function showDetails() {
  const box = byId("details");
  const { selected } = app;
  box.scrollTop = 0;
  if (!selected) return box.replaceChildren(...welcome());
  if (selected.collective) return box.replaceChildren(...collectiveDetails(selected.collective));
  if (selected.value !== undefined) return box.replaceChildren(...valueDetails(selected.value));
  if (selected.scope.op >= 0) return box.replaceChildren(...opDetails(selected.scope.op));
  return box.replaceChildren(...scopeDetails(selected.scope));
}

const facts = (pairs) => el("dl", { class: "facts" }, pairs.filter(([, said]) => said || said === 0).map(([name, said]) => el("div", {}, el("dt", {}, name), el("dd", {}, said))));
const part = (title, ...children) => el("section", { class: "part" }, el("h3", {}, title), children);
const head = (kind, title, mark = null) => el("div", { class: "details-head" }, el("p", { class: "kind" }, mark, kind), el("h2", {}, title));
const opLink = (op) => el("button", { class: "link", onclick: () => selectOp(op) }, `${app.plan.shortKind(op)} at ${fileLine(app.plan.place(op).line)}`);
const valueLink = (value) => el("button", { class: "link value-link", title: app.plan.names[value], onclick: () => selectValue(value) }, miniGrid(app.plan.mesh, app.steps.typeAt(value, app.moment), 14), app.plan.names[value]);

function welcome() {
  const { data } = app.plan;
  return [head("plan", data.name), facts([["line", data.line[0]], ["options", data.options.join(", ")], ["made with", data.versions.join(", ")]])];
}

/** A few of many, and a button for the rest. */
function fewOf(items, count, make) {
  const list = el("ul", { class: "plain" }, items.slice(0, count).map((item) => el("li", {}, make(item))));
  if (items.length > count) {
    const more = el("button", { class: "link", onclick: () => more.parentNode.replaceWith(...items.slice(count, 500).map((item) => el("li", {}, make(item)))) }, `${items.length - count} more`);
    list.append(el("li", {}, more));
  }
  return list;
}

function scopeDetails(scope) {
  const { sums } = scope;
  const { root } = app.scopes;
  const kinds = { root: "program", scope: "name scope", layers: "name scopes that are alike", call: "call", line: "source line" };
  const inside = new Set(scope.ops);
  const counted = app.plan.counted.filter((each) => inside.has(each.op >= 0 ? each.op : each.serves));
  const groups = alike(scope === root ? app.plan.counted : counted);
  const share = (name, text) => sums[name] && `${text(sums[name])}${root.sums[name] && scope !== root ? ` · ${percent(sums[name], root.sums[name])} of all` : ""}`;
  const found = [
    head(kinds[scope.kind], scope.title ? el("code", {}, scope.title) : scope.label),
    facts([
      ["line", scope.title ? scope.label : ""],
      ["ops", countText(sums.ops)],
      ["sent", share("sent", bytesText) || bytesText(0)],
      ["time of sending", (hasTimes() && share("time", (amount) => timeText(amount, app.plan.unit))) || ""],
      ["operations", share("flops", flopsText) || ""],
      ["values made", `${bytesText(sums.held)} on a device`],
    ]),
  ];
  if (scope === root) found.push(aboutPlan());
  if (groups.length) found.push(collectivesPart(groups));
  return found;
}

/** Collectives that are alike are one line, with how often they run. */
function collectivesPart(groups) {
  const found = app.plan.transfersOf(groups.flatMap((group) => group.all));
  return part(`Collectives: ${transfersText(found)}`, fewOf(groups, 8, groupLine));
}

function aboutPlan() {
  const { data, mesh } = app.plan;
  const repeated = data.repeated ? `${flopsText(data.repeated)} (${percent(data.repeated, data.flops)})` : "";
  return facts([
    ["partitioned at", data.line[0]],
    ["devices", `${countText(meshSize(mesh))}${mesh.kind && !data.time[4] ? ` × ${mesh.kind}` : ""}`],
    ["options", data.options.join(", ")],
    ["repeated work", repeated],
    ["costs from", data.time[4]],
    ["made with", data.versions.join(", ")],
    ["fingerprint", el("code", {}, data.fingerprint)],
  ]);
}

function groupLine(group) {
  const { unmerged } = app.plan.transfersOf(group.all);
  const text = `${group.first.kind}${unmerged > 1 ? ` ×${countText(unmerged)}` : ""}`;
  return [
    el("button", { class: "link", onclick: () => selectCollective(group.first, app.scope) }, el("span", { class: `mark ${group.first.kind}` }), text),
    ` ${group.first.axes} `,
    el("span", { class: "quiet" }, `${bytesText(group.sent)} at `, el("span", { class: "whole" }, placeWords(app.plan.placeOf(group.first.place)))),
  ];
}

function placeFacts(place) {
  return [
    ["line", el("span", {}, place.line, place.text ? el("code", { class: "block-code" }, place.text) : null)],
    ["library", place.library],
    ["scope", place.scope],
    ["called from", place.callers.length ? el("span", {}, place.callers.map((n) => el("div", { title: app.plan.frame(n).text }, fileLine(app.plan.frame(n).line)))) : ""],
  ];
}

function layoutPart(value) {
  const type = app.steps.typeAt(value, app.moment);
  const children = [el("p", { class: "type-line" }, typeText(type)), deviceGrid(app.plan.mesh, type)];
  if (app.moment < app.steps.last) {
    const { title } = app.steps.moments[app.moment];
    children.unshift(el("p", { class: "at-step" }, `At step ${app.moment} (${title.toLowerCase()}); in the end `, typeText(app.plan.type(value))));
  }
  return part("Layout", children);
}

function valueDetails(value) {
  const { plan } = app;
  const result = plan.border("results").find((each) => each.path === plan.names[value]);
  if (value >= plan.valueCount) return resultDetails(value, result);
  const maker = plan.maker(value);
  const buffer = plan.buffers.get(value);
  const border = maker < 0 ? [...plan.border("arguments"), ...plan.border("closed")].find((each) => each.path === plan.names[value]) : null;
  const users = plan.users.get(value) ?? [];
  return [
    head([maker < 0 ? "argument" : "", result ? "result" : ""].filter(Boolean).join(" and ") || "value", plan.names[value]),
    layoutPart(value),
    part("Why", reasonsOf(value)),
    facts([
      ["stated", (border ?? result)?.stated ? el("code", {}, (border ?? result).stated) : ""],
      ["stated at", (border ?? result)?.line],
      ["comes as", border?.move],
      ["on a device", bytesText(plan.bytes(value))],
      ["held", buffer ? `from op ${buffer[2]} to ${buffer[3]}` : maker < 0 ? "all the time" : ""],
      ["made by", maker < 0 ? "" : opLink(maker)],
    ]),
    maker < 0 ? null : facts(placeFacts(plan.place(maker))),
    users.length ? part(`Taken by (${users.length})`, fewOf(users, 8, opLink)) : null,
  ].filter(Boolean);
}

function resultDetails(value, result) {
  const name = app.plan.names[value];
  if (!result) return [head("value before partitioning", name), part("Why", reasonsOf(value))];
  const chains = (parsedType(result.type).dims ?? []).flatMap((dim, n) => dim.axes.map((axis) => axisReason(value, n, axis, false)));
  return [
    head("result", name),
    part("Layout", el("p", { class: "type-line" }, typeText(result.type)), deviceGrid(app.plan.mesh, result.type)),
    part("Why", chains.length ? chains : el("p", { class: "quiet" }, "No axis splits it.")),
    facts([["stated", result.stated ? el("code", {}, result.stated) : ""], ["stated at", result.line], ["on a device", bytesText(result.bytes)]]),
  ];
}

function opDetails(op) {
  const { plan } = app;
  const collective = plan.collectiveAt.get(op);
  if (collective) return collectiveDetails(collective);
  const { operands, results, alike: repeated, times } = plan.data.ops;
  const [value] = results[op];
  const sends = plan.counted.filter((each) => each.op < 0 && each.serves === op);
  return [
    head("op", opName(op)),
    value !== undefined ? layoutPart(value) : null,
    value !== undefined ? part("Why", reasonsOf(value)) : null,
    part("Operands", operands[op].length ? fewOf(operands[op], 10, valueLink) : el("p", { class: "quiet" }, "none")),
    results[op].length > 1 ? part("Results", fewOf(results[op], 10, valueLink)) : null,
    sends.length ? part("Sends by itself", fewOf(alike(sends), 5, groupLine)) : null,
    facts([
      ["makes", value !== undefined ? plan.names[value] : ""],
      ["runs", times[op] > 1 ? `${countText(times[op])} times` : ""],
      ["operations", plan.work(op) ? `${flopsText(plan.work(op))} on a device` : ""],
      ["repeated", repeated[op] ? `on ${repeated[op]} devices alike` : ""],
      ...placeFacts(plan.place(op)),
    ]),
    value !== undefined && plan.users.get(value) ? part("Taken by", fewOf(plan.users.get(value), 8, opLink)) : null,
  ].filter(Boolean);
}

function collectiveDetails(collective) {
  const { plan } = app;
  const { kind, axes, value, result } = collective;
  const type = result >= 0 ? app.steps.typeAt(result, app.steps.last) : collective.type;
  const flags = [collective.again && "made once more, instead of being held", collective.ahead && "runs one trip ahead of its loop", !collective.counted && "in a branch that sends less than another", collective.bucket >= 0 && `in bucket ${collective.bucket}`].filter(Boolean);
  return [
    head("collective", kind, el("span", { class: `mark ${kind}` })),
    facts([
      ["axes", axes],
      ["sent", `${bytesText(collective.total)} · ${percent(collective.total, plan.data.wire)} of all`],
      ["runs", collective.times > 1 ? `${countText(collective.times)} times, ${bytesText(collective.bytes)} each` : "once"],
      ["time", hasTimes() && `${timeText(collective.time, plan.unit)}${collective.hidden ? `, ${timeText(collective.hidden, plan.unit)} of it hidden` : ""}`],
      ["combines by", collective.reduction],
      ["", flags.join("; ")],
    ]),
    value >= 0 ? part("From", valueLink(value), deviceGrid(plan.mesh, plan.type(value))) : null,
    part("To", el("p", { class: "type-line" }, typeText(type)), deviceGrid(plan.mesh, type)),
    part("Why", result >= 0 ? reasonsOf(result) : madeReason(collective)),
    facts(placeFacts(plan.placeOf(collective.place))),
  ].filter(Boolean);
}
