"""Random pipelines compute what scans over their layers do, and so do their derivatives."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from machine_models import DEVICES, planned_for
from pairwise import covering, pairs_of
from random_pipelines import compare, cost_of, draw, options_of

SEEDS = range(1000)
COVERING = (0, 6, 12, 25, 34, 40, 75, 140, 156, 175, 182, 199, 232, 235, 297, 402, 412, 413, 420, 430, 472, 551, 580)
COVERING += (609, 614, 641, 681, 689, 708, 756, 772, 807, 947)
"""Seeds of cases that have each pair of options that any of them has; the first test says others where these do not."""

pytestmark = pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")  # batches that `data` does not divide


def check(seed: int) -> None:
    with jax.enable_x64(True):
        compare(draw(seed))


@pytest.mark.dear(cases=8)
@pytest.mark.parametrize("seed", COVERING)
def test_pipelines_are_scans(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("machine", DEVICES)
@pytest.mark.parametrize("seed", [5, 7])
def test_pipelines_planned_by_time_are_scans(seed: int, machine: str) -> None:
    case = replace(draw(seed), machine=machine)
    assert case.is_partitioned
    with jax.enable_x64(True), planned_for(machine):
        compare(case)


def test_each_two_options_meet_in_a_case() -> None:
    cases = {seed: draw(seed) for seed in SEEDS}
    options = {seed: options_of(case) for seed, case in cases.items()}
    if pairs_of(options.values()) - pairs_of(map(options.__getitem__, COVERING)):
        pytest.fail(f"these do: COVERING = {covering(options, lambda seed: cost_of(cases[seed]) ** 0.5)}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({*range(200)} - {*COVERING}))
def test_more_pipelines_are_scans(seed: int) -> None:
    check(seed)
