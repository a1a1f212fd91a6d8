// What the page does: selecting, stepping, tabs, keys, and how it begins.

const TABS = {
  compare: ["Compare", showCompare],
  graph: ["Graph", showGraph],
  source: ["Source", showSource],
  collectives: ["Collectives", showCollectives],
  time: ["Time", showTime],
  pipelines: ["Pipelines", showPipelines],
  border: ["Arguments", showBorder],
  changes: ["Planner’s changes", showChanges],
  notes: ["Notes", showNotes],
};

// Selecting. `container` is the scope that the views show; it is what is selected, or what that is in.

function select(selected, container) {
  app.selected = selected;
  const { scope } = selected;
  if (container) app.scope = container;
  else if (scope) app.scope = scope.children.length ? scope : scope.parent;
  emit("select");
}

const selectScope = (scope, container) => select({ scope }, container);
const selectOp = (op) => select({ scope: app.scopes.ofOp[op] });
const selectValue = (value, container) => select({ value, scope: app.scopes.ofOp[app.plan.maker(value)] }, container);

function selectCollective(collective, container) {
  const op = collective.op >= 0 ? collective.op : collective.serves;
  select({ collective, scope: app.scopes.ofOp[op] }, container);
}

/** A value by its name, or a result, whose number is among the names but not among the values. */
function selectName(name, number) {
  const value = number ?? app.plan.numbers.get(name);
  if (value !== undefined) return selectValue(value);
  app.plan.numbers.set(name, app.plan.names.push(name) - 1);
  return selectValue(app.plan.names.length - 1);
}

function selectLine(line) {
  const scope = app.scopes.all.find((each) => each.kind === "line" && each.label === line);
  if (scope) selectScope(scope);
}

// Steps.

/** Goes to a moment; to `follow` it selects what changes in it. */
function goTo(moment, follow = false) {
  app.moment = Math.max(0, Math.min(app.steps.last, moment));
  app.changedScopes = changedScopes();
  const isStep = app.moment > 0 && app.moment < app.steps.last;
  const value = app.steps.changedAt(app.moment).find((each) => each < app.plan.valueCount);
  emit("moment");
  if (follow && isStep && value !== undefined) return selectValue(value);
  if (app.tab === "graph") showView();
  return showDetails();
}

/** The scopes around the values that change in the present moment. */
function changedScopes() {
  const found = new Set();
  for (const value of app.steps.changedAt(app.moment)) {
    for (let at = app.scopes.ofOp[app.plan.maker(value)]; at && !found.has(at); at = at.parent) found.add(at);
  }
  return found;
}

/** Steps with the keyboard or by buttons take the view along to where the layout changes. */
const step = (by) => goTo(app.moment + by, true);

// Views.

function showTabs() {
  const shown = { compare: app.plans.length > 1, pipelines: app.plan.data.pipelines.length, time: Boolean(app.plan.data.timeline) };
  const names = Object.keys(TABS).filter((name) => shown[name] ?? true);
  const tabs = names.map((name) =>
    el("button", { role: "tab", id: `tab-${name}`, "aria-controls": "view", "aria-selected": app.tab === name, tabindex: app.tab === name ? 0 : -1, onclick: () => openTab(name) }, TABS[name][0]),
  );
  byId("tabs").replaceChildren(...tabs);
  byId("tabs").onkeydown = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    openTab(names[(names.indexOf(app.tab) + by + names.length) % names.length]);
    byId(`tab-${app.tab}`).focus();
    event.preventDefault();
  };
}

function openTab(name) {
  app.tab = name;
  showTabs();
  showView();
}

function showView() {
  byId("view").dataset.view = app.tab;
  byId("view").setAttribute("aria-labelledby", `tab-${app.tab}`);
  TABS[app.tab][1](byId("view"));
}

/** Views that depend on what is selected: a table in which a row was clicked stays as it is. */
function viewSelected() {
  if (app.tab === "compare") return openTab("graph");
  if (app.tab === "graph" || app.tab === "source") showView();
}

// Plans.

function usePlan(which) {
  const { plan } = app.plans[which];
  if (app.plan === plan) return;
  const known = app.plans[which];
  app.plan = plan;
  app.scopes = known.scopes ??= new Scopes(plan);
  app.steps = known.steps ??= new Steps(plan);
  app.moment = app.steps.last;
  app.changedScopes = new Set();
  app.differing = differingScopes();
  app.scope = app.scopes.root;
  app.selected = { scope: app.scopes.root };
  byId("which").value = which;
  showHeadline();
  emit("plan");
  showDetails();
}

function startPlans() {
  const written = JSON.parse(byId("plans").textContent);
  app.plans = written.plans.map((data) => ({ plan: new Plan(data) }));
  app.differences = written.differences;
  const which = byId("which");
  if (app.plans.length > 1) {
    which.append(el("option", { value: 0 }, "now"), el("option", { value: 1 }, "before"));
    which.hidden = false;
    which.onchange = () => {
      usePlan(Number(which.value));
      showView();
    };
    app.tab = "compare";
  }
}

// Theme and keys.

const THEMES = ["auto", "light", "dark"];

function startTheme() {
  const button = byId("theme");
  const use = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
    button.title = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
    emit("theme");
  };
  button.onclick = () => use(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  use("auto");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => emit("theme"));
}

const KEYS = [
  ["/", "search"],
  ["[ and ]", "one step back, one step on"],
  ["{ and }", "to the phase before, to the next"],
  ["1 … 7", "the views"],
  ["t, g, d, m", "to the tree, the view, the details, the memory"],
  ["arrows", "move in trees, tables, graph and memory; → opens, ← closes"],
  ["Enter", "open or select; Backspace in the graph: to the scope around"],
  ["?", "this list"],
];

function startKeys() {
  const help = byId("help");
  help.append(el("h2", {}, "Keyboard"), facts(KEYS.map(([key, what]) => [el("kbd", {}, key), what])), el("form", { method: "dialog" }, el("button", {}, "Close")));
  byId("keys").onclick = () => help.showModal();
  const to = (id) => byId(id).focus();
  const phase = (by) => {
    const { phases } = app.steps;
    const next = phases[phases.indexOf(app.steps.phaseAt(app.moment)) + by];
    if (next) goTo(next.first);
  };
  const focusView = () => ["svg .node[tabindex='0']", "[tabindex='0']", "button", ""].map((which) => (which ? byId("view").querySelector(which) : byId("view"))).find(Boolean).focus();
  const doing = { "/": () => to("search"), "[": () => step(-1), "]": () => step(1), "{": () => phase(-1), "}": () => phase(1), t: () => to("tree"), g: focusView, d: () => to("details"), m: () => (app.tab === "time" ? byId("view").querySelector("canvas") : byId("memory").querySelector(".chart"))?.focus(), "?": () => help.showModal() };
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input[type=search], select, dialog *") || event.ctrlKey || event.metaKey || event.altKey) return;
    const names = [...byId("tabs").children].map((tab) => tab.id.slice(4));
    const name = names[Number(event.key) - 1];
    if (name) openTab(name);
    else if (doing[event.key]) doing[event.key]();
    else return;
    event.preventDefault();
  });
}

function start() {
  startTheme();
  startPlans();
  startTree();
  startMemory();
  startSearch();
  startSteps();
  startKeys();
  on("select", showDetails);
  on("select", viewSelected);
  usePlan(0);
  openTab(app.tab);
  document.documentElement.dataset.ready = "true";
}

start();
