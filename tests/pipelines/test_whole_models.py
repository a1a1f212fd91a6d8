"""A whole model in a pipeline: embeddings, layers, a head with losses by labels, an optimizer."""

from __future__ import annotations

import numpy as np
import pipeline as example
import pytest
from train_lm import Config, parse_mesh

CONFIG = Config(layers=3, d_model=16, heads=2, sequence=8, batch=8)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return example.losses(CONFIG, parse_mesh("stage=1"), "gpipe", 3)


@pytest.mark.more("the example, twenty steps on each mesh")
@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")  # layers that stages do not divide
@pytest.mark.dear(cases=1)
@pytest.mark.parametrize(
    "mesh, schedule",
    [("stage=4,data=2", "1f1b"), ("stage=2,model=2", "zero_bubble"), ("stage=2,data=2", "interleaved")],
)
def test_meshes_have_equal_losses(mesh: str, schedule: str, alone: list[float]) -> None:
    """A reducer in a manual region holds ops that only state shardings: erased, they may not be asked for again."""
    np.testing.assert_allclose(example.losses(CONFIG, parse_mesh(mesh), schedule, 3), alone, rtol=1e-5)
