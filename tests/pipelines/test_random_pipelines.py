"""Random pipelines compute what scans over their layers do, and so do their derivatives."""

from __future__ import annotations

import jax
import pytest
from random_pipelines import compare, draw


@pytest.mark.dear
@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")  # batches that `data` does not divide
@pytest.mark.parametrize("seed", range(200))
def test_pipelines_are_scans(seed: int) -> None:
    with jax.enable_x64(True):
        compare(draw(seed))
