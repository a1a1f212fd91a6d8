"""Matrix products: contractions that leave partial sums, rings, the order of dimensions, ragged products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from sdy_jax.ir.collectives import RING, collective_from_attributes
from sdy_jax.ir.custom_ops import GROUP_SIZES
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.kernels.libraries import sizes_in_block
from sdy_jax.ir.meshes import Axes, axes_size
from sdy_jax.ir.new_ops import Place, created
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.collectives.movement import Gathered, Numbers, Product
from sdy_jax.lowering.ops.collectives.reductions import as_rows
from sdy_jax.lowering.ops.elementwise import sum_kind
from sdy_jax.lowering.ops.re_emission import numpy_dtype, re_emit
from sdy_jax.lowering.ops.registry import (
    LocalOp,
    Shards,
    Strategy,
    emitter,
    folds,
    open_precision,
    pass_through_factors,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.ops.shards import mask_padding, offset
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.shardy.rules.op_attributes import (
    RaggedDotDimensionNumbers,
    dot_dimension_numbers,
    operations_of,
    ragged_dot_dimension_numbers,
)

# A product of two arrays whose dimensions have indices, so that they may lie in any order.

Precisions = tuple[lax.Precision, lax.Precision] | None
"""Those that a product asks for, one per operand; None where it leaves them open."""

Index = tuple[int, int]
"""A dimension of a product: the operand that has it, the first one where both do, and its place there."""


class IndexedArray(NamedTuple):
    """One operand of a product: its array, the index of each of its dimensions, and its precision."""

    x: jax.Array
    indices: list[Index]
    precision: lax.Precision | None

    @property
    def sizes(self) -> dict[Index, int]:
        return dict(zip(self.indices, self.x.shape, strict=True))

    def places(self, indices: Sequence[Index]) -> list[int]:
        return [self.indices.index(index) for index in indices]

    def transposed(self, indices: list[Index]) -> IndexedArray:
        """With the dimensions in another order."""
        return self._replace(x=lax.transpose(self.x, self.places(indices)), indices=indices)

    def merged(self, indices: Sequence[Index]) -> IndexedArray:
        """With dimensions that are neighbours as one, which has the index of the first."""
        sizes = self.sizes
        sizes[indices[0]] = math.prod(sizes[index] for index in indices)
        left = [index for index in self.indices if index not in indices[1:]]
        return self._replace(x=self.x.reshape([sizes[index] for index in left]), indices=left)


class IndexedProduct(NamedTuple):
    """A product of two operands.

    Attributes:
        operands: its operands.
        batch: the indices of its batch, in the order in which the result has them.
        contracted: the indices over which it sums, in the order in which it does.
    """

    operands: tuple[IndexedArray, IndexedArray]
    batch: list[Index]
    contracted: list[Index]

    @classmethod
    def of(cls, arrays: tuple[jax.Array, jax.Array], numbers: Numbers, precisions: Precisions) -> IndexedProduct:
        """That of two arrays with these dimension numbers."""
        x, y = arrays
        contracted, batched = (dict(zip(rhs, lhs, strict=True)) for lhs, rhs in numbers)
        shared = contracted | batched
        lhs = [(0, dim) for dim in range(x.ndim)]
        rhs = [(0, shared[dim]) if dim in shared else (1, dim) for dim in range(y.ndim)]
        precision = precisions or (None, None)
        operands = (IndexedArray(x, lhs, precision[0]), IndexedArray(y, rhs, precision[1]))
        return cls(operands, *([(0, dim) for dim in dims[0]] for dims in (numbers.batching, numbers.contracting)))

    @property
    def swapped(self) -> IndexedProduct:
        """With the operands in each other's place."""
        return self._replace(operands=self.operands[::-1])

    @property
    def result(self) -> list[Index]:
        """The index of each dimension of the result."""
        x, y = (operand.indices for operand in self.operands)
        return self.batch + [index for index in x if index not in y] + [index for index in y if index not in x]

    @property
    def sizes(self) -> dict[Index, int]:
        """Of each dimension of the operands, by its index."""
        x, y = self.operands
        return x.sizes | y.sizes

    def merged(self, indices: Sequence[Index]) -> IndexedProduct:
        """With dimensions of one operand, which are neighbours, as one."""
        x, y = (each.merged(indices) if indices[0] in each.indices else each for each in self.operands)
        return self._replace(operands=(x, y))

    def multiplied(self, dtype: Any) -> jax.Array:
        x, y = self.operands
        contracting, batching = ((x.places(shared), y.places(shared)) for shared in (self.contracted, self.batch))
        precision = None if x.precision is None or y.precision is None else (x.precision, y.precision)
        return lax.dot_general(x.x, y.x, (contracting, batching), precision=precision, preferred_element_type=dtype)


# Products whose largest array stays as it lies: what is transposed beside them is a smaller one.
#
# Attention with groups of heads is where it counts: its scores leave the product with the group behind the positions,
# and are transposed; so are their gradients. Compiled for an H100, a layer of Llama-3-8B over 4,096 tokens takes,
# forward and backward, 3.05 GiB in between for 5.06, and its softmax is one kernel; on a CPU attention takes 0.6 of
# the time.


def multiplied_in_order(op: Op, product: IndexedProduct, dtype: Any) -> jax.Array:
    """A product, by the transpositions beside it: that of a large operand is taken back, and a large result is made in
    the order into which it is transposed. What is transposed back here cancels these for a compiler."""
    ordered = _as_summed(_ordered(op, product))
    return lax.transpose(ordered.multiplied(dtype), [ordered.result.index(index) for index in product.result])


def _as_summed(product: IndexedProduct) -> IndexedProduct:
    """A product that sums in the order of its larger operand."""
    _, larger = sorted(product.operands, key=lambda operand: operand.x.size)
    return product._replace(contracted=[index for index in larger.indices if index in product.contracted])


def _ordered(op: Op, product: IndexedProduct) -> IndexedProduct:
    """A product with what is larger than its result as it lies, or with the result as it will lie if that is larger."""
    size = math.prod(product.sizes[index] for index in product.result)
    if size > max(operand.x.size for operand in product.operands):
        taken = op.results[0].only_user
        return product if taken is None else _with_result(product, _transposed(product.result, taken))
    lhs, rhs = (
        operand if operand.x.size <= size else _as_it_lies(operand, value)
        for operand, value in zip(product.operands, op.operands, strict=True)
    )
    return _in_places(product._replace(operands=(lhs, rhs)))


def _in_places(product: IndexedProduct) -> IndexedProduct:
    """A product with the larger operand first where what is contracted comes last in it, and else second: compilers
    for CPUs transpose what is not so."""
    lhs, rhs = product.operands
    larger, smaller = (lhs, rhs) if lhs.x.size >= rhs.x.size else (rhs, lhs)
    ends_contracted = any(index in product.contracted for index in larger.indices[-1:])
    return product._replace(operands=(larger, smaller) if ends_contracted else (smaller, larger))


def _transposed(indices: list[Index], op: Op) -> list[Index]:
    """What an op makes of dimensions, where it transposes them."""
    return [indices[dim] for dim in op.ints("permutation")] if op.name == "stablehlo.transpose" else indices


def _as_it_lies(operand: IndexedArray, value: Value) -> IndexedArray:
    """An operand as it was before it was transposed, where it was."""
    op = value.defining_op
    if op is None or op.name != "stablehlo.transpose":
        return operand
    places = op.ints("permutation")
    return operand.transposed([operand.indices[places.index(dim)] for dim in range(operand.x.ndim)])


def _with_result(product: IndexedProduct, result: list[Index]) -> IndexedProduct:
    """A product whose result has its dimensions in this order; as it is where none has."""
    batch = result[: len(product.batch)]
    operands = [_with_free(operand, result, product.batch) for operand in product.operands]
    first = 0 if result[len(batch)] in operands[0].indices else 1
    found = IndexedProduct((operands[first], operands[1 - first]), batch, product.contracted)
    return found if found.result == result and set(batch) == set(product.batch) else product


def _with_free(operand: IndexedArray, result: list[Index], batch: list[Index]) -> IndexedArray:
    """An operand with its own dimensions in the order in which a result has them."""
    kept = [index for index in result if index in operand.indices]
    free = [index for index in kept if index not in batch]
    if free == [index for index in operand.indices if index in free]:
        return operand
    return operand.transposed(kept + [index for index in operand.indices if index not in kept])


# Products that are made as they are sent: with the operands in the places, and the dimensions as one, as that is.


def multiplied(
    local: LocalOp, operands: tuple[jax.Array, jax.Array], numbers: Numbers, precisions: Precisions, dtype: Any
) -> jax.Array:
    """A product. Where it is scattered as a matrix, the columns of that are one dimension of one operand. Where the
    operands change their places in a transposition that follows, they have these places: what is transposed back here
    cancels that: a compiler that has lanes copies such a gradient before it is gathered; others take it as it is."""
    product = IndexedProduct.of(operands, numbers, precisions)
    if local.mesh.forms.in_order:
        return multiplied_in_order(local.op, product, dtype)
    if not local.mesh.forms.in_lanes:
        return product.multiplied(dtype)
    sizes, result, changed = product.sizes, product.result, product.swapped.result
    columns = [result[dim] for dim in _columns(local, [sizes[index] for index in result])]
    if columns and not set(columns) & set(product.batch) and _are_neighbours(columns):
        product = product.merged(columns)
    if not _is_transposed(local.op, [result.index(index) for index in changed]):
        return product.multiplied(dtype).reshape([sizes[index] for index in result])
    found = product.swapped.multiplied(dtype).reshape([sizes[index] for index in changed])
    return found.transpose([changed.index(index) for index in result])


def _is_transposed(op: Op, permutation: Sequence[int]) -> bool:
    """Whether this transposition alone takes an op's result."""
    user = op.results[0].only_user
    if user is None or user.name != "stablehlo.transpose":
        return False
    return list(user.ints("permutation")) == list(permutation)


def _columns(local: LocalOp, shape: Sequence[int]) -> list[int]:
    """The dimensions of a product's result of this shape that become the columns of a matrix when it is scattered,
    perhaps transposed; none where it is not."""
    result, order = local.op.results[0], list(range(len(shape)))
    while (user := result.only_user) is not None and user.name == "stablehlo.transpose":
        order, result = [order[dim] for dim in user.ints("permutation")], user.results[0]
    if user is None or user.name != "sdy.reduce_scatter":
        return []
    (dim, parts), *others = (
        (dim, axes_size(axes, local.mesh.mesh))
        for dim, axes in enumerate(collective_from_attributes(user.name, user.attributes).axes)
        if axes
    )
    itemsize = numpy_dtype(result.dtype).itemsize
    return (
        []
        if others or not as_rows([shape[d] for d in order], itemsize, dim, parts, local.mesh.forms)
        else order[dim + 1 :]
    )


def _are_neighbours(dims: Sequence[Index]) -> bool:
    """Whether dimensions, each with the index of its operand, follow each other in one operand."""
    side, first = dims[0]
    return list(dims) == [(side, first + n) for n in range(len(dims))]


# Matrix products: a sharded contraction leaves partial sums.

runs_part_by_part("stablehlo.dot", "stablehlo.dot_general")


@strategies("stablehlo.dot", "stablehlo.dot_general")
def product_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Along what is contracted, sums are partial."""
    return [
        Strategy("partial", pass_through_factors(rule) | rule.reduction, rule.reduction, sum_kind(op.results[0].dtype))
    ]


def without_padding(
    local: LocalOp, lhs: jax.Array, rhs: jax.Array, lhs_dims: tuple[int, ...], rhs_dims: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Both operands with zeros in the padding of what is contracted: nan times zero would still be nan."""
    return (
        mask_padding(local, 0, lhs, lhs_dims, np.zeros((), lhs.dtype)),
        mask_padding(local, 1, rhs, rhs_dims, np.zeros((), rhs.dtype)),
    )


# Products of which nothing but a transposition takes the result, and that gives the dimensions of the other operand
# first: the gradients of weights, as jax has them. With the operands in each other's place it is the product itself.
#
#     %0 = stablehlo.dot_general(%dy, %x) : f32[n, m@x]    %1 = stablehlo.transpose(%0) : f32[m@x, n]
#                                                     ->   %1 = stablehlo.dot_general(%x, %dy) : f32[m@x, n]
#
# That is done where the last dimension is split before, and is not behind. So a gradient is scattered in the layout of
# its weight: before the transposition it would be along lanes, of which XLA makes an all-reduce, or along another
# dimension, and be moved behind. Where the last dimension is split in both nothing is gained: an 8B model on 16 x 16
# chips of v5e would hold 20.7 GiB, for 15.2 (libtpu 0.0.52, 2026-11).

_KNOWN = frozenset(("dot_dimension_numbers", "precision_config", "sdy.sharding"))
"""The attributes of products that may be folded."""


@folds("stablehlo.transpose")
def _fold_into_product(op: Op) -> bool:
    made = op.operands[0].defining_op
    if made is None or made.name != "stablehlo.dot_general" or not made.attributes.keys() <= _KNOWN:
        return False
    numbers, before = dot_dimension_numbers(made), made.results[0]
    batched, first = len(numbers.lhs_batching), made.operands[0].rank - len(numbers.lhs_contracting)
    if not _is_transposed(made, [*range(batched), *range(first, before.rank), *range(batched, first)]):
        return False
    if _splits_last(op.results[0]) or not _splits_last(before):
        return False
    place, result = Place(ir.InsertionPoint(op.mlir), made.mlir.location), op.results[0]
    lhs, rhs = (numbers.lhs_batching, numbers.lhs_contracting), (numbers.rhs_batching, numbers.rhs_contracting)
    dims = (rhs[0], lhs[0], rhs[1], lhs[1])
    attributes = {"dot_dimension_numbers": stablehlo.DotDimensionNumbers.get(*dims, context=place.context)}
    if "precision_config" in made.attributes:
        attributes["precision_config"] = ir.ArrayAttr.get(
            list(made.attributes["precision_config"])[::-1], place.context
        )
    operands = list(made.mlir.operands)[::-1]
    found = created(made.name, result.mlir.type, operands, place, result.sharding, attributes)
    result.mlir.replace_all_uses_with(found)
    return True


def _splits_last(value: Value) -> bool:
    return value.sharding is not None and any(value.sharding.axes[-1:])


@emitter("stablehlo.dot")
def _dot(local: LocalOp, lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
    lhs, rhs = without_padding(local, lhs, rhs, (lhs.ndim - 1,), (0,))
    return re_emit(local, lhs, rhs)


@emitter("stablehlo.dot_general")
def _dot_general(local: LocalOp, lhs: jax.Array | Gathered, rhs: jax.Array | Gathered) -> Any:
    op, numbers = local.op, dot_dimension_numbers(local.op)
    contracting = (numbers.lhs_contracting, numbers.rhs_contracting)
    if isinstance(lhs, Gathered) or isinstance(rhs, Gathered) or RING in op.attributes:
        return _in_ring(local, lhs, rhs)
    lhs, rhs = without_padding(local, lhs, rhs, *contracting)
    dtype = numpy_dtype(op.results[0].dtype)
    if "algorithm" in op.attributes or lhs.dtype != rhs.dtype or op.results[0].dtype == "i1":
        return re_emit(local, lhs, rhs)
    batching = (numbers.lhs_batching, numbers.rhs_batching)
    return multiplied(local, (lhs, rhs), Numbers(contracting, batching), precision(op), dtype)


def _in_ring(local: LocalOp, lhs: jax.Array | Gathered, rhs: jax.Array | Gathered) -> jax.Array | Product:
    """A product of whole blocks, one operand of which comes through a ring, or whose result goes through one."""
    found = dot_dimension_numbers(local.op)
    numbers = Numbers((found.lhs_contracting, found.rhs_contracting), (found.lhs_batching, found.rhs_batching))
    multiply = partial(
        lax.dot_general,
        dimension_numbers=(numbers.contracting, numbers.batching),
        precision=precision(local.op),
        preferred_element_type=numpy_dtype(local.op.results[0].dtype),
    )
    if isinstance(lhs, Gathered):
        assert isinstance(rhs, jax.Array)
        return lhs.times(rhs, 0, numbers, multiply)
    if isinstance(rhs, Gathered):
        return rhs.times(lhs, 1, numbers, multiply)
    return Product(lhs, rhs, numbers, multiply)


def precision(op: Op) -> Precisions:
    """The precisions that a dot or a convolution asks for."""
    if "precision_config" not in op.attributes:
        return None
    lhs, rhs = (lax.Precision[str(p).split()[-1].rstrip(">")] for p in op.attributes["precision_config"])  # type: ignore[attr-defined]
    return lhs, rhs


_PRODUCTS = ("stablehlo.dot", "stablehlo.dot_general", "stablehlo.convolution", "chlo.ragged_dot")


def pace(op: Op, costs: CostModel) -> float:
    """How long an operation of an op takes beside the rate of a cost model: products by their element type and
    precision; 1 for all others. Of two types the wider one is multiplied."""
    if op.name not in _PRODUCTS:
        return 1.0
    wider = max(op.operands[:2], key=lambda value: value.itemsize)
    asked = max((each.value for each in precision(op) or ()), default=lax.Precision.DEFAULT.value)
    return costs.pace(wider.dtype, lax.Precision(asked).name)


@open_precision("stablehlo.dot", "stablehlo.dot_general", "stablehlo.convolution")
def _has_open_precision(op: Op) -> bool:
    found = precision(op) or ()
    return "algorithm" not in op.attributes and all(each is lax.Precision.DEFAULT for each in found)


def group_sizes_operand(op: Op) -> int | None:
    """The operand that says how many rows each group has, of a product of rows in groups; None for other ops."""
    if op.name == "chlo.ragged_dot":
        return 2
    return op.int(GROUP_SIZES) if GROUP_SIZES in op.attributes else None


# Products of groups of rows, each with a matrix of its own, as of experts: what lies in a block is in groups as well.
#
# Rows are in groups one after the other, so that a block of them has a part of some groups, whose sizes follow from
# all sizes. A device that has some of the matrices takes the rows of their groups: they come first, others are in
# none.


@strategies("chlo.ragged_dot")
def _ragged_dot_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """As of a product. A row meets one matrix, however many there are; all groups are taken to have as many rows."""
    whole = operations_of(op) / 2

    def shared(shards: Shards) -> float:
        return whole / math.prod(shards)

    return [replace(found, operations=shared) for found in product_strategies(op, rule)]


@emitter("chlo.ragged_dot")
def _ragged_dot(local: LocalOp, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    numbers = ragged_dot_dimension_numbers(local.op)
    product, dim = numbers.product, numbers.ragged
    lhs, rhs = without_padding(local, lhs, rhs, product.lhs_contracting, product.rhs_contracting)
    if local.operand_axes(0, dim):
        block = lhs.shape[dim]
        sizes = sizes_in_block(sizes, offset(local, local.operand_axes(0, dim), block), block)
    is_summed = dim in product.lhs_contracting
    groups = local.result_axes(0, 0) if is_summed else ()
    if numbers.groups is not None:
        groups = local.operand_axes(1, numbers.groups)
        rhs = mask_padding(local, 1, rhs, (numbers.groups,), np.zeros((), rhs.dtype))
    if not groups:
        return _multiplied(local, numbers, lhs, rhs, sizes)
    before, sizes = _of_own_groups(local, groups, sizes)
    lhs = jnp.roll(lhs, -before, dim)
    if is_summed:
        other = dict(zip(product.lhs_contracting, product.rhs_contracting, strict=True))[dim]
        return _multiplied(local, numbers, lhs, jnp.roll(rhs, -before, other), sizes)
    found = _multiplied(local, numbers, lhs, rhs, sizes)
    row = _row(numbers)
    # Compilers may leave what is in no group as it was.
    is_own = lax.broadcasted_iota(sizes.dtype, found.shape, row) < sizes.sum()
    return jnp.roll(jnp.where(is_own, found, np.zeros((), found.dtype)), before, row)


def _row(numbers: RaggedDotDimensionNumbers) -> int:
    """The dimension of the result with the rows: batching ones come first."""
    product = numbers.product
    taken = product.lhs_batching + product.lhs_contracting
    return len(product.lhs_batching) + sum(d not in taken for d in range(numbers.ragged))


def _of_own_groups(local: LocalOp, axes: Axes, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many rows come before those of this device's groups, and the sizes of these."""
    count = axes_size(axes, local.mesh.mesh)
    sizes = jnp.pad(sizes, (0, -len(sizes) % count))
    block = len(sizes) // count
    first = offset(local, axes, block)
    before = jnp.where(jnp.arange(len(sizes)) < first, sizes, 0).sum(dtype=sizes.dtype)
    return before, lax.dynamic_slice_in_dim(sizes, first, block)


def _multiplied(
    local: LocalOp, numbers: RaggedDotDimensionNumbers, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array
) -> jax.Array:
    product = numbers.product
    dims = lax.RaggedDotDimensionNumbers(
        ((product.lhs_contracting, product.rhs_contracting), (product.lhs_batching, product.rhs_batching)),
        [numbers.ragged],
        [] if numbers.groups is None else [numbers.groups],
    )
    dtype = numpy_dtype(local.op.results[0].dtype)
    return lax.ragged_dot_general(lhs, rhs, sizes, dims, precision(local.op), dtype)
