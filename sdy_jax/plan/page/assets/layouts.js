// Types such as f32[8@data,4@(x,y)]{U:model}, and which block of them each device has.

const knownTypes = new Map();

/** The parts of a type: dtype, the size and axes of each dimension, unreduced axes. */
function parsedType(text) {
  if (!knownTypes.has(text)) knownTypes.set(text, readType(text));
  return knownTypes.get(text);
}

function readType(text) {
  const open = text.indexOf("[");
  const close = text.indexOf("]", open);
  if (open < 0 || close < 0) return { dtype: text, dims: null, unreduced: [] };
  const inside = text.slice(open + 1, close);
  const dims = inside ? splitDims(inside).map(readDim) : [];
  const unreduced = /\{U:([^}]*)\}/.exec(text.slice(close));
  return { dtype: text.slice(0, open), dims, unreduced: unreduced ? unreduced[1].split(",") : [] };
}

/** The dimensions; commas within parentheses separate axes. */
function splitDims(text) {
  const found = [""];
  let depth = 0;
  for (const letter of text) {
    depth += letter === "(" ? 1 : letter === ")" ? -1 : 0;
    if (letter === "," && depth === 0) found.push("");
    else found[found.length - 1] += letter;
  }
  return found;
}

function readDim(text) {
  const at = text.indexOf("@");
  if (at < 0) return { size: Number(text), axes: [] };
  const axes = text.slice(at + 1);
  return { size: Number(text.slice(0, at)), axes: axes.startsWith("(") ? axes.slice(1, -1).split(",") : [axes] };
}

/** A type without axes. */
function plainType(text) {
  const { dtype, dims } = parsedType(text);
  return dims === null ? dtype : `${dtype}[${dims.map((dim) => dim.size).join(",")}]`;
}

/** An axis, or part of one (`model:(1)2`), of a mesh: its size, and its coordinate on the devices along the whole axis. */
function axisOf(mesh, text) {
  const part = /^(.*):\((\d+)\)(\d+)$/.exec(text);
  const name = part ? part[1] : text;
  const index = mesh.axes.findIndex((axis) => axis[0] === name);
  const whole = index < 0 ? 1 : mesh.axes[index][1];
  if (!part) return { index, size: whole, step: 1 };
  const size = Number(part[3]);
  return { index, size, step: whole / (Number(part[2]) * size) };
}

/** Coordinates of the n-th device of a mesh. */
function coordinates(mesh, device) {
  const found = [];
  for (const [, size] of [...mesh.axes].reverse()) {
    found.unshift(device % size);
    device = Math.floor(device / size);
  }
  return found;
}

/** How a type splits a value on a mesh: blocks per dimension, blocks in all, and which block each device has. */
function blocksOf(mesh, type) {
  const { dims, unreduced } = parsedType(type);
  const along = (dims ?? []).map((dim) => dim.axes.map((axis) => axisOf(mesh, axis)));
  const counts = along.map((axes) => axes.reduce((product, axis) => product * axis.size, 1));
  const total = counts.reduce((product, count) => product * count, 1);
  const block = (device) => {
    const at = coordinates(mesh, device);
    return along.map((axes) => axes.reduce((number, axis) => number * axis.size + (Math.floor((at[axis.index] ?? 0) / axis.step) % axis.size), 0));
  };
  const number = (device) => block(device).reduce((n, part, dim) => n * counts[dim] + part, 0);
  return { dims: dims ?? [], counts, total, block, number, unreduced };
}

const meshSize = (mesh) => mesh.axes.reduce((product, axis) => product * axis[1], 1);

/** The slice of a value that a device has: `[0:8, 16:32]`. */
function sliceText(blocks, device) {
  const at = blocks.block(device);
  const ranges = blocks.dims.map((dim, n) => {
    if (blocks.counts[n] === 1) return ":";
    const size = Math.ceil(dim.size / blocks.counts[n]);
    return `${Math.min(at[n] * size, dim.size)}:${Math.min((at[n] + 1) * size, dim.size)}`;
  });
  return `[${ranges.join(", ")}]`;
}

/** A layout in words, for those who do not see the drawing. */
function layoutWords(mesh, type) {
  const { dims, counts, total, unreduced } = blocksOf(mesh, type);
  const split = dims.flatMap((dim, n) => (counts[n] > 1 ? [`dimension ${n} in ${counts[n]} along ${dim.axes.join(", ")}`] : []));
  const copies = meshSize(mesh) / total;
  const parts = [split.length ? `split: ${split.join("; ")}` : "whole on every device"];
  if (split.length && copies > 1 && !unreduced.length) parts.push(`${copies} copies of each block`);
  if (unreduced.length) parts.push(`partial sums along ${unreduced.join(", ")}`);
  return parts.join("; ");
}
