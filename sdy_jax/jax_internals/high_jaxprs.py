"""Primitives of which jax makes others before it lowers a function, where ours hold some of them.

* `is_high`, `to_lojax`: whether a primitive has such in a jaxpr among its parameters, and what stands for it then; jax
  0.12 has some that users know (`jnp.searchsorted`).
* `lower_jaxpr2`: a jaxpr without them.
"""

from __future__ import annotations

from typing import Any

from jax._src.interpreters import partial_eval
from jax.extend.core import Primitive


def keeps_region(primitive: Primitive, name: str) -> None:
    """Lets a primitive be itself, with a lower jaxpr in its parameter `name`."""

    def lower(*operands: Any, **parameters: Any) -> Any:
        region = partial_eval.lower_jaxpr2(parameters[name])
        return primitive.bind(*operands, **{**parameters, name: region})

    vars(primitive)["to_lojax"] = lower
