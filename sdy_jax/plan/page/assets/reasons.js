// Why a value has its axes: each followed back through the steps of propagation to the annotation.

const MOST_LINKS = 400; // a chain is followed so far
const SHOWN_LINKS = 6; // links of a chain that are shown unasked

/** The links of an axis of a value back to its annotation, `{name, value, text, place}`, the nearest first. */
function chainOf(value, dim, axis) {
  const links = [];
  const { plan, steps } = app;
  let at = { value, dim, axis };
  while (links.length < MOST_LINKS) {
    const spread = (steps.spreads.get(at.value) ?? []).find((each) => each.dim === at.dim && sameAxis(each.axis, at.axis) && each.at < (at.before ?? Infinity));
    if (!spread) break;
    const place = plan.placeOf(spread.place);
    links.push({ name: plan.names[spread.source] ?? "", value: spread.source, op: spread.op, place, level: spread.level, priority: spread.priority, moment: spread.at });
    if (spread.source < 0) return { links, texts: [] };
    at = { value: spread.source, dim: spread.sourceDim, axis: spread.axis, before: spread.at };
  }
  return { links, texts: steps.starts.get(at.value) ?? [] };
}

/** Parts of axes may come from the whole. */
const sameAxis = (one, other) => one.split(":(")[0] === other.split(":(")[0];

/** The reasons for the layout of a value, as elements. */
function reasonsOf(value) {
  const { plan, steps } = app;
  const found = [];
  if (plan.isChanged(value)) found.push(plannerReason(value));
  if (plan.isPartial(value)) found.push(partialReason(value));
  const collective = plan.collectiveAt.get(plan.maker(value));
  if (collective) found.push(madeReason(collective));
  const type = plan.proposed(value) || (steps.history.get(value)?.at(-1)?.[1] ?? "");
  const about = collective && !plan.proposed(value) ? collective.value : value;
  const proposed = about === value ? type : plan.proposed(about) || plan.type(about);
  for (const [dim, { axes }] of (parsedType(proposed).dims ?? []).entries()) {
    for (const axis of axes) found.push(axisReason(about, dim, axis, about !== value));
  }
  if (!found.length) found.push(el("p", { class: "quiet" }, "No axis splits it: nothing that it is connected with has one to give."));
  return found;
}

function partialReason(value) {
  const { plan } = app;
  const users = (plan.users.get(value) ?? []).filter((op) => plan.collectiveAt.has(op));
  const adds = users.length ? ["; ", users.map((op) => [opLink(op), " "]), "adds them"] : null;
  return el("div", { class: "reason made" }, el("p", {}, `Devices along ${parsedType(plan.type(value)).unreduced.join(", ")} hold partial sums of it`, adds, "."));
}

function plannerReason(value) {
  const { plan } = app;
  return el(
    "div",
    { class: "reason planner" },
    el("p", {}, plan.data.layouts ? "The planner chose this layout for the whole program." : "Partitioning chose this layout, op by op."),
    el("p", {}, "Propagation proposed ", typeText(plan.proposed(value)), "."),
    savings(value).map((text) => el("p", {}, text)),
  );
}

/** What the choice of a value's layout saves and costs; of all layouts together where nothing is known of it alone. */
function savings(value) {
  const { plan } = app;
  const found = plan.reasonOf(value);
  if (found) {
    const [, saves, costs, times] = found;
    const alike = times > 1 ? `, as ${times - 1} more choices like it` : "";
    return [`Together with what is around it${alike}, this saves ${saves}.`, ...(costs && costs !== "nothing" ? [`It costs ${costs}.`] : [])];
  }
  return plan.data.layouts ? [`All layouts together: ${plan.data.layouts}.`] : [];
}

function madeReason(collective) {
  const place = app.plan.placeOf(collective.place);
  const who = collective.origin === "user" ? "The program holds this collective itself." : null;
  const made = [`${collective.kind} along ${collective.axes || "no axis"}, needed by `, el("b", {}, collective.cause.replace(/^[a-z_]+\./, "")), ` at ${fileLine(place.line)}.`];
  const link = collective.serves >= 0 ? el("button", { class: "link", onclick: () => selectOp(collective.serves) }, "Show that op") : null;
  return el("div", { class: "reason made" }, el("p", {}, who ?? made, " ", link));
}

function axisReason(value, dim, axis, isOfOther) {
  const { links, texts } = chainOf(value, dim, axis);
  const items = links.length > SHOWN_LINKS ? shortened(links) : links.map(linkItem);
  for (const text of texts) items.push(el("li", { class: "origin" }, text));
  if (!items.length) {
    const why = app.plan.data.steps ? "Propagation had it from the start." : "This page was made without the steps of propagation.";
    items.push(el("li", { class: "quiet" }, why));
  }
  const of = isOfOther ? ` of ${app.plan.names[value]}` : "";
  return el("div", { class: "reason" }, el("p", {}, el("b", { class: "axis" }, axis), ` on dim ${dim}${of}`), el("ol", { class: "chain" }, items));
}

/** The first and last links of a chain, and a button for those between. */
function shortened(links) {
  const between = links.slice(SHOWN_LINKS / 2, -SHOWN_LINKS / 2);
  const more = el("li", { class: "more" }, el("button", { class: "link", onclick: () => more.replaceWith(...between.map(linkItem)) }, `⋯ ${several(between.length, "more step")}`));
  return [...links.slice(0, SHOWN_LINKS / 2).map(linkItem), more, ...links.slice(-SHOWN_LINKS / 2).map(linkItem)];
}

function linkItem({ name, value, op, place, level, priority, moment }) {
  const how = `op priority ${level}${priority ? `, user priority ${priority}` : ""}`;
  const from = name ? ["from ", el("button", { class: "link", onclick: () => selectName(name, value) }, name)] : "from several values at once";
  const when = el("button", { class: "step-link", title: `Step ${moment}: ${how}`, "aria-label": `Go to step ${moment}`, onclick: () => goTo(moment) }, String(moment));
  return el("li", {}, when, el("div", {}, from, el("div", { class: "quiet" }, `${op} at `, el("span", { title: place.text }, fileLine(place.line)))));
}
