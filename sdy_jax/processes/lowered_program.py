"""A lowered program that all processes compare when it is compiled, so that one may look at its text alone."""

from __future__ import annotations

from typing import Any

import jax

from sdy_jax.processes.comparison_primitive import Check


class ComparedLowered(jax.stages.Lowered):
    """`jax.stages.Lowered`, whose `compile` first runs a check."""

    __slots__ = ("_check",)

    _check: Check

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, check: Check) -> ComparedLowered:
        new = cls.__new__(cls)
        for name in jax.stages.Lowered.__slots__:
            setattr(new, name, getattr(lowered, name))
        new._check = check
        return new

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """As jax's, for all processes at once."""
        self._check()
        return super().compile(*args, **kwargs)
