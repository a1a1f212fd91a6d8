"""Mistakes that users make, over the whole public face: the code, and what the message has to say of it.

A message names the argument, the line or the place in a module, and says what would be right. Each table of this
package is about a part of the face; `tests/house/test_mistakes.py` makes them all, and grades what is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
        make: makes it.
        names: what the message names: the argument, the line, the place.
        right: what it says would be right.
        kind: the exception; or the warning, where it is none.
    """

    make: Callable[[], Any]
    names: str
    right: str
    kind: type[BaseException] = sdy.SdyError


OURS = str(Path(sdy.__file__).parent)
"""The folder whose frames are ours."""

INTERNALS = re.compile(rf"Tracer\b|ArrayImpl|jax\._src|{re.escape(OURS)}|site-packages|this is a bug")
"""What no message of ours has in it."""


def grade(said: str, names: str, right: str, frames: int = 0, is_ours: bool = True) -> str:
    """The grade of what is said of a mistake, by the rule "names the argument or the line, says what would be right,
    one frame".

    A keeps it, and shows the user's frames alone. B shows one frame of ours, or is in the words of jax or Python, which
    say the same of `jax.jit`. C says not what would be right, or shows more frames, or what is inside of us. D names
    nothing that the user wrote.

    Args:
        said: the message.
        names: what it is to name.
        right: what it is to say would be right.
        frames: of ours that are shown.
        is_ours: whether the message is ours.
    """
    if names not in said:
        return "D"
    if right not in said or frames > 1 or (is_ours and INTERNALS.search(said)):
        return "C"
    return "A" if is_ours and not frames else "B"


MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
FOUR = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
X = jnp.ones((8, 8))
PARAMS = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
SPECS = {"up": P(None, "model"), "down": P("model")}


def mlp(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    """A function to make mistakes with."""
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def partitioned(fun: Callable[..., Any] = mlp, **options: Any) -> Any:
    """The function on the mesh."""
    return sdy.partition(fun, **({"mesh": MESH} | options))


def planned(fun: Callable[..., Any] = mlp, *args: Any, **options: Any) -> Any:
    """Its plan, for its own arguments if none are given."""
    given = args or ((X, PARAMS) if fun is mlp else (X,))
    return partitioned(fun, **options).plan(*given)
