"""Layers that are different functions, as one that chooses, and their functions on each device's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from sdy_jax.annotate.jaxprs import all_equations, line_of
from sdy_jax.base.errors import ArgumentError, UnsupportedError, with_article
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.pipelines.jaxprs import is_inexact, types_of
from sdy_jax.pipelines.region import Region, type_entries
from sdy_jax.pipelines.user_functions import check_same_length, check_same_types, leaves_of, strong

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


# Weights of layers that differ, as one tree of arrays with the layers first.


class Slot(NamedTuple):
    """Where a leaf of a layer is: the index of the array, and the leaf's own shape in a part of it."""

    array: int
    shape: tuple[int, ...]


class PackedTree(NamedTuple):
    """How to make the tree of one layer from its parts of the arrays."""

    structure: Any
    slots: tuple[Slot, ...]

    def of(self, parts: Sequence[Any]) -> Any:
        """The tree."""
        return jax.tree.unflatten(self.structure, (_unpadded(parts[slot.array], slot.shape) for slot in self.slots))


def _unpadded(part: Any, shape: tuple[int, ...]) -> Any:
    return part if part.shape == shape else part[tuple(map(slice, shape))]


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["trees"])
@dataclass(frozen=True)
class PackedLayers:
    """What `pack_layers` makes: a tree of its `arrays`, to be split, updated and saved like other weights.

    Attributes:
        arrays: each with the layers first.
        trees: how each layer's weights are made of its parts of the arrays.

    Example:
        >>> packed = pack_layers([{"w": jnp.ones((2, 3))}, {"b": jnp.ones(4)}])
        >>> [array.shape for array in packed.arrays]
        [(2, 2, 3), (2, 4)]

    See also:
        `pack_layers`: makes it.
    """

    arrays: list[Any]
    trees: tuple[PackedTree, ...]

    def layer(self, number: int) -> Any:
        """The weights of a layer, as they were packed.

        Example:
            >>> pack_layers([{"w": jnp.ones((2, 3))}, {"b": jnp.ones(4)}]).layer(1)["b"].shape
            (4,)
        """
        return self.trees[number].of([array[number] for array in self.arrays])


@api_boundary
def pack_layers(layers: Sequence[Any]) -> PackedLayers:
    """Makes one tree of the weights of layers that differ, for `pipeline` with a function per layer.

    Leaves of one rank and type are stacked in the order in which they stand in their trees; smaller ones are padded
    with zeros to the size of the largest, and layers that have fewer get zeros. So a stage holds as much as the largest
    leaves take: let large ones of different layers stand in the same order.

    Args:
        layers: a tree of arrays for each layer; any structures and shapes.

    Returns:
        The packed weights, whose arrays have the layers as their first dimension: `P("stage")` puts them on stages.

    Raises:
        ArgumentError: there are no layers, a leaf is no array, or random keys have different shapes.

    Example:
        >>> packed = pack_layers([{"w": jnp.ones((8, 16))}, {"up": jnp.ones((8, 8)), "scale": jnp.ones(8)}])
        >>> [array.shape for array in packed.arrays]
        [(2, 8, 16), (2, 8)]

    See also:
        `pipeline`: runs the layers.
    """
    if not isinstance(layers, Sequence):
        raise ArgumentError(
            f"pack_layers got {with_article(type(layers))}; expected a tree of arrays for each layer, in a list"
        )
    if not layers:
        raise ArgumentError("pack_layers: there are no layers; expected a tree of arrays for each layer, in a list")
    named = [[leaf for _, leaf in leaves_of(layer, f"layers[{n}]")] for n, layer in enumerate(layers)]
    given = [[leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves] for leaves in named]
    placed = [list(_placed(leaves)) for leaves in given]
    order = {key: n for n, key in enumerate(dict.fromkeys(key for keys in placed for key in keys))}
    arrays = [
        _stacked([dict(zip(keys, each, strict=True)).get(key) for keys, each in zip(placed, given, strict=True)])
        for key in order
    ]
    trees = (
        PackedTree(
            jax.tree.structure(layer),
            tuple(Slot(order[key], leaf.shape) for key, leaf in zip(keys, leaves, strict=True)),
        )
        for layer, keys, leaves in zip(layers, placed, given, strict=True)
    )
    return PackedLayers(arrays, tuple(trees))


Place = tuple[Any, int, int]
"""What leaves of different layers have in common that are in one array: type, rank, and which of these they are."""


def _placed(leaves: Sequence[Any]) -> Iterator[Place]:
    seen: dict[tuple[Any, int], int] = {}
    for leaf in leaves:
        key = leaf.dtype, leaf.ndim
        yield (*key, seen.setdefault(key, 0))
        seen[key] += 1


def _stacked(leaves: Sequence[Any]) -> Any:
    """A leaf per layer, padded to one shape; zeros where a layer has none."""
    there = [leaf for leaf in leaves if leaf is not None]
    shape = tuple(map(max, zip(*(leaf.shape for leaf in there), strict=True)))
    if jnp.issubdtype(there[0].dtype, jax.dtypes.prng_key):
        if any(leaf.shape != shape for leaf in there):
            raise ArgumentError("pack_layers: random keys have different shapes; to fix: give each layer as many")
        return jnp.stack([there[0] if leaf is None else leaf for leaf in leaves])
    return jnp.stack([_padded(leaf, shape, there[0].dtype) for leaf in leaves])


def _padded(leaf: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if leaf is None:
        return jnp.zeros(shape, dtype)
    missing = [(0, size - own) for own, size in zip(np.shape(leaf), shape, strict=True)]
    return jnp.pad(leaf, missing) if shape else leaf


# Layers that are different functions, as one that chooses.

Layer = Callable[..., Any]


def as_one(
    layer: Layer | Sequence[Layer], weights: Any, has_aux: bool, has_key: bool, region: Region
) -> tuple[Layer, Any]:
    """One layer and a stack of weights, of a function, or of one per layer.

    Args:
        layer, weights, has_aux: as the user gave them.
        has_key: whether the last argument of functions is a random key.
        region: where they run.

    Raises:
        ArgumentError: there are not as many functions as layers, or they return other types than each other.
        UnsupportedError: functions differ, a stage has several devices, and the axes are Explicit, or functions return
            auxiliary results.
    """
    packed = isinstance(weights, PackedLayers)
    if callable(layer):
        if packed:
            raise ArgumentError(
                "pipeline: weights are packed, and layer is one function; expected a function per layer"
            )
        return layer, weights
    count = len(weights.trees) if packed else check_same_length(leaves_of(weights, "weights"), "the number of layers")
    if len(layer) != count:
        raise ArgumentError(f"pipeline: layer has {len(layer)} functions, and weights are of {count} layers")
    every = [(each, weights.trees[n] if packed else None) for n, each in enumerate(layer)]
    distinct = list(dict.fromkeys(every))
    if len(distinct) == 1 and not packed:
        return layer[0], weights
    if len(distinct) > 1 and not region.alone:
        _check_several_devices(has_aux, region)
    firsts = [every.index(each) for each in distinct]
    branches = [_Branch(f"layer[{n}]", *each, has_aux) for n, each in zip(firsts, distinct, strict=True)]
    chosen = np.array([distinct.index(each) for each in every], np.int32)
    return _Chosen(branches, has_key, region), (chosen, weights.arrays if packed else weights)


def _check_several_devices(has_aux: bool, region: Region) -> None:
    """
    Raises:
        UnsupportedError: functions that differ cannot run on the devices of a stage.
    """
    start = "pipeline: layers are different functions, a stage has several devices, each with its rows, and "
    if has_aux:
        raise UnsupportedError(
            f"{start}has_aux=True: how auxiliary results of parts of the rows are to be joined is not known; to fix: "
            "let activations carry them, in an array with the batch first"
        )
    if region.around is not None:
        raise UnsupportedError(
            f"{start}the mesh has Explicit axes; to fix: make it with axis_types=(AxisType.Auto, ...)"
        )


class _Branch:
    """One of the functions, of its own weights among those of all.

    Args:
        name: what errors call it.
        function: the user's.
        tree: how its weights are packed, if they are.
        has_aux: whether it returns auxiliary results as well.
    """

    def __init__(self, name: str, function: Layer, tree: PackedTree | None, has_aux: bool):
        self.name, self._function, self._tree, self._has_aux = name, function, tree, has_aux

    def __call__(self, weights: Any, x: Any, *rest: Any) -> Any:
        return self._function(weights if self._tree is None else self._tree.of(weights), x, *rest)

    def check(self, x: Any, made: Any) -> None:
        """
        Raises:
            ArgumentError: what it makes of the activations is of other types.
        """
        pair = self._has_aux and isinstance(made, tuple) and len(made) == 2
        check_same_types(x, made[0] if pair else made, self.name)


class _Chosen:
    """A layer that runs one of some functions.

    Its backward pass runs the function once more, from the activations: what a branch keeps is copied, weights too, and
    a place is kept for what each of the functions does.
    """

    def __init__(self, branches: Sequence[_Branch], has_key: bool, region: Region):
        self._branches, self._has_key, self._region = branches, has_key, region

    def __call__(self, weights: tuple[Any, Any], x: Any, *rest: Any) -> Any:
        own = weights[1]
        if len(self._branches) == 1:
            return self._branches[0](own, x, *rest)
        made = [types_of(branch, own, x, *rest) for branch in self._branches]
        for branch, each in zip(self._branches, made, strict=True):
            branch.check(x, each)
            if jax.tree.map(_type, each) != jax.tree.map(_type, made[0]):
                raise ArgumentError(
                    f"pipeline: {branch.name} and {self._branches[0].name} return auxiliary results of different types"
                )
        return jax.checkpoint(self._run)(weights, x, *rest)

    def _run(self, weights: tuple[Any, Any], x: Any, *rest: Any) -> Any:
        if self._region.alone:
            return self._switch(weights, x, rest)
        count = len(rest) - self._has_key
        extra, keys = list(rest[:count]), list(rest[count:])
        rows = LocalRows.of(jax.tree.leaves(x)[0].shape[0], self._region.axis)
        for branch in self._branches:
            rows.check(branch.name, _of_lists(branch), weights[1], x, extra, keys)
        whole = lambda weights, x, extra, keys: self._switch(weights, x, (*extra, *keys))  # noqa: E731
        return rows.run(whole, weights, x, extra, keys)

    def _switch(self, weights: tuple[Any, Any], x: Any, rest: Sequence[Any]) -> Any:
        chosen, own = weights
        return lax.switch(chosen, [_with_strong_results(branch) for branch in self._branches], own, x, *rest)


def _of_lists(branch: _Branch) -> Layer:
    return lambda weights, x, extra, keys: branch(weights, x, *extra, *keys)


def _type(x: Any) -> tuple[Any, ...]:
    return x.shape, x.dtype, type_entries(x)


def _with_strong_results(branch: _Branch) -> Layer:
    return lambda *args: strong(branch(*args))
