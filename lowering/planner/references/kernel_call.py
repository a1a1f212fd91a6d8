"""`partition_like`: calls of a kernel that is split as its reference is, and custom ops for its passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import function_name
from sdy_jax.annotate.custom_ops import FoundRule, as_one_op
from sdy_jax.annotate.jaxprs import all_equations
from sdy_jax.annotate.primitives import with_own_widths
from sdy_jax.base.errors import SdyError, with_article
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.ir.custom_ops import CustomOp
from sdy_jax.lowering.planner.references.derived_rule import DerivedRule, check_results, derived_rule, said, whole_rule
from sdy_jax.lowering.planner.references.factors import Types
from sdy_jax.lowering.planner.references.reference import Flat, backward_of, side_by_side, smooth

# Calls of a kernel with a reference: the custom ops that stand for its passes, and where their rules come from.


@dataclass(frozen=True, eq=False)
class KernelPass:
    """A pass of a kernel over arrays, and of its reference.

    Attributes:
        title: what messages call it.
        kernel, reference: functions of the same arrays, which return lists.
        arguments: their types.
        problem: what is wrong with the reference on these, so that the kernel is whole; empty if nothing is.
    """

    title: str
    kernel: Flat
    reference: Flat
    arguments: Types
    problem: Callable[[], str]

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results of the kernel, as one op in a partition."""
        op = CustomOp(self.title, self.kernel, reference=self.reference)
        found: list[Any] = as_one_op(self.kernel, arrays, op, self._with_rule, "partition_like")
        return found

    def _with_rule(self, op: CustomOp) -> FoundRule:
        found = self.derived
        own = replace(op, reduction=found.reduction, partial=found.partial)
        return FoundRule(found.rule, own, found.whole, found.work)

    @cached_property
    def derived(self) -> DerivedRule:
        """Its rule.

        Raises:
            ShardingError: the reference is none of the kernel.
        """
        problem, results = self.problem(), jax.eval_shape(self.kernel, *self.arguments)
        if problem:
            return whole_rule(self.arguments, results, problem)
        return derived_rule(self.kernel, self.reference, self.arguments, results)


class Passes:
    """The passes of a kernel on arrays of some types, and the kernel as a function that has derivatives.

    Args:
        kernel, reference: functions of arrays, which return the same trees.
        titles: what they are called.
        types: those of the arrays.

    Attributes:
        has_own_derivative: whether the kernel calls a `jax.custom_vjp`.
    """

    def __init__(
        self, kernel: Callable[..., Any], reference: Callable[..., Any], titles: tuple[str, str], types: Types
    ):
        self._titles, self._types, self._plain = titles, types, reference
        jaxpr, self._made = jax.make_jaxpr(kernel, return_shape=True)(*types)
        self.has_own_derivative = any(e.primitive.name.startswith("custom_vjp_call") for e in all_equations(jaxpr))
        self._kernel, self._reference = map(_listing, (kernel, reference))
        self._arguments, self._results = smooth(types), smooth(jax.tree.leaves(self._made))

    @property
    def out_tree(self) -> PyTreeDef:
        """The tree that the kernel returns."""
        return jax.tree.structure(self._made)

    @cached_property
    def forward(self) -> KernelPass:
        """From the arrays to the leaves of the result."""
        return KernelPass(self._titles[0], self._kernel, self._reference, self._types, self._checked)

    @cached_property
    def backward(self) -> KernelPass:
        """From the arrays, and the cotangents of results that have some, to those of the arrays."""
        kernel, reference = (
            with_own_widths(backward_of(fun, self._arguments, self._results))
            for fun in (self._kernel, side_by_side(self._reference))
        )
        made = jax.tree.leaves(self._made)
        types = [*self._types, *(jax.ShapeDtypeStruct(made[i].shape, made[i].dtype) for i in self._results)]

        def problem() -> str:
            self._checked()
            try:
                jax.eval_shape(reference, *types)
            except Exception as error:  # whatever jax says of what has no derivative
                return f"the reference has no derivative: {said(error)}"
            return ""

        return KernelPass(f"vjp({self._titles[0]})", kernel, reference, types, problem)

    def _checked(self) -> str:
        check_results(self._titles[0], self._made, self._titles[1], self._plain, self._types)
        return ""

    @cached_property
    def by_kernel(self) -> Callable[..., list[Any]]:
        """The forward pass, with the backward pass as derivative."""
        run = jax.custom_vjp(lambda *arrays: self.forward(*arrays))

        def pull(arrays: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            found: list[Any] = [None] * len(arrays)
            if self._arguments and self._results:
                moved = self.backward(*arrays, *(cotangents[i] for i in self._results))
                for i, cotangent in zip(self._arguments, moved, strict=True):
                    found[i] = cotangent
            return tuple(found)

        run.defvjp(lambda *arrays: (self.forward(*arrays), arrays), pull)
        return run

    @cached_property
    def by_reference(self) -> Callable[..., list[Any]]:
        """The forward pass, with the derivative of the reference."""
        run = jax.custom_jvp(lambda *arrays: self.forward(*arrays))

        @run.defjvp
        def push(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outs = run(*primals)
            _, moved = jax.jvp(self._reference, tuple(primals), tuple(tangents))
            return outs, [_as_tangent_of(out, x) for out, x in zip(outs, moved, strict=True)]

        return run


def _listing(fun: Callable[..., Any]) -> Flat:
    return with_own_widths(lambda *arrays: jax.tree.leaves(fun(*arrays)))


def _as_tangent_of(out: Any, tangent: Any) -> Any:
    return tangent if tangent.dtype == jax.dtypes.float0 else tangent.astype(out.dtype)


class KernelCalls:
    """The calls of one kernel.

    Args:
        kernel, reference: functions of the same trees.
        derivative: whose derivative calls have, "kernel" or "reference"; None: the kernel's if it has one of its own.
    """

    def __init__(self, kernel: Callable[..., Any], reference: Callable[..., Any], derivative: str | None):
        self._functions, self._derivative = (kernel, reference), derivative
        self._titles = function_name(kernel), function_name(reference)
        self._known: dict[Hashable, Passes] = {}
        """By all that is no array in a call, and the types of its arrays."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [_words(x) for x in leaves if _is_array(x)]
        if not arrays:
            return self._functions[0](*args, **kwargs)
        passes = self._passes([_place_of(x) if _is_array(x) else x for x in leaves], tree, arrays)
        by_kernel = passes.has_own_derivative if self._derivative is None else self._derivative == "kernel"
        outs = passes.by_kernel(*arrays) if by_kernel else passes.by_reference(*arrays)
        return jax.tree.unflatten(passes.out_tree, outs)

    def _passes(self, static: Sequence[Any], tree: PyTreeDef, arrays: Sequence[Any]) -> Passes:
        types = tuple(jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in arrays)
        key = tree, tuple((type(x), x) for x in static), types, jax.config.jax_enable_x64  # type: ignore[attr-defined]
        try:
            known = self._known.get(key)
        except TypeError:  # something in it has no hash
            return self._made(static, tree, types)
        if known is None:
            known = self._known[key] = self._made(static, tree, types)
        return known

    def _made(self, static: Sequence[Any], tree: PyTreeDef, types: Types) -> Passes:
        kernel, reference = (_of_arrays(fun, static, tree) for fun in self._functions)
        return Passes(kernel, reference, self._titles, types)


def _of_arrays(fun: Callable[..., Any], static: Sequence[Any], tree: PyTreeDef) -> Callable[..., Any]:
    """A function of the arrays among some leaves, of which the others, `static`, are known; of random keys it takes the
    words."""

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        leaves = [x.filled(next(given)) if isinstance(x, _Place) else x for x in static]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return fun(*args, **kwargs)

    return run


@dataclass(frozen=True)
class _Place:
    """Where an array is among leaves; `key`: the implementation of random keys, if it holds their words."""

    key: Hashable = None

    def filled(self, array: Any) -> Any:
        return array if self.key is None else jax.random.wrap_key_data(array, impl=self.key)


def _place_of(x: Any) -> _Place:
    return _Place(jax.random.key_impl(x) if _is_key(x) else None)


def _words(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


# `partition_like`: a kernel that is split as a plain function of the same arrays is.

P = ParamSpec("P")
R = TypeVar("R")

Derivative = Literal["kernel", "reference"]


@api_boundary
def partition_like(
    kernel: Callable[P, R], reference: Callable[P, Any], *, derivative: Derivative | None = None
) -> Callable[P, R]:
    """Makes one op of a kernel, which is split as a plain function that computes the same may be.

    For kernels that cannot be read: FFI calls, CUDA, a Pallas kernel whose body reads its grid. Outside of a
    partitioned function it is `kernel` itself. Inside, `reference` is traced on the types of the arguments, and never
    run: the rules of its ops say along which dimensions blocks of the results come of blocks of the arguments with
    nothing sent, or are terms of a sum. Along these each device runs `kernel` on its blocks; all others are whole.

    - A dimension that decides about itself stays whole: what is sorted, summed up and then squared, or compared with
      positions that the reference counts from 0 (a causal mask along its queries).
    - So does one of which the reference on blocks is another function than on the whole, as a mean over it is.
    - A kernel that raises on small blocks, or has a grid without steps for them, is split into multiples of the
      smallest that it takes. One that computes anything else of them is split wrongly: `verify` finds it.

    Args:
        kernel: any JAX function of trees of arrays whose shapes may be those of blocks.
        reference: a function of the same arguments in plain JAX, for arguments of any size, which returns arrays of the
            same shapes in the same tree; floating-point numbers may be of another precision. Of loops, those that only
            map (`jax.lax.map`) are split along what they map.
        derivative: whose derivative it has: the "kernel"'s, whose backward pass is one op as well, split as
            `jax.vjp(reference)` is, or the "reference"'s, in ordinary ops. By default the kernel's if it calls a
            `jax.custom_vjp`.

    Returns:
        A function that computes the same. Arguments that are no arrays (numbers, strings, functions) are passed on as
        they are. Under `vmap` the rule gains a factor for the new dimension, and blocks are mapped over too. A backward
        pass of the kernel's takes the arguments, and runs the forward pass again for what else it needs.

    Raises:
        SdyError: `kernel` or `reference` is no function, or closes over traced arrays; no such derivative.
        ShardingError: in a partitioned function: the reference does not take the arguments, or returns other trees or
            shapes than the kernel.

    Example:
        >>> def plain(x, w):
        ...     return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * w
        >>> norm = partition_like(jax.jit(plain), plain)
        >>> norm(jnp.ones((8, 4)), jnp.ones(4)).shape
        (8, 4)

    See also:
        `custom_op`: takes a rule that is written by hand.
        `verify`: runs kernel and reference on blocks, and compares the numbers.

    Source: jax-ml/jax#19748.
    """
    for what, fun in (("kernel", kernel), ("reference", reference)):
        if not callable(fun):
            raise SdyError(f"partition_like got {with_article(type(fun))} as {what}; expected a function")
    if derivative not in (None, *get_args(Derivative)):
        known = ", ".join(map(repr, get_args(Derivative)))
        raise SdyError(f"partition_like got the derivative {derivative!r}; it is one of {known}, or None")
    calls = KernelCalls(kernel, reference, derivative)

    @functools.wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = calls.run(args, kwargs)
        return result

    call.__name__ = function_name(kernel)
    return call
