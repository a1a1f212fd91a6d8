// Search over values, source lines and ops.

const MOST_FOUND = 60;
let index = [];

function startSearch() {
  const input = byId("search");
  on("plan", () => (index = searchIndex(app.plan)));
  input.oninput = () => showFound(input.value);
  input.onkeydown = moveInFound;
  input.onfocus = () => input.value && showFound(input.value);
  document.addEventListener("pointerdown", (event) => event.target.closest(".search") || hideFound());
}

/** What can be found, with the text that is looked in. */
function searchIndex(plan) {
  const entry = (kind, label, about, choose) => ({ kind, label, about, choose, text: `${label} ${about}`.toLowerCase() });
  const found = plan.names.map((name, value) => {
    const maker = plan.maker(value);
    const about = value < plan.valueCount ? plan.type(value) : "result";
    return entry(maker >= 0 ? plan.shortKind(maker) : "argument", name, about, () => selectValue(value));
  });
  for (const scope of app.scopes.all) {
    if (scope.kind === "op") continue;
    found.push(entry(scope.kind, scope.title || scope.label, scope.title ? scope.label : several(scope.sums.ops, "op"), () => selectScope(scope)));
  }
  for (const border of plan.border("results")) {
    if (!plan.numbers.has(border.path)) found.push(entry("result", border.path, border.type, () => selectName(border.path)));
  }
  return found;
}

/** What has all words of a query; beginnings of names first, then short names. */
function search(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const found = [];
  for (const entry of index) {
    if (words.every((word) => entry.text.includes(word) || entry.kind.includes(word))) found.push(entry);
  }
  const rank = ({ label, kind }) => (label.toLowerCase().startsWith(words[0]) ? 0 : 2) + (kind === "argument" || kind === "line" || kind === "scope" ? 0 : 1);
  return found.map((entry) => [rank(entry), entry]).sort((a, b) => a[0] - b[0] || a[1].label.length - b[1].label.length).map(([, entry]) => entry);
}

function showFound(query) {
  const list = byId("found");
  const found = search(query);
  list.replaceChildren(...found.slice(0, MOST_FOUND).map(foundItem));
  if (found.length > MOST_FOUND) list.append(el("li", { class: "quiet", role: "presentation" }, `${countText(found.length - MOST_FOUND)} more: add a word`));
  if (!found.length) list.append(el("li", { class: "quiet", role: "presentation" }, "Nothing is called so."));
  list.hidden = !query.trim();
  byId("search").setAttribute("aria-expanded", !list.hidden);
  point(0);
  announce(`${several(found.length, "result")}`);
}

function foundItem(entry, n) {
  const choose = () => {
    hideFound();
    byId("tree").focus({ preventScroll: true });
    entry.choose();
  };
  return el("li", { id: `found-${n}`, role: "option", onclick: choose }, el("span", { class: "found-kind" }, entry.kind), el("span", { class: "found-label", title: entry.label }, entry.label), el("span", { class: "quiet" }, entry.about));
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
