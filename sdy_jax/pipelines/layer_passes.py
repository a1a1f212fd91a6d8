"""What runs of one layer: its forward pass, its backward pass, and the latter in two parts.

Between the passes is kept what depends on the activations. What the backward pass needs of weights and the like alone,
a weight in another precision or a dropout mask, is computed again: kept, it would be there once per microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from sdy_jax.pipelines.jaxprs import Cut, dependent, evaluate, inlined, needed, types_of
from sdy_jax.pipelines.region import Region

Leaves = list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What a layer reads beside the activations, as flat lists; or the cotangents of these, where they have any."""

    constants: Leaves
    weights: Leaves
    extra: Leaves
    key: Leaves

    @property
    def leaves(self) -> Leaves:
        return [*self.constants, *self.weights, *self.extra, *self.key]

    def like(self, leaves: Sequence[Any]) -> Inputs:
        """As many other leaves in each list."""
        rest = iter(leaves)
        lists = (self.constants, self.weights, self.extra, self.key)
        return Inputs(*([next(rest) for _ in each] for each in lists))

    def inexact(self) -> Inputs:
        """Those that have derivatives."""
        return Inputs(
            *(list(filter(is_inexact, each)) for each in (self.constants, self.weights, self.extra, self.key))
        )


def is_inexact(x: Any) -> bool:
    """Whether an array, or a type, has derivatives."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def inexact(leaves: Leaves) -> Leaves:
    """Those that have derivatives."""
    return list(filter(is_inexact, leaves))


def _outside(method: Callable[..., Any]) -> Callable[..., Any]:
    """A pass by the types that arrays have outside of the region."""

    @wraps(method)
    def run(self: LayerPasses, *args: Any) -> Any:
        return self._region.outside(partial(method, self), *args)

    return run


class LayerPasses:
    """The passes of a layer, traced once.

    Args:
        region: where they run.
        layer: from the leaves of the activations and of its other inputs to activations and, after these, auxiliary
            results.
        x, inputs: their types.
        turned: how many of the results the backward pass takes cotangents of; of all unless given.
    """

    def __init__(
        self,
        region: Region,
        layer: Callable[..., Sequence[Any]],
        x: Leaves,
        inputs: Inputs,
        turned: int | None = None,
    ):
        self._region, self._layer, self._width, self._only = region, layer, len(x), turned
        region.outside(self._trace, x, inputs)

    def _trace(self, x: Leaves, inputs: Inputs) -> None:
        layer, turned = self._layer, self._only
        self._is_inexact = [is_inexact(each) for each in (*x, *inputs.leaves)]
        self.outs = list(types_of(layer, *x, *inputs.leaves))
        self._is_turned = [is_inexact(each) and (turned is None or n < turned) for n, each in enumerate(self.outs)]
        self._forward = inlined(self._with_residuals, [*x, *inputs.leaves])
        self._choose_kept()
        cotangents = self.turned(self.outs)
        residuals = [v.aval for v in (*self._kept, *self._remade)]
        backward = inlined(self._pulled, [*residuals, *cotangents], checkpoints=True)
        self._backward = Cut(backward, sum(map(is_inexact, x)))
        self._types = inputs.inexact()

    def _with_residuals(self, *leaves: Any) -> Leaves:
        """Results, and what their backward pass reads."""

        def of(inexact: Leaves) -> tuple[Leaves, Leaves]:
            rest = iter(inexact)
            outs = self._layer(*(next(rest) if each else x for x, each in zip(leaves, self._is_inexact, strict=True)))
            return self.turned(outs), [x for x, each in zip(outs, self._is_turned, strict=True) if not each]

        inexact = [x for x, each in zip(leaves, self._is_inexact, strict=True) if each]
        first, pull, others = jax.vjp(of, inexact, has_aux=True)
        residuals, self._pull = jax.tree.flatten(pull)
        ordered = {True: iter(first), False: iter(others)}
        return [*(next(ordered[each]) for each in self._is_turned), *residuals]

    def turned(self, outs: Sequence[Any]) -> Leaves:
        """The results that the backward pass takes cotangents of."""
        return [x for x, each in zip(outs, self._is_turned, strict=True) if each]

    def _choose_kept(self) -> None:
        jaxpr = self._forward.jaxpr
        self._residuals = list(jaxpr.outvars[len(self.outs) :])
        variables = dict.fromkeys(v for v in self._residuals if not isinstance(v, Literal))
        varying = dependent(jaxpr.eqns, jaxpr.invars[: self._width])
        self._kept = [v for v in variables if v in varying]
        self._remade = [v for v in variables if v not in varying]
        self._remaking = needed([eqn for eqn in jaxpr.eqns if not eqn.effects], self._remade)

    def _pulled(self, *leaves: Any) -> Leaves:
        """Cotangents of `x`, then of the other inputs, from what was kept, what was made again, and cotangents."""
        count = len(self._kept) + len(self._remade)
        env = dict(zip((*self._kept, *self._remade), leaves, strict=False))
        values = [v.val if isinstance(v, Literal) else env[v] for v in self._residuals]
        (found,) = jax.tree.unflatten(self._pull, values)(list(leaves[count:]))
        return list(found)

    @_outside
    def forward(self, x: Leaves, inputs: Inputs) -> tuple[Leaves, Leaves]:
        """The results, and what is kept."""
        env = self._env((*x, *inputs.leaves))
        jaxpr, count = self._forward.jaxpr, len(self.outs)
        values = evaluate(jaxpr, jaxpr.eqns, env, [*jaxpr.outvars[:count], *self._kept])
        return values[:count], values[count:]

    def _env(self, leaves: Sequence[Any]) -> dict[Any, Any]:
        return self._forward.known(leaves)

    def _remake(self, inputs: Inputs) -> Leaves:
        env = self._env([None] * self._width + inputs.leaves)
        return evaluate(self._forward.jaxpr, self._remaking, env, self._remade)

    @_outside
    def backward(self, inputs: Inputs, kept: Leaves, cotangents: Leaves) -> tuple[Leaves, Inputs]:
        """The cotangents of the activations and of the other inputs, as far as they have any."""
        x, crossing = self._backward.first([*kept, *self._remake(inputs), *cotangents])
        return x, self._types.like(self._backward.second(crossing))

    @_outside
    def backward_alone(self, inputs: Inputs, kept: Leaves, cotangents: Leaves) -> tuple[Leaves, Leaves]:
        """The cotangents of the activations, and what those of the other inputs are made from."""
        x, crossing = self._backward.first([*kept, *self._remake(inputs), *cotangents])
        return x, [crossing[v] for v in self._deferred]

    @_outside
    def weights(self, inputs: Inputs, deferred: Leaves) -> Inputs:
        """The cotangents of the other inputs."""
        remade = dict(zip(self._backward.inputs[len(self._kept) :], self._remake(inputs), strict=False))
        crossing = {v: remade[v] for v in self._backward.crossing if v in remade}
        return self._types.like(self._backward.second(crossing | dict(zip(self._deferred, deferred, strict=True))))

    @property
    def kept(self) -> Leaves:
        """The types of what a forward pass keeps."""
        return [v.aval for v in self._kept]

    @property
    def deferred(self) -> Leaves:
        """The types of what a backward pass alone makes for gradients of weights."""
        return [v.aval for v in self._deferred]

    @property
    def _deferred(self) -> list[Any]:
        first, count = len(self._kept), len(self._remade)
        remade = set(self._backward.inputs[first : first + count])
        return [v for v in self._backward.crossing if v not in remade]
