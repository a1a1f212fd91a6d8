"""Random pipelines compute what scans over their layers do, and so do their derivatives."""

from __future__ import annotations

import jax
import pytest
from pairwise import covering
from random_pipelines import compare, draw, options_of

SEEDS = range(200)
PAIRS = covering({seed: options_of(draw(seed)) for seed in SEEDS})
"""Cases that have each pair of options that any of them has."""

pytestmark = pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")  # batches that `data` does not divide


def check(seed: int) -> None:
    with jax.enable_x64(True):
        compare(draw(seed))


@pytest.mark.dear
@pytest.mark.parametrize("seed", PAIRS)
def test_pipelines_are_scans(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({*SEEDS} - {*PAIRS}))
def test_more_pipelines_are_scans(seed: int) -> None:
    check(seed)
