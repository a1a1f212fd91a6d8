// Drawings of the mesh, each device in the colour of the block that it has.

const MOST_SHOWN = 32; // devices along a side of a drawing
const FEW = 12; // blocks whose hues stay apart all around

/** The colour of a block: a few differ as far as they can, many run through all hues in order; a whole value has none. */
function blockColour(number, total) {
  if (total === 1) return "--hue:0;--strength:0";
  const round = total > FEW ? 320 : 360;
  return `--hue:${Math.round((round * number) / total + 250) % 360};--strength:1`;
}

/** Rows and columns of a drawn mesh: the first axes go down, so many that it is nearest to a square, or wider. */
function gridShape(mesh) {
  const product = (axes) => axes.reduce((all, [, size]) => all * size, 1);
  const shapes = mesh.axes.map((_, down) => ({ rows: product(mesh.axes.slice(0, down)), columns: product(mesh.axes.slice(down)), down }));
  const badness = ({ rows, columns }) => Math.abs(Math.log(columns / rows)) + (rows > columns ? 0.8 : 0);
  return shapes.reduce((best, shape) => (badness(shape) < badness(best) ? shape : best), shapes[0] ?? { rows: 1, columns: 1, down: 0 });
}

/** A small drawing for rows and boxes, as an `svg` element of some size. */
function miniGrid(mesh, type, size = 18) {
  const blocks = blocksOf(mesh, type);
  const { rows, columns } = gridShape(mesh);
  const [down, across] = [Math.min(rows, 8), Math.min(columns, 8)];
  const cell = Math.min(size / across, size / down);
  const node = svg("svg", { class: "mini", width: cell * across, height: cell * down, viewBox: `0 0 ${across} ${down}`, "aria-hidden": "true" });
  for (let row = 0; row < down; row += 1) {
    for (let column = 0; column < across; column += 1) {
      const device = Math.floor((row * rows) / down) * columns + Math.floor((column * columns) / across);
      const place = { x: column + 0.06, y: row + 0.06, width: 0.88, height: 0.88, rx: 0.14 };
      node.append(svg("rect", { ...place, class: "block", style: blockColour(blocks.number(device), blocks.total) }));
      if (blocks.unreduced.length) node.append(svg("path", { d: `M${column + 0.25} ${row + 0.75}l0.5 -0.5`, class: "partial" }));
    }
  }
  return node;
}

/** The drawing in the details: devices with their numbers, and what each has on hover or focus. */
function deviceGrid(mesh, type) {
  const blocks = blocksOf(mesh, type);
  const { rows, columns, down } = gridShape(mesh);
  const names = (axes) => axes.map(([name, size]) => `${name} ${size}`).join(" × ");
  const shown = { rows: Math.min(rows, MOST_SHOWN), columns: Math.min(columns, MOST_SHOWN) };
  const grid = el("div", { class: "devices", role: "img", "aria-label": layoutWords(mesh, type), style: `--columns:${shown.columns};--cell:${cellHeight(shown)}px;--gap:${shown.columns > 12 ? 1 : 3}px` });
  const said = el("output", { class: "device-said" }, layoutWords(mesh, type));
  for (let row = 0; row < shown.rows; row += 1) {
    for (let column = 0; column < shown.columns; column += 1) grid.append(deviceCell(mesh, blocks, row * columns + column, said));
  }
  grid.addEventListener("mouseleave", () => said.replaceChildren(layoutWords(mesh, type)));
  const left = rows > shown.rows || columns > shown.columns ? el("p", { class: "quiet" }, `${shown.rows}×${shown.columns} of ${rows}×${columns} devices are drawn`) : null;
  const across = el("div", { class: "axis-across" }, `${names(mesh.axes.slice(down))} →`);
  const aside = down ? el("div", { class: "axis-down" }, el("span", {}, `← ${names(mesh.axes.slice(0, down))}`)) : null;
  return el("figure", { class: "layout" }, across, el("div", { class: "grid-row" }, aside, grid), left, said);
}

const cellHeight = ({ rows, columns }) => Math.max(5, Math.min(26, 208 / rows, columns > 12 ? 14 : 26));

function deviceCell(mesh, blocks, device, said) {
  const id = mesh.ids.length ? mesh.ids[device] : device;
  const text = `device ${id} has ${blocks.unreduced.length ? "terms of " : ""}${sliceText(blocks, device)}`;
  const small = meshSize(mesh) > 64;
  const cell = el("div", { class: "device block", style: blockColour(blocks.number(device), blocks.total), title: text }, small ? "" : String(id));
  if (blocks.unreduced.length) cell.classList.add("partial");
  cell.addEventListener("mouseenter", () => said.replaceChildren(text));
  return cell;
}

/** A type as text: its axes in their colour. */
function typeText(type) {
  const { dtype, dims, unreduced } = parsedType(type);
  if (dims === null) return el("code", { class: "type" }, type);
  const parts = dims.flatMap((dim, n) => [
    n ? "," : "",
    String(dim.size),
    dim.axes.length ? el("b", {}, `@${dim.axes.length > 1 ? `(${dim.axes.join(",")})` : dim.axes[0]}`) : "",
  ]);
  const tail = unreduced.length ? el("i", {}, `{U:${unreduced.join(",")}}`) : "";
  return el("code", { class: "type" }, dtype, "[", ...parts, "]", tail);
}
