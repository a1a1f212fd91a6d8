"""A training step of a tiny model with experts on four mesh axes, as a cluster of several processes runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models.common import Layout, Program
from models.experts import ByCapacity
from models.llama import Llama, trained

CLUSTER = {"data": 2, "fsdp": 4, "expert": 2, "tensor": 4}
"""The axes of its mesh."""

_RULES = {
    **dict.fromkeys(("heads", "kv_heads", "mlp", "vocabulary"), "tensor"),
    "batch": ("data", "fsdp", "expert"),
    "tokens": ("data", "fsdp"),
    "embed": "fsdp",
    "expert": "expert",
}

_MODEL = Llama(2, 64, 4, 4, 16, 128, 128, experts=4, chosen=2, routing=ByCapacity(1.25))


@dataclass(frozen=True)
class ClusterStep:
    """The step, and how it lies on a mesh."""

    program: Program
    layout: Layout

    @classmethod
    def on(cls, axes: Mapping[str, int]) -> ClusterStep:
        """That on a mesh of these axes over the devices of all processes."""
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
        layout = Layout(mesh, _RULES, constrained=True)
        return cls(trained(_MODEL, layout, batch=16, sequence=16), layout)

    def fingerprint(self) -> str:
        return self.program.partitioned(self.layout).plan(*self.program.arguments).fingerprint()

    def losses(self, steps: int = 3) -> list[float]:
        """The losses of the first steps, of arrays of which each process has its parts."""
        random, specs = np.random.default_rng(0), self.layout.specs(self.program.named)

        def filled(array: jax.ShapeDtypeStruct) -> np.ndarray:
            if np.issubdtype(array.dtype, np.integer):
                return random.integers(0, _MODEL.vocabulary, array.shape).astype(array.dtype)
            return (random.normal(size=array.shape) / 8).astype(array.dtype)

        def placed(spec: P, values: np.ndarray) -> jax.Array:
            sharding = NamedSharding(self.layout.mesh, spec)
            return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

        weights, _, _, tokens, targets = (jax.tree.map(filled, argument) for argument in self.program.arguments)
        moments = jax.tree.map(np.zeros_like, weights)
        values = weights, moments, moments, tokens, targets
        *state, tokens, targets = jax.tree.map(placed, specs, values, is_leaf=lambda spec: isinstance(spec, P))
        run, found = self.program.partitioned(self.layout), []
        for _ in range(steps):
            *state, loss = run(*state, tokens, targets)
            found.append(float(loss))
        return found
