"""Plans as for machines that are not at hand, to be run on virtual CPU devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

import sdy_jax as sdy
from sdy_jax.calls import options
from sdy_jax.lowering.reshard.machines import MACHINES

DEVICES = {"tpu v5e": ("tpu", "TPU v5 lite"), "h100": ("gpu", "NVIDIA H100 80GB HBM3")}
"""By machine: the platform, and what its devices call themselves."""

_SMALLER = 1e-3
"""What is waited beside sending, over the machine's: arrays of tests are that much smaller than users'."""


@contextmanager
def planned_for(machine: str) -> Iterator[None]:
    """Inside, plans suit the compiler for a machine: the order of ops, what fuses, which collectives are combined."""
    platform, kind = DEVICES[machine]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "platform_of", lambda mesh: platform)
        patch.setattr(options, "device_kind", lambda mesh: kind)
        yield


def small_costs(machine: str, axes: Sequence[str]) -> sdy.CostModel:
    """The model of a machine, for small arrays: else little but the number of collectives would count."""
    costs = sdy.CostModel.of_machine(machine, axes)
    return replace(
        costs,
        latency=dict.fromkeys(axes, _SMALLER * MACHINES[machine].latency),
        start=_SMALLER * MACHINES[machine].start,
        launch=_SMALLER * costs.launch,
        product_launch=_SMALLER * costs.product_launch,
    )
