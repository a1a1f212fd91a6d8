"""Functions in files of their own, which tests plan before and after an edit of the text."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import sdy_jax as sdy

MLP = """
import jax, jax.numpy as jnp
import sdy_jax as sdy
from jax.sharding import PartitionSpec as P


def layer(x, w, name):
    with jax.named_scope(name):
        hidden = x @ w["up"]
        hidden = jnp.tanh(hidden)
        return x + hidden @ w["down"]


def step(params, x):
    x = layer(x, params["first"], "first")
    x = layer(x, params["second"], "second")
    return x


SPECS = {"up": P(None, "model"), "down": P("model")}
IN_SHARDINGS = ({"first": SPECS, "second": SPECS, "out": SPECS}, P("data"))
"""

_numbers = count()


def planned(text: str, folder: Path, mesh: Mapping[str, int] | None = None, **options: Any) -> sdy.Plan:
    """The plan of the text's `step(params, x)` with its `IN_SHARDINGS`, for weights of 16 by 32 by default; the file
    is always called `model.py`."""
    home = folder / str(next(_numbers))
    home.mkdir()
    path = home / "model.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = mesh or {"data": 2, "model": 4}
    axes = (jax.sharding.AxisType.Auto,) * len(sizes)
    devices = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axes)
    ours = sdy.partition(module.step, mesh=devices, in_shardings=module.IN_SHARDINGS, **options)
    return ours.plan(*getattr(module, "arguments", _arguments)())


def _arguments() -> tuple[Any, jax.Array]:
    weights = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
    return {"first": weights, "second": weights, "out": weights}, jnp.ones((8, 16))
