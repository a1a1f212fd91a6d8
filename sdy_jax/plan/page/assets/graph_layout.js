// A layered drawing of a graph: nodes in rows, edges downwards, few crossings.

const GAP = { x: 22, y: 46 };

/**
 * Places nodes.
 * @param nodes with `width`, `height`, in program order.
 * @param edges with `from`, `to` (numbers of nodes); those that close a circle are left out of the layers.
 * @returns the size of the drawing; nodes get `x` and `y`, the middles of their tops, and edges `points`.
 */
function layOut(nodes, edges) {
  const sorted = topological(nodes, edges);
  const place = new Map(sorted.map((n, at) => [n, at]));
  const forward = edges.filter((edge) => place.get(edge.from) < place.get(edge.to));
  nodes.forEach((node) => (node.layer = 0));
  for (const edge of [...forward].sort((a, b) => place.get(a.from) - place.get(b.from))) {
    nodes[edge.to].layer = Math.max(nodes[edge.to].layer, nodes[edge.from].layer + 1);
  }
  pullDown(nodes, forward, sorted);
  const { layers, chains } = withBends(nodes, forward);
  order(layers);
  const width = spread(layers);
  let y = 12;
  for (const layer of layers) {
    const height = Math.max(...layer.map((item) => item.height));
    for (const item of layer) item.y = y + (height - item.height) / 2;
    y += height + GAP.y;
  }
  edges.forEach((edge) => (edge.points = null));
  chains.forEach((chain, edge) => (edge.points = chain.map((item) => [item.x, item.y, item.height])));
  return { width: width + (forward.length < edges.length ? 44 : 0), height: y - GAP.y + 12 };
}

/** The numbers of nodes in an order in which all edges but those that close a circle go on. */
function topological(nodes, edges) {
  const users = nodes.map(() => []);
  for (const { from, to } of edges) users[from].push(to);
  const seen = new Set();
  const sorted = [];
  const visit = (n) => {
    if (seen.has(n)) return;
    seen.add(n);
    users[n].forEach(visit);
    sorted.push(n);
  };
  nodes.forEach((_, n) => visit(n));
  return sorted.reverse();
}

/** What nothing comes before stands just above its first user, instead of at the top. */
function pullDown(nodes, edges, sorted) {
  const users = nodes.map(() => []);
  const has = new Set(edges.map((edge) => edge.to));
  for (const edge of edges) users[edge.from].push(edge.to);
  for (const n of [...sorted].reverse()) {
    if (!has.has(n) && users[n].length) nodes[n].layer = Math.min(...users[n].map((to) => nodes[to].layer)) - 1;
  }
  const first = Math.min(...nodes.map((node) => node.layer));
  nodes.forEach((node) => (node.layer -= first));
}

/** The layers, with a bend for each layer that an edge passes; and per edge what it passes. */
function withBends(nodes, edges) {
  const layers = [];
  const put = (item) => (layers[item.layer] ??= []).push(item);
  nodes.forEach((node) => {
    Object.assign(node, { above: [], below: [] });
    put(node);
  });
  const chains = new Map();
  for (const edge of edges) {
    const chain = [nodes[edge.from]];
    for (let layer = nodes[edge.from].layer + 1; layer < nodes[edge.to].layer && edges.length < 800; layer += 1) {
      const bend = { layer, width: 4, height: 0, above: [], below: [] };
      put(bend);
      chain.push(bend);
    }
    chain.push(nodes[edge.to]);
    for (let n = 1; n < chain.length; n += 1) {
      chain[n - 1].below.push(chain[n]);
      chain[n].above.push(chain[n - 1]);
    }
    chains.set(edge, chain);
  }
  return { layers: layers.filter(Boolean), chains };
}

/** Sorts each layer by the middles of what it is connected with, down and up. */
function order(layers) {
  const number = (layer) => layer.forEach((item, n) => (item.at = n));
  layers.forEach(number);
  const middle = (items, otherwise) => (items.length ? items.reduce((sum, item) => sum + item.at, 0) / items.length : otherwise);
  for (let round = 0; round < 8; round += 1) {
    const side = round % 2 ? "below" : "above";
    for (const layer of round % 2 ? [...layers].reverse() : layers) {
      layer.forEach((item) => (item.wish = middle(item[side], item.at)));
      layer.sort((a, b) => a.wish - b.wish);
      number(layer);
    }
  }
}

/** Gives items their `x`, near what they are connected with, without overlaps; returns the width. */
function spread(layers) {
  for (const layer of layers) {
    let x = 0;
    for (const item of layer) {
      item.x = x + item.width / 2;
      x += item.width + GAP.x;
    }
  }
  for (let round = 0; round < 12; round += 1) {
    for (const layer of round % 2 ? [...layers].reverse() : layers) settle(layer);
  }
  const all = layers.flat();
  const left = Math.min(...all.map((item) => item.x - item.width / 2)) - 16;
  all.forEach((item) => (item.x -= left));
  return Math.max(...all.map((item) => item.x + item.width / 2)) + 16;
}

/** Moves the items of a layer to the middle of their neighbours, those that would overlap as one block. */
function settle(layer) {
  const blocks = [];
  layer.forEach((item) => {
    const near = [...item.above, ...item.below];
    const wish = near.length ? near.reduce((sum, other) => sum + other.x, 0) / near.length : item.x;
    let block = { items: [item], width: item.width, wish };
    while (blocks.length && blocks.at(-1).wish + blocks.at(-1).width / 2 + GAP.x > block.wish - block.width / 2) block = joined(blocks.pop(), block);
    blocks.push(block);
  });
  for (const block of blocks) {
    let x = block.wish - block.width / 2;
    for (const item of block.items) {
      item.x = x + item.width / 2;
      x += item.width + GAP.x;
    }
  }
}

function joined(one, other) {
  const items = [...one.items, ...other.items];
  const wish = (one.wish * one.items.length + other.wish * other.items.length) / items.length;
  return { items, width: one.width + GAP.x + other.width, wish };
}

/** A smooth curve through points, from below the first to the top of the last. */
function curve(points) {
  const stops = points.map(([x, y, height], n) => [x, n === 0 ? y + height : y]);
  let path = `M${stops[0][0]} ${stops[0][1]}`;
  for (let n = 1; n < stops.length; n += 1) {
    const [[fromX, fromY], [x, y]] = [stops[n - 1], stops[n]];
    const middle = (fromY + y) / 2;
    path += `C${fromX} ${middle} ${x} ${middle} ${x} ${y}`;
  }
  return path;
}
