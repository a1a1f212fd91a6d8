// The graph of one scope: what is directly in it, and the values that flow between.

const MOST_NODES = 100; // boxes that are drawn at once
const MOST_INPUTS = 30; // values from elsewhere that are drawn
const BOX = { width: 214, height: 48, letters: 28 };
const PILL = { width: 168, height: 26, letters: 24 };

let graphState = { scope: null, page: 0, zoom: 1 };

function showGraph(view) {
  if (!app.scope.children.length) return view.replaceChildren(el("p", { class: "quiet empty" }, "The ops of a program on local arrays are not listed; its collectives are."));
  if (graphState.scope !== app.scope) graphState = { scope: app.scope, page: pageOf(app.selected?.scope), zoom: 0 };
  const shown = app.scope.children.slice(graphState.page * MOST_NODES, (graphState.page + 1) * MOST_NODES);
  const { nodes, edges } = graphOf(app.scope, shown);
  const size = layOut(nodes, edges);
  const box = el("div", { class: "canvas" });
  view.replaceChildren(graphBar(box, size), box);
  if (!graphState.zoom) graphState.zoom = Math.max(0.72, Math.min(1, (box.clientWidth - 4) / size.width));
  box.append(drawing(nodes, edges, size));
  return box.querySelector(".node.selected")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function pageOf(scope) {
  const index = app.scope.children.findIndex((child) => child.contains(scope));
  return Math.max(0, Math.floor(index / MOST_NODES));
}

/** The nodes and edges of what is in a scope: values that several boxes take are one edge each, with all their bytes. */
function graphOf(scope, shown) {
  const nodes = shown.map((child) => ({ scope: child, ...BOX }));
  const at = new Map();
  shown.forEach((child, n) => child.ops.forEach((op) => at.set(op, n)));
  const edges = new Map();
  const inputs = new Map();
  const { plan } = app;
  for (const [op, to] of at) {
    for (const value of plan.data.ops.operands[op]) {
      const from = at.get(plan.maker(value));
      if (from === undefined && isConstant(value)) continue;
      if (from === undefined) inputs.set(value, (inputs.get(value) ?? new Set()).add(to));
      else if (from !== to) join(edges, from, to, value);
    }
  }
  return withInputs(nodes, edges, inputs, scope);
}

/** Constants say nothing about where data comes from. */
const isConstant = (value) => app.plan.maker(value) >= 0 && app.plan.isConstant(app.plan.maker(value));

function join(edges, from, to, value) {
  const key = from * MOST_NODES + to;
  if (!edges.has(key)) edges.set(key, { from, to, values: new Set() });
  edges.get(key).values.add(value);
}

/** Values from elsewhere as boxes before all others, where there are few. */
function withInputs(nodes, edges, inputs, scope) {
  const areFew = scope.children.length <= MOST_NODES && inputs.size <= (scope.children.some((child) => child.op >= 0) ? MOST_INPUTS : 6);
  const drawn = areFew ? [...inputs] : [];
  const shift = drawn.length;
  const all = [...drawn.map(([value]) => ({ value, ...PILL })), ...nodes];
  const found = [...edges.values()].map((edge) => ({ ...edge, from: edge.from + shift, to: edge.to + shift }));
  drawn.forEach(([value, users], n) => users.forEach((to) => found.push({ from: n, to: to + shift, values: new Set([value]) })));
  return { nodes: all, edges: found };
}

// The bar above.

function graphBar(box, size) {
  const count = app.scope.children.length;
  const pages = Math.ceil(count / MOST_NODES);
  const zoom = (factor) => {
    graphState.zoom = factor ? Math.max(0.3, Math.min(2, graphState.zoom * factor)) : Math.max(0.3, Math.min(1, box.clientWidth / size.width));
    const drawn = box.querySelector("svg");
    drawn.setAttribute("width", size.width * graphState.zoom);
    drawn.setAttribute("height", size.height * graphState.zoom);
  };
  const turn = (by) => {
    graphState.page = Math.max(0, Math.min(pages - 1, graphState.page + by));
    showGraph(byId("view"));
  };
  const first = graphState.page * MOST_NODES;
  const pager = pages > 1 && [
    el("button", { onclick: () => turn(-1), "aria-label": "Earlier", disabled: graphState.page === 0 }, "‹"),
    el("span", { class: "quiet" }, `${first + 1}–${Math.min(count, first + MOST_NODES)} of ${count}`),
    el("button", { onclick: () => turn(1), "aria-label": "Later", disabled: graphState.page === pages - 1 }, "›"),
  ];
  const zooms = [["−", "Smaller", 1 / 1.25], ["Fit", "Fit the width", 0], ["+", "Larger", 1.25]];
  const buttons = zooms.map(([label, name, factor]) => el("button", { onclick: () => zoom(factor), "aria-label": name }, label));
  return el("div", { class: "view-bar" }, crumbs(), pager || [], buttons);
}

function crumbs() {
  const path = app.scope.path;
  const parts = path.map((scope, n) => {
    const label = scope.title || (scope.kind === "root" ? scope.label : fileLine(scope.label));
    const current = n === path.length - 1;
    return el("li", {}, el("button", { class: "link", title: scope.label, "aria-current": current ? "true" : null, onclick: () => selectScope(scope) }, label));
  });
  return el("nav", { "aria-label": "Scope" }, el("ol", { class: "crumbs" }, parts));
}

// The drawing.

function drawing(nodes, edges, size) {
  const drawn = svg("svg", {
    class: "graph",
    viewBox: `0 0 ${size.width} ${size.height}`,
    width: size.width * graphState.zoom,
    height: size.height * graphState.zoom,
    role: "group",
    "aria-label": `Graph of ${app.scope.label}: ${several(nodes.length, "box").replace("boxs", "boxes")}, ${several(edges.length, "edge")}`,
  });
  drawn.append(...edges.map((edge) => edgeLine(edge, nodes)), ...nodes.map(nodeBox));
  drawn.querySelector(".node")?.setAttribute("tabindex", "0");
  drawn.addEventListener("keydown", (event) => moveInGraph(event, nodes));
  return drawn;
}

function edgeLine(edge, nodes) {
  const { plan, steps, moment } = app;
  const values = [...edge.values];
  const bytes = values.reduce((sum, value) => sum + plan.bytes(value), 0);
  const path = edge.points ? curve(edge.points) : backwards(nodes[edge.from], nodes[edge.to]);
  const width = Math.min(5, 1 + Math.log2(1 + bytes / 65536) / 3);
  const said = values.length === 1 ? `${plan.names[values[0]]}\n${steps.typeAt(values[0], moment)}` : `${several(values.length, "value")}`;
  const changes = moment < steps.last && steps.changedAt(moment).some((value) => edge.values.has(value));
  const line = svg("path", { class: `edge${edge.points ? "" : " back"}${changes ? " changes" : ""}`, d: path, "stroke-width": width, "marker-end": "url(#arrow)" });
  line.append(svg("title", {}, `${said}\n${bytesText(bytes)} on a device`));
  return line;
}

/** An edge to what comes earlier in the program, as from one layer to the next of the same lines. */
function backwards(from, to) {
  const [startX, startY] = [from.x + from.width / 2, from.y + from.height / 2];
  const [endX, endY] = [to.x + to.width / 2, to.y + to.height / 2];
  const out = Math.max(startX, endX) + 40;
  return `M${startX} ${startY}C${out} ${startY} ${out} ${endY} ${endX + 2} ${endY}`;
}

function nodeBox(node) {
  node.drawn = node.scope ? scopeBox(node) : inputBox(node);
  node.drawn.node = node;
  node.drawn.setAttribute("transform", `translate(${node.x - node.width / 2} ${node.y})`);
  return node.drawn;
}

function scopeBox(node) {
  const { scope } = node;
  const { plan } = app;
  const collective = scope.op >= 0 ? plan.collectiveAt.get(scope.op) : null;
  const [value] = scope.op >= 0 ? plan.data.ops.results[scope.op] : [];
  const chosen = app.selected?.scope === scope;
  const changes = app.moment < app.steps.last && app.changedScopes.has(scope);
  const label = scope.op >= 0 ? opName(scope.op) : scope.title || fileLine(scope.label);
  const below = scope.op >= 0 ? (value === undefined ? "" : app.steps.typeAt(value, app.moment)) : scopeSummary(scope);
  const box = svg(
    "g",
    {
      class: `node ${scope.kind} ${collective ? `collective ${collective.kind}` : ""}${chosen ? " selected" : ""}${changes ? " changes" : ""}${app.differing.has(scope) ? " differs" : ""}`,
      role: "button",
      tabindex: "-1",
      "aria-label": `${label}, ${below}`,
      onclick: () => selectScope(scope, app.scope),
      ondblclick: () => scope.children.length && selectScope(scope),
    },
    svg("title", {}, treeTitle(scope)),
    svg("rect", { class: "body", width: node.width, height: node.height, rx: 7 }),
    svg("rect", { class: "side", width: 4, height: node.height, rx: 2 }),
    svg("text", { x: 14, y: 20, class: "node-label" }, clipped(label, BOX.letters)),
    svg("text", { x: 14, y: 37, class: "node-type" }, clipped(collective ? `${bytesText(collective.total)} · ${collective.axes}` : below, value === undefined ? 31 : 24)),
  );
  if (value !== undefined) box.append(gridAt(value, node));
  else if (scope.children.length) box.append(sentBar(scope, node));
  return box;
}

function scopeSummary(scope) {
  const sent = scope.sums.sent ? ` · ${bytesText(scope.sums.sent)} sent` : "";
  return `${several(scope.sums.ops, "op")}${sent}`;
}

function gridAt(value, node) {
  const grid = miniGrid(app.plan.mesh, app.steps.typeAt(value, app.moment), 22);
  const [width, height] = [Number(grid.getAttribute("width")), Number(grid.getAttribute("height"))];
  grid.setAttribute("x", node.width - width - 9);
  grid.setAttribute("y", node.height - height - 8);
  return grid;
}

function sentBar(scope, node) {
  const whole = app.scopes.root.sums.sent;
  const width = whole ? (scope.sums.sent / whole) * (node.width - 16) : 0;
  return svg("rect", { class: "sent", x: 8, y: node.height - 5, width, height: 2.5, rx: 1 });
}

function inputBox(node) {
  const name = app.plan.names[node.value];
  const chosen = app.selected?.value === node.value;
  const type = app.steps.typeAt(node.value, app.moment);
  const grid = miniGrid(app.plan.mesh, type, 14);
  grid.setAttribute("x", 9);
  grid.setAttribute("y", (node.height - Number(grid.getAttribute("height"))) / 2);
  return svg(
    "g",
    { class: `node input${chosen ? " selected" : ""}`, role: "button", tabindex: "-1", "aria-label": `${name}, ${type}`, onclick: () => selectValue(node.value, app.scope) },
    svg("title", {}, `${name}\n${type}`),
    svg("rect", { class: "body", width: node.width, height: node.height, rx: 13 }),
    grid,
    svg("text", { x: 30, y: 17, class: "node-type" }, clipped(name, PILL.letters - 4)),
  );
}

// The keyboard.

function moveInGraph(event, nodes) {
  const node = event.target.closest?.(".node")?.node;
  if (!node) return;
  const way = { ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowRight: [1, 0], ArrowLeft: [-1, 0] }[event.key];
  if (way) {
    const next = nearest(node, nodes, way);
    if (next) {
      node.drawn.setAttribute("tabindex", "-1");
      next.drawn.setAttribute("tabindex", "0");
      next.drawn.focus();
      next.drawn.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
  } else if (event.key === "Enter" || event.key === " ") {
    if (node.value !== undefined) selectValue(node.value, app.scope);
    else selectScope(node.scope, event.key === " " ? app.scope : undefined);
    byId("view").querySelector(".node.selected, .node")?.focus();
  } else if (event.key === "Backspace" && app.scope.parent) {
    selectScope(app.scope.parent);
    byId("view").querySelector(".node")?.focus();
  } else {
    return;
  }
  event.preventDefault();
}

/** The nearest node in a direction; what is aside counts thrice. */
function nearest(from, nodes, [right, down]) {
  let best = null;
  let least = Infinity;
  for (const node of nodes) {
    const [x, y] = [node.x - from.x, node.y - from.y];
    const ahead = x * right + y * down;
    const distance = ahead + 3 * Math.abs(x * down + y * right);
    if (node !== from && ahead > 1 && distance < least) [best, least] = [node, distance];
  }
  return best;
}
