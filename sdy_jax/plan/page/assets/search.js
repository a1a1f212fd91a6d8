// Search over values, source lines and ops.

const MOST_FOUND = 60;
let index = null; // made when it is first looked for

function startSearch() {
  const input = byId("search");
  on("plan", () => (index = null));
  input.oninput = () => showFound(input.value);
  input.onkeydown = moveInFound;
  input.onfocus = () => input.value && showFound(input.value);
  document.addEventListener("pointerdown", (event) => event.target.closest(".search") || hideFound());
}

/** What can be found, with the text that is looked in. */
function searchIndex(plan) {
  const entry = (kind, label, about, choose) => ({ kind, label, about, choose, text: `${label} ${about}`.toLowerCase() });
  const results = new Map(plan.border("results").map((border) => [border.path, border]));
  const found = plan.names.map((name, value) => {
    const [maker, result] = [plan.maker(value), results.get(name)];
    const kind = result ? "result" : value >= plan.valueCount ? "value" : maker >= 0 ? plan.shortKind(maker) : "argument";
    return entry(kind, name, value < plan.valueCount ? plan.type(value) : (result?.type ?? "before partitioning"), () => selectValue(value));
  });
  for (const scope of app.scopes.all) {
    if (scope.kind === "op") continue;
    found.push(entry(scope.kind, scope.title || scope.label, scope.title ? scope.label : several(scope.sums.ops, "op"), () => selectScope(scope)));
  }
  for (const [path, { type }] of results) {
    if (!plan.numbers.has(path)) found.push(entry("result", path, type, () => selectName(path)));
  }
  return found;
}

/** What has all words of a query; beginnings of names first, then short names. */
function search(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  index ??= searchIndex(app.plan);
  const found = [];
  for (const entry of index) {
    if (words.every((word) => entry.text.includes(word) || entry.kind.includes(word))) found.push(entry);
  }
  const rank = ({ label, kind }) => (label.toLowerCase().startsWith(words[0]) ? 0 : 2) + (kind === "argument" || kind === "result" || kind === "line" || kind === "scope" ? 0 : 1);
  return found.map((entry) => [rank(entry), entry]).sort((a, b) => a[0] - b[0] || a[1].label.length - b[1].label.length).map(([, entry]) => entry);
}

/** What is found; what is alike but for numbers is one, unless numbers are looked for: `[entry, how many]`. */
function foldedFound(query) {
  const found = search(query);
  if (/\d/.test(query)) return found.map((entry) => [entry, 1]);
  const groups = groupsOf(found, ({ kind, label, about }) => folded(`${kind} ${label} ${about}`));
  return groups.flatMap((group) => (group.length < LEAST_ALIKE ? group.map((entry) => [entry, 1]) : [[group[0], group.length]]));
}

function showFound(query) {
  const list = byId("found");
  const found = foldedFound(query);
  list.replaceChildren(...found.slice(0, MOST_FOUND).map(foundItem));
  if (found.length > MOST_FOUND) list.append(el("li", { class: "quiet", role: "presentation" }, `${countText(found.length - MOST_FOUND)} more: add a word`));
  if (!found.length) list.append(el("li", { class: "quiet", role: "presentation" }, "Nothing is called so."));
  list.hidden = !query.trim();
  byId("search").setAttribute("aria-expanded", !list.hidden);
  point(0);
  announce(`${several(found.length, "result")}`);
}

function foundItem([entry, count], n) {
  const choose = () => {
    hideFound();
    byId("tree").focus({ preventScroll: true });
    entry.choose();
    if (matchMedia("(max-width: 820px)").matches) byId("details").scrollIntoView();
  };
  return el("li", { id: `found-${n}`, role: "option", onclick: choose }, el("span", { class: "found-kind" }, entry.kind), el("span", { class: "found-label", title: entry.label }, abbreviated(count > 1 ? folded(entry.label) : entry.label), count > 1 ? el("span", { class: "quiet" }, ` ×${count}`) : null), el("span", { class: "quiet" }, entry.about));
}

function hideFound() {
  byId("found").hidden = true;
  byId("search").setAttribute("aria-expanded", "false");
}

const options = () => [...byId("found").querySelectorAll("[role=option]")];

function point(to) {
  options().forEach((option, n) => option.setAttribute("aria-selected", n === to));
  options()[to]?.scrollIntoView({ block: "nearest" });
  byId("search").setAttribute("aria-activedescendant", options()[to]?.id ?? "");
}

function moveInFound(event) {
  const all = options();
  const at = all.findIndex((option) => option.getAttribute("aria-selected") === "true");
  if (event.key === "ArrowDown") point(Math.min(all.length - 1, at + 1));
  else if (event.key === "ArrowUp") point(Math.max(0, at - 1));
  else if (event.key === "Enter") all[at]?.click();
  else if (event.key === "Escape") hideFound();
  else return;
  event.preventDefault();
}
