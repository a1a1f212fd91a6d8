"""What the documentation shows is what happens: the examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from places import ROOT

import sdy_jax as sdy


def modules_with_examples() -> list[str]:
    found = []
    for folder, _, files in os.walk(ROOT / "sdy_jax", followlinks=True):
        for path in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            if ">>> " in path.read_text():
                found.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return sorted(found)


def names(mesh: jax.sharding.Mesh) -> dict[str, object]:
    """What examples may use besides their module's own names."""
    return {"jax": jax, "jnp": jnp, "np": np, "P": P, "sdy": sdy, "mesh": mesh}


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_do_what_they_show(name: str, mesh: jax.sharding.Mesh) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=names(mesh)):
        runner.run(test, out=said.append)
    assert not said, "".join(said)
