"""Planning a training step as a whole, from trace to partitioned program, beside XLA's compilation of it by jit.

    scripts/planning_time.py MESH LAYERS CLOCK MOST

As a script it prints the seconds that XLA takes, by a clock of `time`, and `inf` once it has taken `MOST`.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comparing

# isort: split
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


@dataclass(frozen=True, slots=True)
class Row:
    """The seconds that one training step takes on a mesh: to be planned, and to be compiled; `is_compiled`: that it has
    not been compiled after so many."""

    mesh: str
    layers: int
    planned: float
    compiled: float
    is_compiled: bool = True

    @property
    def ratio(self) -> float:
        return self.planned / self.compiled

    @property
    def allowed(self) -> float:
        return ALLOWED[len(MESHES[self.mesh][0])]

    def __str__(self) -> str:
        more, less = ("", "") if self.is_compiled else (">", "<")
        compiled, ratio = f"{more}{self.compiled:.2f}", f"{less}{self.ratio:.2f}"
        return f"{self.mesh:>8}{self.layers:8d}{self.planned:12.2f}{compiled:>12}{ratio:>8}"


HEAD = f"{'mesh':>8}{'layers':>8}{'planned':>12}{'compiled':>12}{'ratio':>8}"


def measured(
    meshes: Sequence[str], layers: Sequence[int], clock: str, most: float, forget: Callable[[], None]
) -> Iterator[Row]:
    """A GPT-like step with AdamW of so many unrolled layers.

    Args:
        meshes, layers: which rows; fewer layers first.
        clock: a function of `time`.
        most: the seconds after which XLA is stopped. With more layers it is not started again.
        forget: empties all caches.
    """
    for mesh in meshes:
        compiled = 0.0
        for count in layers:
            planned = planning(mesh, count, clock, forget)
            compiled = compiling_apart(mesh, count, clock, most) if compiled < math.inf else math.inf
            yield Row(mesh, count, planned, min(compiled, most), compiled < math.inf)


def planning(mesh_name: str, layers: int, clock: str, forget: Callable[[], None]) -> float:
    """The seconds from the function to the partitioned program."""
    workload = training.workload(training.gpt(layers=layers), HOW[mesh_name])
    mesh = comparing.mesh_of(mesh_name)
    shardings, step = workload.shardings(mesh_name), workload.step(mesh, mesh_name)
    by_plan = sdy.partition(step, mesh=mesh, in_shardings=shardings[0], out_shardings=shardings[1], layouts="global")
    forget()
    return _timed(clock, lambda: by_plan.plan(*workload.arguments))


def compiling(mesh_name: str, layers: int, clock: str) -> float:
    """The seconds that XLA takes."""
    workload = training.workload(training.gpt(layers=layers), HOW[mesh_name])
    mesh = comparing.mesh_of(mesh_name)
    named = [jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree) for tree in workload.shardings(mesh_name)]
    step = jax.jit(workload.step(mesh, mesh_name), in_shardings=named[0], out_shardings=named[1])
    return _timed(clock, step.lower(*workload.arguments).compile)


def compiling_apart(mesh_name: str, layers: int, clock: str, most: float) -> float:
    """As `compiling`, in a process that is stopped after so many seconds; then infinity."""
    command = [sys.executable, __file__, mesh_name, str(layers), clock, str(most)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _stop_after(most: float, clock: str) -> None:
    """Ends this process when it has taken so many further seconds. Nothing interrupts XLA."""
    start = getattr(time, clock)()

    def watch() -> None:
        while getattr(time, clock)() - start < most:
            time.sleep(0.1)
        print(math.inf, flush=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _timed(clock: str, run: Callable[[], Any]) -> float:
    gc.collect()
    start = getattr(time, clock)()
    run()
    return float(getattr(time, clock)() - start)


def missed(rows: Sequence[Row]) -> Iterator[str]:
    """The goals that are not met: no longer than XLA, and linear in the number of layers."""
    for row in rows:
        if row.ratio > row.allowed:
            given = "" if row.is_compiled else f" when that was stopped after {row.compiled:.0f} s"
            yield f"{row.mesh}, {row.layers} layers: {row.ratio:.2f} of XLA's time{given}; at most {row.allowed:.0f}"
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


if __name__ == "__main__":
    mesh_name, layers, clock, most = sys.argv[1:]
    _stop_after(float(most), clock)
    print(compiling(mesh_name, int(layers), clock), flush=True)
