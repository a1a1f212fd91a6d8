// Pipelines: what each stage does when, as a timeline whose cells are as wide as the work takes, and what it holds.

/** Width of a forward row, height of a stage, space between trips and for names, in pixels. */
const CELL = { wide: 22, least: 14, most: 66, high: 20, gap: 4, names: 58 };
/** Cells that a page draws of a pipeline. Chosen: more take a browser seconds. */
const MOST_CELLS = 8000;

function showPipelines(view) {
  const { pipelines, tried } = app.plan.data;
  view.replaceChildren(el("div", { class: "pages" }, pipelines.map(pipelineSection), tried.length ? triedSection(tried.map(triedOf)) : null));
}

/** Numbers of microbatches of which the planner took one, one for each line of a pipeline that gives several. */
const triedOf = ([microbatches, lines, time, peak, fits, chosen]) => ({ numbers: microbatches.join(", "), lines, time, peak, fits, chosen });

function triedSection(tried) {
  const taken = tried.find((each) => each.chosen);
  const why = taken.fits ? "takes least of what fits" : "none fits, and it holds least";
  const said = `${taken.numbers} ${why}, of ${tried.length} that were planned for ${taken.lines.join(", ")}`;
  return el("section", {}, el("h3", {}, "Microbatches"), el("p", { class: "quiet" }, said), triedTable(tried));
}

function triedTable(tried) {
  const [times, peaks] = ["time", "peak"].map((name) => Math.max(...tried.map((each) => each[name] ?? 0)));
  const heads = ["", ...(times ? ["takes"] : []), "holds at most"];
  const cell = (text, part, whole) => el("td", {}, text, shareBar(part, whole));
  const rows = tried.map(({ numbers, time, peak, fits, chosen }) =>
    el("tr", { "aria-current": chosen ? "true" : null }, el("th", { scope: "row" }, numbers, chosen ? el("span", { class: "quiet" }, " taken") : null),
      times ? (time === null ? el("td", {}, "–") : cell(timeText(time, app.plan.unit), time, times)) : null,
      cell(bytesText(peak) + (fits ? "" : ", does not fit"), peak, peaks)),
  );
  return el("table", { class: "totals tried" }, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows));
}

function pipelineSection(pipeline) {
  const { schedule, axis, kinds, times, op } = pipeline;
  const passes = kinds.length > 1 ? "" : `, ${kinds[0]} rows`;
  const name = `${schedule} over ${axis}${passes}${times > 1 ? ` × ${countText(times)}` : ""}`;
  const title = el("h3", {}, op === null ? name : el("button", { class: "link", onclick: () => selectOp(op) }, name));
  return el("section", {}, title, pipelineFacts(pipeline), legend(pipeline), timeline(pipeline), stageTable(pipeline));
}

function pipelineFacts({ layers, stages, rounds, microbatches, trips, bubble, boundary, sent, stacks, carried, reason }) {
  const ways = ["on", "back"].map((way, n) => boundary[n] && `${bytesText(boundary[n])} ${way}`).filter(Boolean);
  return facts([
    ["runs", `${several(layers, "layer")} on ${several(stages, "stage")}${rounds > 1 ? ` in ${rounds} rounds` : ""}, ${several(microbatches, "microbatch").replace(/hs$/, "hes")}, ${several(trips, "trip")}`],
    ["bubble", `${percent(bubble, 1)} of the time`],
    ["a boundary", `${ways.join(" and ")} per microbatch, ${bytesText(sent)} in all trips`],
    ["a device", `${bytesText(stacks)} of its stage's stacks, ${bytesText(carried)} carried from trip to trip`],
    ["at most", reason],
  ]);
}

/** The first word of a kind is its class: `weight gradient`. */
const kindClass = (kind) => kind.split(" ")[0];

function legend({ kinds, durations }) {
  const { unit } = app.plan;
  const time = (n) => (hasTimes() && durations.length ? ` ${timeText(durations[n], unit)}` : "");
  return el("div", { class: "timeline-legend" }, kinds.map((kind, n) => el("span", { class: "swatch" }, el("i", { class: kindClass(kind) }), kind + time(n))));
}

/** The first rows of a timeline, as many as a page draws, each with its place and width. */
function placedRows({ rows, stages, durations }) {
  const placed = [];
  let [left, last] = [CELL.names, 0];
  for (const [trip, kind, microbatches, rounds] of rows.slice(0, Math.max(1, Math.floor(MOST_CELLS / stages)))) {
    if (trip !== last) left += CELL.gap;
    const wide = CELL.wide * (durations.length ? durations[kind] / durations[0] : 1);
    placed.push({ trip, kind, microbatches, rounds, left, wide: Math.max(CELL.least, Math.min(CELL.most, wide)) });
    left += placed.at(-1).wide;
    last = trip;
  }
  return placed;
}

function timeline(pipeline) {
  const { schedule, stages, bubble, trips } = pipeline;
  const placed = placedRows(pipeline);
  const { left, wide, trip } = placed.at(-1);
  const label = `Timeline of ${schedule}: bubble ${percent(bubble, 1)} of the time`;
  const drawing = svg("svg", { role: "img", "aria-label": label, width: left + wide + 1, height: stages * CELL.high + 1 });
  for (let stage = 0; stage < stages; stage += 1) {
    drawing.append(svg("text", { class: "stage-name", x: CELL.names - 8, y: (stage + 0.5) * CELL.high }, `stage ${stage}`));
    drawing.append(...placed.flatMap((row) => timelineCell(pipeline, row, stage)));
  }
  const said = el("output", { class: "device-said" });
  const say = (event) => said.replaceChildren(event.target.closest("rect")?.querySelector("title")?.textContent ?? "");
  for (const name of ["pointerover", "click"]) drawing.addEventListener(name, say);
  const rest = trip + 1 < trips ? el("p", { class: "quiet" }, `The first ${countText(trip + 1)} of ${countText(trips)} trips.`) : null;
  return el("div", {}, el("div", { class: "timeline", tabindex: "0" }, drawing), said, rest);
}

function timelineCell({ kinds, rounds: count }, { trip, kind, microbatches, rounds, left, wide }, stage) {
  const [microbatch, round] = [microbatches[stage], rounds[stage]];
  const place = { x: left + 0.5, y: stage * CELL.high + 1.5, width: wide - 1, height: CELL.high - 3 };
  if (microbatch < 0) return [svg("rect", { ...place, class: "bubble" })];
  const said = `stage ${stage}, trip ${trip}: ${kinds[kind]} of microbatch ${microbatch}${count > 1 ? `, round ${round}` : ""}`;
  const shade = count > 1 ? 1 - (0.45 * round) / (count - 1) : 1;
  const cell = svg("rect", { ...place, class: kindClass(kinds[kind]), "fill-opacity": shade }, svg("title", {}, said));
  return [cell, svg("text", { class: "cell-name", x: left + wide / 2, y: (stage + 0.5) * CELL.high }, String(microbatch))];
}

function stageTable({ groups, held }) {
  const head = ["", "layers", ...(held.length ? ["microbatches held at most"] : [])];
  const rows = groups.map((layers, stage) => el("tr", {}, el("th", { scope: "row" }, `stage ${stage}`), el("td", {}, layers || "–"), held.length ? el("td", {}, String(held[stage])) : null));
  return el("table", { class: "totals" }, el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows));
}
