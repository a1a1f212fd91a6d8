"""Traced functions in parts, and what runs of one layer: its forward pass and its backward pass, or two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from sdy_jax.pipelines.region import Region

# Traced functions in parts: calls inlined, what depends on some inputs, what some results need.

Env = dict[Any, Any]
"""The values of variables."""

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
"""Primitives that call a function, and the parameter that holds it."""
_CHECKPOINTS = {"checkpoint": "jaxpr", "remat2": "jaxpr"}


class FlatFunction:
    """A function of flat arrays as equations.

    Attributes:
        jaxpr: its jaxpr.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any]):
        self.jaxpr, self.consts = jaxpr, consts

    def known(self, inputs: Sequence[Any]) -> Env:
        """The values of what the equations read."""
        return dict(zip((*self.jaxpr.constvars, *self.jaxpr.invars), (*self.consts, *inputs), strict=True))


def types_of(fun: Callable[..., Any], *types: Any) -> Any:
    """The types of a function's results as a tree; what `jax.eval_shape` says of them is less where axes of the mesh
    are of several kinds."""
    closed, made = jax.make_jaxpr(fun, return_shape=True)(*types)
    return jax.tree.unflatten(jax.tree.structure(made), closed.out_avals)


def inlined(fun: Callable[..., Any], types: Sequence[Any], checkpoints: bool = False) -> FlatFunction:
    """A function of flat arrays without the calls in it; if told so, without those to `jax.checkpoint`.

    Calls that state shardings are left as they are. What is cast to a wider type and back is what it was.
    """
    names = _CALLS | (_CHECKPOINTS if checkpoints else {})
    closed = jax.make_jaxpr(fun)(*types)
    traced = FlatFunction(closed.jaxpr, closed.consts)
    if all(_callee(eqn, names) is None for eqn in traced.jaxpr.eqns):
        return FlatFunction(traced.jaxpr.replace(**_without_casts_and_back(traced.jaxpr)), traced.consts)
    return inlined(lambda *xs: _expanded(traced.jaxpr, traced.known(xs), names), types, checkpoints)


def called(eqn: Any) -> Any:
    """The jaxpr that an equation calls, `jax.checkpoint`'s too; None where it calls none."""
    callee = _callee(eqn, _CALLS | _CHECKPOINTS)
    return getattr(callee, "jaxpr", callee)


def _callee(eqn: Any, names: dict[str, str]) -> Any:
    """The function that an equation calls, if it is to be inlined."""
    name = names.get(eqn.primitive.name)
    stated = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if name is None or any(isinstance(each, jax.sharding.Sharding) for each in stated):
        return None
    return eqn.params[name]


def _expanded(jaxpr: Any, env: Env, names: dict[str, str]) -> list[Any]:
    """A jaxpr's results, with the equations of functions that it calls in place of the calls."""
    for run in _runs(jaxpr.eqns, names):
        callee = _callee(run[0], names)
        if callee is None:
            made = [v for eqn in run for v in eqn.outvars]
            outs = evaluate(jaxpr, run, env, made)
        else:
            made, inner = run[0].outvars, getattr(callee, "jaxpr", callee)
            outs = jax.core.eval_jaxpr(inner, getattr(callee, "consts", ()), *(_value(env, v) for v in run[0].invars))
        env.update(zip(made, outs, strict=True))
    return [_value(env, v) for v in jaxpr.outvars]


def _without_casts_and_back(jaxpr: Any) -> dict[str, Any]:
    """The equations and results without casts of what was cast to a wider type from the type that it is cast to: a sum
    over devices that waits can be cast to a wider type, but not to a narrower one."""
    before, same, eqns = dict[Any, Any](), dict[Any, Any](), []

    def known(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=list(map(known, eqn.invars)))
        if eqn.primitive.name == "convert_element_type" and not isinstance(eqn.invars[0], Literal):
            (source,), (made,) = eqn.invars, eqn.outvars
            first = before.get(source, source)
            if first is not source and made.aval == first.aval and _is_exact(first.aval.dtype, source.aval.dtype):
                same[made] = first
                continue
            before[made] = source
        eqns.append(eqn)
    return {"eqns": eqns, "outvars": list(map(known, jaxpr.outvars))}


def _is_exact(narrow: Any, wide: Any) -> bool:
    """Whether a type has all numbers of another one."""
    if not all(jnp.issubdtype(each, jnp.floating) for each in (narrow, wide)):
        return False
    less, more = jnp.finfo(narrow), jnp.finfo(wide)
    return bool(less.nmant <= more.nmant and less.maxexp <= more.maxexp and less.minexp >= more.minexp)


def _runs(eqns: Sequence[Any], names: dict[str, str]) -> Iterator[list[Any]]:
    """Equations in order: calls alone, those between them together."""
    run: list[Any] = []
    for eqn in eqns:
        if _callee(eqn, names) is None:
            run.append(eqn)
            continue
        yield from [run] * bool(run)
        yield [eqn]
        run = []
    yield from [run] * bool(run)


def _value(env: Env, atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def evaluate(jaxpr: Any, eqns: Sequence[Any], env: Env, wanted: Sequence[Any]) -> list[Any]:
    """The values of variables after some of a jaxpr's equations."""
    read = [v for v in _reads(eqns, wanted) if v in env]
    debug = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(constvars=[], invars=read, eqns=list(eqns), outvars=list(wanted), debug_info=debug)
    return list(jax.core.eval_jaxpr(part, [], *(env[v] for v in read)))


def _reads(eqns: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """The variables that equations, and what is wanted, read; each once."""
    atoms = (*(v for eqn in eqns for v in eqn.invars), *wanted)
    return list(dict.fromkeys(v for v in atoms if not isinstance(v, Literal)))


def needed(eqns: Sequence[Any], wanted: Iterable[Any]) -> list[Any]:
    """The equations that make what is wanted, and those with effects."""
    alive, found = {v for v in wanted if not isinstance(v, Literal)}, []
    for eqn in reversed(eqns):
        if eqn.effects or not alive.isdisjoint(eqn.outvars):
            alive.update(v for v in eqn.invars if not isinstance(v, Literal))
            found.append(eqn)
    return found[::-1]


def dependent(eqns: Sequence[Any], inputs: Iterable[Any]) -> set[Any]:
    """Some inputs, and the variables whose values depend on them."""
    found = set(inputs)
    for eqn in eqns:
        if any(not isinstance(v, Literal) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def _size(v: Any) -> int:
    return int(v.aval.size * v.aval.dtype.itemsize)


def _is_light(eqn: Any) -> bool:
    """Whether an equation computes element by element; those that contract, or move, name their dimensions."""
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars) if v.aval.shape}
    return len(shapes) == 1 and "dimension_numbers" not in eqn.params and not eqn.effects


class CutFunction:
    """A traced function cut in two: what its first results need, and the rest, which reads what that has made.

    Attributes:
        inputs: its input variables.
        crossing: the variables that the second part reads of the first one, or of the inputs.
    """

    def __init__(self, traced: FlatFunction, firsts: int):
        jaxpr = traced.jaxpr
        self._traced, self.inputs = traced, list(jaxpr.invars)
        self._firsts, self._rest = list(jaxpr.outvars[:firsts]), list(jaxpr.outvars[firsts:])
        self._before = needed(jaxpr.eqns, self._firsts)
        done = set(map(id, self._before))
        self._after = needed([eqn for eqn in jaxpr.eqns if id(eqn) not in done], self._rest)
        self._advance()
        self.crossing = self._crossing()

    def _crossing(self) -> list[Any]:
        made = {v for eqn in self._after for v in eqn.outvars}
        return [v for v in _reads(self._after, self._rest) if v not in made]

    def _advance(self) -> None:
        """Moves equations to the first part by which less crosses: a product of two arrays that nothing else reads."""
        for eqn in list(self._after):
            others = [each for each in self._after if each is not eqn]
            crossing = set(self._crossing())
            read = [v for v in eqn.invars if not isinstance(v, Literal)]
            freed = {v for v in read if v not in _reads(others, self._rest)}
            if _is_light(eqn) and crossing.issuperset(read) and sum(map(_size, freed)) > sum(map(_size, eqn.outvars)):
                self._before, self._after = [*self._before, eqn], others

    def first(self, inputs: Sequence[Any]) -> tuple[list[Any], Env]:
        """The first results, and the values of all crossing variables."""
        wanted = [*self._firsts, *self.crossing]
        values = evaluate(self._traced.jaxpr, self._before, self._traced.known(inputs), wanted)
        count = len(self._firsts)
        return values[:count], dict(zip(self.crossing, values[count:], strict=True))

    def second(self, crossing: Env) -> list[Any]:
        """The other results."""
        return evaluate(self._traced.jaxpr, self._after, crossing, self._rest)


# What runs of one layer: its forward pass, its backward pass, and the latter in two parts.
#
# Between the passes is kept what depends on the activations. What the backward pass needs of weights and the like
# alone, a weight in another precision or a dropout mask, is computed again: kept, it would be there once per
# microbatch.

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
        self._backward = CutFunction(backward, sum(map(is_inexact, x)))
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
