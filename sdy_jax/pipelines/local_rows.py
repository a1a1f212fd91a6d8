"""Functions on each device's rows of a microbatch, where two traces show that a function treats rows alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from sdy_jax.annotate.jaxprs import all_equations, line_of
from sdy_jax.errors import UnsupportedError
from sdy_jax.pipelines.layer_passes import is_inexact

# Whether a function treats rows of a batch alike, so that devices may run it on some of them: seen from two traces.
#
# A dimension whose size changes with the number of rows is one of rows. An equation keeps rows apart if its results
# have as many of them as its operands, of the same sizes, and it names none of them: a sum over rows leaves none, a
# product of rows by rows has two, a cumulative sum names one.

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp
clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
mulhi name ne neg nextafter not optimization_barrier or polygamma population_count pow real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
_OF_DIMENSIONS = """
argmax argmin broadcast_in_dim concatenate conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general
dynamic_slice dynamic_update_slice expand_dims gather iota pad reduce reduce_and reduce_max reduce_min reduce_or
reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor reshape rev
scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max scatter_min scatter_mul
scatter_sub slice sort split squeeze stack tile transpose unstack
"""
_SEEN = frozenset([*_ELEMENTWISE.split(), *_OF_DIMENSIONS.split()])
"""Primitives that mix nothing, or name the dimensions that they mix, or whose shapes tell. Any other one may mix rows
unseen: a Fourier transform, a decomposition, a product of ragged groups, a callback."""
_CALLS = frozenset(
    (
        *("checkpoint", "remat", "remat2", "closed_call", "core_call", "jit", "pjit", "cond", "scan", "while"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    )
)
"""Primitives of which their own equations say it."""
_MADE = frozenset(("iota", "broadcast_in_dim"))
"""Primitives that make the same for all rows of what has none."""
_NAMING = ("axis", "axes", "dimension", "dimensions")
"""The parameters by which equations name the dimensions along which they mix elements."""

Rows = dict[int, tuple[int, int]]
"""The dimensions of rows of an array, with their sizes in both traces."""


def where_rows_mix(first: Any, second: Any, has_key: bool) -> str | None:
    """The line at which a function looks at several rows, or at their number; None where it does not.

    Args:
        first, second: its jaxprs for two numbers of rows.
        has_key: whether random numbers of rows are of a key that each part of the rows has of its own.
    """
    equations, others = list(all_equations(first)), list(all_equations(second))
    for eqn, other in zip(equations, others, strict=False):
        if eqn.primitive is not other.primitive or _mixes(eqn, other, has_key):
            return line_of(eqn) or f"its {eqn.primitive}"
    tables = [v.jaxpr.constvars for v in (first, second)]
    same = len(equations) == len(others) and len(tables[0]) == len(tables[1])
    return None if same and not any(map(_rows, *tables)) else "what it closes over"


def _rows(variable: Any, other: Any) -> Rows:
    pairs = zip(getattr(variable.aval, "shape", ()), getattr(other.aval, "shape", ()), strict=False)
    return {dim: sizes for dim, sizes in enumerate(pairs) if sizes[0] != sizes[1]}


def _mixes(eqn: Any, other: Any, has_key: bool) -> bool:
    pairs = list(zip(eqn.invars, other.invars, strict=True))
    if any(isinstance(a, Literal) and isinstance(b, Literal) and repr(a.val) != repr(b.val) for a, b in pairs):
        return True
    if eqn.primitive.name in _CALLS:
        return bool(eqn.params.get("length") != other.params.get("length"))
    given = [_rows(a, b) for a, b in pairs]
    made = [_rows(a, b) for a, b in zip(eqn.outvars, other.outvars, strict=True)]
    name = eqn.primitive.name
    is_random = has_key and name.startswith(("random_", "threefry", "rng_"))
    if any(given) and name not in _SEEN and not is_random:
        return True
    if not any(given):
        is_known = name in _MADE or is_random
        return any(made) and (not is_known or _names_rows(eqn, made))
    return _names_rows(eqn, given) or _moves_rows(eqn, given) or any(_loses(eqn, given, each) for each in made)


def _loses(eqn: Any, given: list[Rows], made: Rows) -> bool:
    """Whether a result has other rows than the operands together."""
    if eqn.primitive.name == "reshape":
        (shape,), (result,) = [[v.aval.shape for v in vs] for vs in (eqn.invars[:1], eqn.outvars)]
        before = [math.prod(shape[:dim]) for dim in given[0]]
        return before != [math.prod(result[:dim]) for dim in made]
    return max(map(len, given)) != len(made) or not {*made.values()} <= {x for each in given for x in each.values()}


def _names_rows(eqn: Any, given: list[Rows]) -> bool:
    named = {dim for name in _NAMING for dim in _integers(eqn.params.get(name))}
    windows = [dim for dim, size in enumerate(eqn.params.get("window_dimensions", ())) if size != 1]
    return any(dim in rows for rows in given for dim in (*named, *windows))


def _moves_rows(eqn: Any, given: list[Rows]) -> bool:
    """Whether an equation reads or writes some of the rows, or slides over them."""
    name, rows = eqn.primitive.name, given[0]
    if name == "conv_general_dilated":
        return [*rows] != [eqn.params["dimension_numbers"].lhs_spec[0]]
    if name == "gather":
        batching, sizes = eqn.params["dimension_numbers"].operand_batching_dims, eqn.params["slice_sizes"]
        return any(dim not in batching and sizes[dim] != size for dim, (size, _) in rows.items())
    if name.startswith("scatter"):
        return any(dim not in eqn.params["dimension_numbers"].operand_batching_dims for dim in rows)
    return name == "dynamic_update_slice" and rows != given[1]


def _integers(given: Any) -> Iterator[int]:
    for each in given if isinstance(given, tuple | list) else (given,):
        if isinstance(each, int):
            yield each


# Functions on each device's rows of a microbatch, in a region that is manual on all other axes of the mesh as well.
#
# Stages that run different functions take different branches, in which devices may not wait for each other: so
# nothing is sent in a branch. Rows are split over the devices of a stage as far as they divide; weights are whole,
# gathered before it where they are split.

RowFunction = Callable[..., Any]
"""Of weights, activations, then lists of extra inputs and of keys."""


@dataclass(frozen=True)
class LocalRows:
    """How the devices of a stage share rows.

    Attributes:
        others: the axes of the mesh beside that of the stages.
        over: those that rows are split over.
        parts: into how many.
    """

    others: tuple[str, ...]
    over: tuple[str, ...]
    parts: int

    @classmethod
    def of(cls, rows: int, axis: str) -> LocalRows:
        """In the code around, over the axes as far as they divide the rows, in the order of the mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        others = tuple(name for name in mesh.axis_names if name != axis and name not in mesh.manual_axes)
        over, parts = list[str](), 1
        for name in others:
            if rows % (parts * mesh.shape[name]) == 0:
                over, parts = [*over, name], parts * mesh.shape[name]
        return cls(others, tuple(over), parts)

    def run(self, fun: RowFunction, weights: Any, x: Any, extra: list[Any], keys: list[Any]) -> Any:
        """What a function of weights and rows makes of all rows, each device of its own; keys are others on each.

        Weights are given to each part of the rows as its own: so their gradients are sums over a dimension, which a
        loop that adds them up may leave to the end, and no sums of a layer.
        """

        def given(leaf: Any) -> Any:
            return jnp.broadcast_to(leaf, (self.parts, *leaf.shape)) if is_inexact(leaf) else leaf

        def local(weights: Any, x: Any, extra: list[Any], keys: list[Any]) -> Any:
            own = jax.tree.map(lambda leaf: leaf[0] if is_inexact(leaf) else leaf, weights)
            return fun(own, x, extra, [jax.random.fold_in(key, lax.axis_index(self.over)) for key in keys])

        split = P(self.over)
        specs = jax.tree.map(lambda leaf: split if is_inexact(leaf) else P(), weights), split, split, P()
        run = jax.shard_map(local, in_specs=specs, out_specs=split, axis_names={*self.others}, check_vma=False)
        return run(jax.tree.map(given, weights), x, extra, keys)

    def check(self, name: str, fun: RowFunction, weights: Any, x: Any, extra: list[Any], keys: list[Any]) -> None:
        """
        Raises:
            UnsupportedError: a function does not treat rows alike, which are on several devices.
        """
        if self.parts == 1:
            return

        def traced(times: int) -> Any:
            def rows(leaf: Any) -> Any:
                return jax.ShapeDtypeStruct((times * leaf.shape[0], *leaf.shape[1:]), leaf.dtype)

            return jax.make_jaxpr(fun)(weights, jax.tree.map(rows, x), jax.tree.map(rows, extra), keys)

        found = where_rows_mix(traced(1), traced(2), bool(keys))  # one row alone may trace to other equations
        if found is not None:
            raise UnsupportedError(
                f"pipeline: {name} looks at several rows of a microbatch, or at their number, at {found}; layers are "
                f"different functions, of which each device of a stage runs its own for its own rows, over "
                f"{', '.join(self.over)}; to fix: layers that treat rows alike, or a mesh on which all other axes have "
                "size one"
            )
