"""Planning a training step as a whole, from trace to partitioned program, beside XLA's compilation of it by jit."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comparing
import jax
import training
from jax.sharding import NamedSharding
from workloads import MESHES

import sdy_jax as sdy

HOW: Mapping[str, str] = {"8": "fsdp", "2x4": "megatron+fsdp", "2x2x2": "megatron+fsdp"}
"""Per mesh of `comparing`, the layout of `training` that is planned on it."""

ALLOWED = {1: 1.0, 2: 1.0, 3: 4.0}
"""Per number of mesh axes, how much longer than XLA's compilation planning may take."""

MOST_GROWTH = 1.5
"""How much longer a further layer may take among many than among few, and a program for many devices than for few."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Row:
    """The seconds that one training step takes on a mesh: to be planned, and to be compiled."""

    mesh: str
    layers: int
    planned: float
    compiled: float

    @property
    def ratio(self) -> float:
        return self.planned / self.compiled

    @property
    def allowed(self) -> float:
        return ALLOWED[len(MESHES[self.mesh][0])]

    def __str__(self) -> str:
        return f"{self.mesh:>8}{self.layers:8d}{self.planned:12.2f}{self.compiled:12.2f}{self.ratio:8.2f}"


HEAD = f"{'mesh':>8}{'layers':>8}{'planned':>12}{'compiled':>12}{'ratio':>8}"


def measured(mesh_name: str, layers: int, clock: Clock, forget: Callable[[], None]) -> Row:
    """A GPT-like step with AdamW of so many unrolled layers; `forget` empties all caches."""
    workload = training.workload(training.gpt(layers=layers), HOW[mesh_name])
    mesh = comparing.mesh_of(mesh_name)
    shardings, step = workload.shardings(mesh_name), workload.step(mesh, mesh_name)
    by_plan = sdy.partition(step, mesh=mesh, in_shardings=shardings[0], out_shardings=shardings[1], layouts="global")
    named = [jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree) for tree in shardings]
    forget()
    planned = _timed(clock, lambda: by_plan.plan(*workload.arguments))
    lowered = jax.jit(step, in_shardings=named[0], out_shardings=named[1]).lower(*workload.arguments)
    return Row(mesh_name, layers, planned, _timed(clock, lowered.compile))


def _timed(clock: Clock, run: Callable[[], Any]) -> float:
    gc.collect()
    start = clock()
    run()
    return clock() - start


def missed(rows: Sequence[Row]) -> Iterator[str]:
    """The goals that are not met: no longer than XLA, and linear in the number of layers."""
    for row in rows:
        if row.ratio > row.allowed:
            yield f"{row.mesh}, {row.layers} layers: {row.ratio:.2f} of XLA's time; at most {row.allowed:.0f}"
    for mesh, found in itertools.groupby(rows, lambda row: row.mesh):
        growth = growth_of({row.layers: row.planned for row in found})
        if growth > MOST_GROWTH:
            yield f"{mesh}: a layer takes {growth:.2f} times as long among many as among few; at most {MOST_GROWTH}"


def growth_of(seconds: Mapping[int, float]) -> float:
    """How much longer each further layer takes between the two largest numbers of layers than between those before;
    1 where there are fewer than three."""
    ordered = sorted(seconds.items())[-3:]
    if len(ordered) < 3:
        return 1.0
    before, after = ((t - s) / (m - n) for (n, s), (m, t) in itertools.pairwise(ordered))
    return after / before
