"""A weather model: messages over fixed graphs between the points of a grid and the nodes of a mesh of the earth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models.common import Array, Layout, Program, Tree, bf16, f32, i32, layer_norm, stacked, training


@dataclass(frozen=True)
class Weather:
    """One step of a forecast: grid to mesh, messages along the mesh, mesh to grid, each with MLPs over edges that see
    their ends, and over nodes that see the sum of what comes to them (GraphCast, Lam et al. 2023, arXiv 2212.12794). At
    0.25 degrees it has 721 x 1440 points of 474 numbers, 227 of them predicted, 40,962 nodes with 327,660 edges, about
    1.6 million edges to the mesh and three of each point back, 16 layers and 512 numbers wide.

    Attributes:
        points, nodes: those of the grid, and of the mesh.
        edges, into, back: edges of the mesh, from grid to mesh, and back.
        layers: steps of messages along the mesh.
    """

    layers: int
    points: int
    nodes: int
    edges: int
    into: int
    back: int
    given: int
    made: int
    d: int
    features: int = 4

    def _mlp(self, before: int, after: int = 0) -> Tree:
        after = after or self.d
        return {
            "in": Array((before, self.d), ("embed", None)),
            "in_bias": Array((self.d,), (None,)),
            "out": Array((self.d, after), ("embed", None)),
            "out_bias": Array((after,), (None,)),
            "scale": Array((after,), (None,)),
            "bias": Array((after,), (None,)),
        }

    def _messages(self) -> Tree:
        return {"edges": self._mlp(3 * self.d), "nodes": self._mlp(2 * self.d)}

    def weights(self) -> Tree:
        return {
            "grid": self._mlp(self.given),
            **{name: self._mlp(self.features) for name in ("nodes", "into", "mesh", "back")},
            "points": self._mlp(self.d),
            "to_mesh": self._messages(),
            "layers": stacked(self.layers, self._messages()),
            "to_grid": self._messages(),
            "out": self._mlp(self.d, self.made),
        }

    def flops(self, batch: int) -> float:
        """Those of the loss: 2 N T, of edges, nodes and points."""
        d = self.d
        of_edges, of_nodes = 4 * d * d, 3 * d * d
        count = self.points * ((self.given + d) * d + 2 * d * d + d * (d + self.made) + of_nodes)
        count += (self.into + self.back) * (of_edges + (self.features + d) * d)
        count += self.edges * (self.layers * of_edges + (self.features + d) * d)
        count += self.nodes * ((self.layers + 1) * of_nodes + (self.features + d) * d)
        return 2.0 * batch * count

    def loss(self, weights: Tree, grid: jax.Array, graphs: Tree, targets: jax.Array, *, layout: Layout) -> jax.Array:
        """`grid` (batch, points, given), `targets` (batch, points, made); `graphs`: see `graphs`."""
        batch = grid.shape[0]

        def embedded(name: str, features: jax.Array) -> jax.Array:
            made = _mlp(weights[name], features.astype(bf16))
            return jnp.broadcast_to(made, (batch, *made.shape))

        @jax.checkpoint
        def passed(state: tuple[jax.Array, ...], weights: Tree, graph: Tree) -> tuple[jax.Array, jax.Array]:
            """Edges and receiving nodes after a step of messages, of `state`: edges, and nodes at both their ends."""
            edges, senders, receivers = state
            ends = [edges, senders[:, graph["from"]], receivers[:, graph["to"]]]
            made = layout(_mlp(weights["edges"], jnp.concatenate(ends, -1)), "batch", "edges", None)
            came = jax.vmap(partial(jax.ops.segment_sum, num_segments=receivers.shape[1]), (0, None))(made, graph["to"])
            found = receivers + _mlp(weights["nodes"], jnp.concatenate([receivers, came], -1))
            return edges + made, layout(found, "batch", "nodes", None)

        points = layout(_mlp(weights["grid"], grid.astype(bf16)), "batch", "points", None)
        edges = {name: embedded(name, graphs[name]["features"]) for name in ("into", "mesh", "back")}
        nodes = passed((edges["into"], points, embedded("nodes", graphs["nodes"])), weights["to_mesh"], graphs["into"])[
            1
        ]
        points = points + _mlp(weights["points"], points)

        def layer(state: tuple[jax.Array, jax.Array], weights: Tree) -> tuple[tuple[jax.Array, jax.Array], None]:
            edges, nodes = state
            return passed((edges, nodes, nodes), weights, graphs["mesh"]), None

        (_, nodes), _ = jax.lax.scan(layer, (edges["mesh"], nodes), weights["layers"])
        points = passed((edges["back"], nodes, points), weights["to_grid"], graphs["back"])[1]
        found = _mlp(weights["out"], points, normed=False)
        return jnp.mean((found.astype(f32) - targets) ** 2)

    def graphs(self) -> Tree:
        """Features of nodes, and of edges with the nodes from which and to which they are."""
        counts = {"mesh": self.edges, "into": self.into, "back": self.back}
        found = {
            name: {
                "features": Array((count, self.features), ("edges", None)),
                "from": Array((count,), ("edges",), i32),
                "to": Array((count,), ("edges",), i32),
            }
            for name, count in counts.items()
        }
        return found | {"nodes": Array((self.nodes, self.features), (None, None))}


def _mlp(weights: Tree, x: jax.Array, normed: bool = True) -> jax.Array:
    """One hidden layer, and a normalization."""
    weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
    x = jax.nn.silu(x @ weights["in"] + weights["in_bias"]) @ weights["out"] + weights["out_bias"]
    return layer_norm(x, weights["scale"], weights["bias"]) if normed else x


def trained_weather(model: Weather, layout: Layout, batch: int) -> Program:
    """A training step of one forecast for each of `batch` states."""
    grid, targets = (
        Array((batch, model.points, width), ("batch", "points", None)) for width in (model.given, model.made)
    )
    loss = partial(model.loss, layout=layout)
    return training(loss, model.weights(), (grid, model.graphs(), targets), model.flops(batch))
