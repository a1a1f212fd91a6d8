"""Failures of callbacks, which must end the program on all devices: those that wait for results would wait for ever.

A callback with results gives one more, whether it failed, with zeros for the others. Each device then raises what was
raised, by a callback of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.annotate.host_calls import host_call

Host = Callable[..., Sequence[Any]]
"""From arrays to a sequence of arrays, on the host."""

_FLAG = np.dtype(np.int32)


class Guarded:
    """A callback that does not raise: its last result says that it failed.

    Under `vmap` it may be called with a leading dimension more than `avals` have, as its results then have. All results
    have one rank: for TPUs jax lowers no others where devices have values of their own (0.10).
    """

    def __init__(self, title: str, callback: Host, avals: Sequence[Any], result_avals: Sequence[Any]):
        self._title, self._callback = title, callback
        self._avals, self._result_avals = tuple(avals), tuple(result_avals)
        rank = max([len(aval.shape) for aval in result_avals])
        shapes = [((1,) * (rank - len(aval.shape)) + aval.shape, aval.dtype) for aval in result_avals]
        self.types = tuple(jax.core.ShapedArray(*each) for each in (*shapes, ((1,) * rank, _FLAG)))
        """Those of its results, the flag last."""
        self._failure: BaseException | None = None

    def __call__(self, *xs: Any) -> tuple[Any, ...]:
        extra = [np.shape(x)[: np.ndim(x) - len(a.shape)] for x, a in zip(xs, self._avals, strict=True)]
        leading = max(extra, key=len, default=())
        try:
            results = [np.asarray(x) for x in jax.tree.leaves(self._callback(*xs))]
            self._check(results, leading)
            results.append(np.zeros(leading, _FLAG))
        except Exception as error:
            self._failure = error
            results = [np.zeros((*leading, *aval.shape), aval.dtype) for aval in self._result_avals]
            results.append(np.ones(leading, _FLAG))
        return tuple(np.reshape(x, (*leading, *type_.shape)) for x, type_ in zip(results, self.types, strict=True))

    def _check(self, results: Sequence[Any], leading: tuple[int, ...]) -> None:
        found = [(x.shape, x.dtype) for x in results]
        wanted = [((*leading, *a.shape), a.dtype) for a in self._result_avals]
        if found != wanted:
            texts = (", ".join(f"{dtype}{list(shape)}" for shape, dtype in types) for types in (found, wanted))
            raise ValueError("the function returned {}, expected {}".format(*texts))

    def raised(self, results: Sequence[jax.Array], flag: jax.Array) -> list[jax.Array]:
        """The results, or on every device the error with which the callback failed."""
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]

        def fail(*xs: jax.Array) -> tuple[jax.Array, ...]:
            call = functools.partial(jax.pure_callback, self._passed_on, types, vmap_method="broadcast_all")
            return tuple(host_call(call, flag, *xs))

        found = lax.cond(jnp.any(flag != 0), fail, lambda *xs: xs, *results)
        return [x.reshape(aval.shape) for x, aval in zip(found, self._result_avals, strict=True)]

    def _passed_on(self, flag: Any, *results: Any) -> Any:
        """The results, where the callback did not fail: under `vmap` both branches of a condition run."""
        if not np.any(flag):
            return results
        failure = self._failure or RuntimeError(f"{self._title} failed on the process that called it")
        raise failure.with_traceback(None)  # else it grows by that of each device
