"""What of a function's arguments its results depend on: jit drops the others before a call is dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr  # type: ignore[attr-defined, unused-ignore]  # Jaxpr in jax 0.12
from jax.interpreters.partial_eval import dce_jaxpr


@dataclass(frozen=True, slots=True)
class LiveFunction:
    """A traced function of the arguments that it uses.

    Attributes:
        used: per argument of the function that was traced, whether it is one of them.
        jaxpr: the function of those that are, without dead code.
    """

    used: tuple[bool, ...]
    jaxpr: ClosedJaxpr

    @classmethod
    def of(cls, jaxpr: ClosedJaxpr, needed: Sequence[bool]) -> LiveFunction:
        """`needed` arguments stay, whether they are used or not."""
        if all(needed):
            return cls(tuple(needed), jaxpr)
        live, used = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=list(needed))
        return cls(tuple(used), ClosedJaxpr(live, jaxpr.consts))
