"""Plans as for machines that are not at hand, to be run on virtual CPU devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

import sdy_jax as sdy
from sdy_jax.calls.options import Options
from sdy_jax.lowering.targets.family import Arrays
from sdy_jax.lowering.targets.target import Target, machines

DEVICES = ("tpu v5e", "h100")
"""Machines."""

_SMALLER = 1e-3
"""What is waited beside sending, over the machine's: arrays of tests are that much smaller than users'."""


@contextmanager
def planned_for(machine: str) -> Iterator[None]:
    """Inside, plans suit the compiler for a machine: the order of ops, what fuses, which collectives are combined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Options, "target", lambda self, mesh: Target.of(mesh, machine))
        yield


def plan_for_order(patch: pytest.MonkeyPatch, arrays: Arrays | None = None, **order: bool) -> None:
    """Plans are for compilers that run ops in another order, and round arrays otherwise."""
    made = Options.target
    patch.setattr(Options, "target", lambda self, mesh: reordered(made(self, mesh), arrays, **order))


def reordered(target: Target, arrays: Arrays | None = None, **order: bool) -> Target:
    """A target whose compiler runs ops in another order."""
    compiler = replace(target.compiler, order=replace(target.compiler.order, **order))
    return replace(target, family=replace(target.family, compiler=compiler, arrays=arrays or target.arrays))


def small_costs(machine: str, axes: Sequence[str]) -> sdy.CostModel:
    """The model of a machine, for small arrays: else little but the number of collectives would count."""
    costs = sdy.CostModel.of_machine(machine, axes)
    return replace(
        costs,
        latency=dict.fromkeys(axes, _SMALLER * machines()[machine].links.latency),
        start=_SMALLER * machines()[machine].links.start,
        launch=_SMALLER * costs.launch,
        product_launch=_SMALLER * costs.product_launch,
    )
