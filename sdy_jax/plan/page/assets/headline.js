// The figures at the top, and the control of steps under them.

function showHeadline() {
  const { data, mesh, unit } = app.plan;
  byId("name").replaceChildren(data.name);
  byId("mesh").replaceChildren(...mesh.axes.map(([name, size]) => el("span", { class: "axis-chip" }, `${name} `, el("b", {}, String(size)))));
  byId("headline").replaceChildren(sentFigure(), hasTimes() ? timeFigure(data.time, unit) : workFigure(data), memoryFigure(data.memory), kindsFigure());
}

/** A figure, with a bar that says its parts when it is pointed at, or pressed. */
function figure(name, amount, about, bar) {
  const said = el("p", { class: "figure-name", hidden: true }, bar?.getAttribute("aria-label") ?? bar?.getAttribute("title"));
  const press = () => (said.hidden = !said.hidden);
  return el("div", { class: "figure", onclick: press }, el("p", { class: "figure-name" }, name), el("p", { class: "figure-amount" }, el("span", {}, amount), el("small", {}, about)), bar, said);
}

/** A bar of parts, `[class, amount, words]`. */
function partsBar(parts) {
  const whole = parts.reduce((sum, [, amount]) => sum + amount, 0);
  const shown = parts.filter(([, amount]) => amount > 0);
  const label = shown.map(([, amount, words]) => `${words}, ${percent(amount, whole)}`).join("; ");
  return el("div", { class: "parts", role: "img", "aria-label": label }, shown.map(([kind, amount, words]) => el("span", { class: kind, style: `flex:${amount / whole}`, title: `${words}: ${percent(amount, whole)}` })));
}

/** The kinds of collectives, those that send most first. */
const kindsOf = (plan) => Object.keys(plan.data.transfers).filter(Boolean);

function sentFigure() {
  const { plan } = app;
  const { wire, known } = plan.data;
  const parts = kindsOf(plan).map((kind) => [kind, plan.transfers(kind).bytes, `${kind} ${bytesText(plan.transfers(kind).bytes)}`]);
  return figure("Sent by a device", `${known ? "" : "≥ "}${bytesText(wire)}`, " per call", partsBar(parts));
}

function timeFigure([compute, communication, hidden], unit) {
  const total = compute + communication - hidden;
  const parts = [
    ["compute", compute, `computing ${timeText(compute, unit)}`],
    ["communication", communication - hidden, `sending ${timeText(communication - hidden, unit)}`],
    ["hidden", hidden, `sending beside other work ${timeText(hidden, unit)}`],
  ];
  return figure("Estimated time", timeText(total, unit), ` ${percent(communication - hidden, total)} sending`, partsBar(parts));
}

/** Where the cost model knows no times. */
function workFigure({ flops, repeated }) {
  const parts = [
    ["compute", flops - repeated, `not repeated ${flopsText(flops - repeated)}`],
    ["repeated", repeated, `repeated ${flopsText(repeated)}`],
  ];
  return figure("Operations of a device", flopsText(flops), repeated ? ` ${percent(repeated, flops)} repeated` : " per call", partsBar(parts));
}

function memoryFigure(memory) {
  if (!memory) return figure("Memory of a device", "–", " not known", null);
  const parts = [
    ["arguments", memory.arguments, `arguments ${bytesText(memory.arguments)}`],
    ["results", memory.own, resultsText(memory)],
    ["temporaries", memory.temporaries, `temporaries ${bytesText(memory.temporaries)}`],
  ];
  return figure("Memory of a device", bytesText(memory.peak), " at the peak", partsBar(parts));
}

function kindsFigure() {
  const { plan } = app;
  const kinds = kindsOf(plan);
  const chips = kinds.map((kind) => el("span", { class: "kind-count" }, el("span", { class: `mark ${kind}` }), `${kind} ${countText(plan.transfers(kind).count)}`));
  const words = kinds.map((kind) => `${kind} ${transfersText(plan.transfers(kind))}`).join(", ");
  const { count, unmerged } = plan.transfers();
  const about = unmerged === count ? " per call" : ` per call, ${countText(unmerged)} before merging`;
  return figure("Collectives", countText(count), about, el("div", { class: "kinds", title: words }, chips));
}

// Steps.

const ICONS = { first: "M1 1h2v10H1zM11 1v10L4 6z", back: "M10 1v10L3 6z", on: "M2 1v10l7-5z", last: "M9 1h2v10H9zM1 1v10l7-5z" };
const icon = (name) => svg("svg", { class: "icon", viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));

function startSteps() {
  on("plan", showSteps);
  on("moment", showMoment);
}

function showSteps() {
  const { steps } = app;
  const button = (label, name, by) => el("button", { "aria-label": name, title: name, onclick: by }, icon(label));
  const slider = el("input", { id: "moment", type: "range", min: 0, max: steps.last, value: steps.last, "aria-label": "Step", oninput: (event) => goTo(Number(event.target.value)) });
  const phases = steps.phases.map((phase, n) => el("button", { class: "phase", "data-first": phase.first, title: phaseTitle(phase, n), onclick: () => goTo(phase.first) }, phase.name));
  byId("steps").replaceChildren(
    button("first", "As annotated", () => goTo(0)),
    button("back", "One step back ([)", () => step(-1)),
    slider,
    button("on", "One step on (])", () => step(1)),
    button("last", "Partitioned", () => goTo(steps.last)),
    el("div", { class: "phases" }, phases),
    el("output", { id: "moment-text" }),
  );
  showMoment();
}

function phaseTitle(phase, n) {
  const { steps } = app;
  const end = steps.phases[n + 1]?.first ?? steps.moments.length;
  return `${several(end - phase.first, "step")} from ${phase.first}`;
}

function showMoment() {
  const { steps, moment } = app;
  const { title, text, changed } = steps.moments[moment];
  const phase = steps.phaseAt(moment);
  byId("moment").value = moment;
  byId("moment").setAttribute("aria-valuetext", `${title}: ${text}`);
  byId("moment-text").title = text; // where there is no room for all of it
  for (const button of byId("steps").querySelectorAll(".phase")) button.setAttribute("aria-pressed", Number(button.dataset.first) === phase.first);
  const link = changed.length ? el("button", { class: "link", onclick: () => selectName(app.plan.names[changed[0]], changed[0]) }, "show") : null;
  byId("moment-text").replaceChildren(el("b", {}, `${moment} / ${steps.last} `), text, " ", link ?? "");
}
