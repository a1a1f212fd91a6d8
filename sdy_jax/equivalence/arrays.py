"""Arrays of a trial: arguments that are drawn at random, and whole arrays as the blocks that devices hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.runtime.meshes import RefinedMesh

# Arguments that are made up: floats are normally distributed, integers are indices of what they index.
#
# Floats of matrices are as small as keeps products of them near 1: else what a deep program makes of them is
# rounding.

_INTEGERS = 4
"""Integers that index nothing are below this. Chosen: sums and products of them stay small."""

_DEPTH = 12
"""How many ops lie between an integer and what it indexes, at most. Guessed: jax clamps, wraps around, converts,
reshapes and joins indices."""

_PASSED_ON = frozenset(
    ("stablehlo.add", "stablehlo.broadcast_in_dim", "stablehlo.clamp", "stablehlo.concatenate", "stablehlo.convert",
     "stablehlo.dynamic_slice", "stablehlo.gather", "stablehlo.maximum", "stablehlo.minimum", "stablehlo.reshape",
     "stablehlo.select", "stablehlo.slice", "stablehlo.subtract", "stablehlo.transpose")
)  # fmt: skip
"""Ops through which an index remains one."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How an array is made up: `kind` is "float", "complex", "bool", or "integer" from 0 to below `bound`."""

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bound: int = 2

    @property
    def scale(self) -> float:
        """The standard deviation of floats."""
        return float(f"{max(self.shape, default=1) ** -0.5:.2g}") if len(self.shape) > 1 and all(self.shape) else 1.0

    def array(self, rng: np.random.Generator) -> np.ndarray:
        """The array, with the next numbers of a generator."""
        if self.kind == "float":
            return np.asarray(rng.normal(0, self.scale, self.shape)).astype(self.dtype)
        if self.kind == "complex":
            real, imaginary = (rng.normal(0, self.scale, self.shape) for _ in range(2))
            return np.asarray(real + 1j * imaginary).astype(self.dtype)
        return np.asarray(rng.integers(0, self.bound, self.shape)).astype(self.dtype)

    def __str__(self) -> str:
        """The same as a Python expression of `rng`."""
        name, shape = f'"{self.dtype.name}"', self.shape
        drawn = f"rng.normal(0, {self.scale}, {shape})"
        if self.kind == "float":
            return f"np.asarray({drawn}).astype({name})"
        if self.kind == "complex":
            return f"np.asarray({drawn} + 1j * {drawn}).astype({name})"
        return f"np.asarray(rng.integers(0, {self.bound}, {shape})).astype({name})"


def draw_of(value: Value) -> Draw:
    """How an argument of a program is made up."""
    dtype, shape = numpy_dtype(value.dtype), tuple(value.shape or ())
    if dtype == np.bool_ or dtype.kind == "c":
        return Draw("bool" if dtype == np.bool_ else "complex", shape, dtype)
    try:
        largest = int(ml_dtypes.iinfo(dtype).max)
    except ValueError:
        return Draw("float", shape, dtype)
    if value.dtype == "ui32" and _is_key(value):
        return Draw("integer", shape, dtype, largest)
    bound = min(_indexed(value, _DEPTH), default=_INTEGERS)
    return Draw("integer", shape, dtype, max(1, min(bound, largest)))


def drawn_arguments(graph: Graph, given: Sequence[np.ndarray | None], seed: int) -> list[np.ndarray]:
    """The arguments of the main function of a program: those that are given, and all others made up."""
    rng = np.random.default_rng(seed)
    pairs = zip(graph.arguments, given, strict=True)
    return [draw_of(value).array(rng) if x is None else x for value, x in pairs]


def _is_key(value: Value) -> bool:
    """Whether a value may be the words of a random key: any number will do."""
    return value.shape is not None and value.shape[-1:] in ((2,), (4,)) and not list(_indexed(value, _DEPTH))


def _indexed(value: Value, depth: int) -> Iterator[int]:
    """The numbers of different indices that may be in the places where a value is one."""
    for op, operand in value.uses if depth else ():
        yield from _sizes(op, operand)
        if op.name in _PASSED_ON and not (op.name.endswith(("gather", "dynamic_slice")) and operand):
            for result in op.results:
                yield from _indexed(result, depth - 1)
        elif op.name == "stablehlo.while":
            yield from _indexed(op.blocks[1].arguments[operand], depth - 1)


def _sizes(op: Op, operand: int) -> Iterator[int]:
    """The numbers of starts from which nothing is cut off, where an operand is a start in some dimension."""
    shape = op.operands[0].shape or ()
    if op.name == "stablehlo.gather" and operand == 1:
        sizes = op.ints("slice_sizes")
        yield from (shape[d] - sizes[d] + 1 for d in _dims(op, "start_index_map"))
    elif op.name == "stablehlo.scatter" and operand == len(op.operands) // 2:
        yield from (shape[d] for d in _dims(op, "scatter_dims_to_operand_dims"))
    elif op.name == "stablehlo.dynamic_slice" and operand:
        yield shape[operand - 1] - op.ints("slice_sizes")[operand - 1] + 1
    elif op.name == "stablehlo.dynamic_update_slice" and operand > 1:
        yield shape[operand - 2] - (op.operands[1].shape or ())[operand - 2] + 1
    elif op.name == "stablehlo.compare":
        yield from _counted(op.operands[1 - operand])


def _counted(value: Value) -> Iterator[int]:
    """The end of an iota that a value is compared with, as one-hot encodings do."""
    op = value.defining_op
    while op is not None and op.name in ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.convert"):
        op = op.operands[0].defining_op
    if op is not None and op.name == "stablehlo.iota":
        yield (op.results[0].shape or ())[op.int("iota_dimension")]


def _dims(op: Op, name: str) -> list[int]:
    """A list in the dimension numbers of a gather or scatter."""
    text = str(next(v for k, v in op.attributes.items() if k.endswith("dimension_numbers")))
    _, _, rest = text.partition(f"{name} = [")
    return [int(n) for n in rest.partition("]")[0].split(",") if n.strip()]


# Whole arrays as the blocks that devices hold, and back, on the host: by what shardings mean, not by what runs.


def blocks_of(x: np.ndarray, sharding: TensorSharding | None, mesh: RefinedMesh) -> np.ndarray:
    """The blocks of all devices, `[devices, *block]`, in the order of the mesh.

    What lies behind the end of a dimension is NaN, or the largest number: nothing may depend on it. Of partial sums
    the first device along their axes has the value, and all others what adds nothing.
    """
    if sharding is None:
        return np.broadcast_to(x, (mesh.mesh.size, *x.shape))
    local = sharding.local_shape(x.shape, mesh.mesh)
    places = _places(sharding, mesh)
    first = mesh.on(sharding.mesh).block_indices(sharding.unreduced_axes) == 0
    found = np.full((mesh.mesh.size, *local), _poison(x.dtype), x.dtype)
    for device, place in enumerate(places):
        block = x[_part(place, local)]
        inside = (slice(device, device + 1), *_start(block.shape))
        found[inside] = block[None] if first[device] else identity(sharding.reduction, x.dtype)
    return found


def whole_of(
    blocks: np.ndarray, shape: Sequence[int], sharding: TensorSharding | None, mesh: RefinedMesh
) -> list[np.ndarray]:
    """The arrays of `shape` that blocks, `[devices, *block]`, make up: one for each group of devices that should hold
    the same, so that what a single device has wrong shows."""
    if sharding is None:
        return list(blocks)
    view = mesh.on(sharding.mesh)
    local, places = sharding.local_shape(shape, mesh.mesh), _places(sharding, mesh)
    unreduced = view.block_indices(sharding.unreduced_axes)
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for device, place in enumerate(places):
        rows = groups.setdefault(place, [[] for _ in range(int(unreduced.max(initial=0)) + 1)])
        rows[unreduced[device]].append(device)
    copies = min(len(row) for rows in groups.values() for row in rows)
    found = [np.zeros(tuple(shape), blocks.dtype) for _ in range(copies)]
    for place, rows in groups.items():
        part = _part(place, local)
        for copy, whole in enumerate(found):
            with np.errstate(all="ignore"):  # what lies behind the end of a dimension may be anything
                value = _combined([blocks[row[copy]] for row in rows], sharding.reduction)
            whole[part] = value[_start(whole[part].shape)]
    return found


def _places(sharding: TensorSharding, mesh: RefinedMesh) -> list[tuple[int, ...]]:
    """Per device the index of its block along each dimension."""
    view = mesh.on(sharding.mesh)
    indices = [view.block_indices(axes) for axes in sharding.axes]
    return [tuple(int(index[device]) for index in indices) for device in range(mesh.mesh.size)]


def _part(place: Sequence[int], local: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, local, strict=True))


def _start(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple([slice(0, n) for n in shape])


def _combined(terms: Sequence[np.ndarray], reduction: str) -> np.ndarray:
    if len(terms) == 1:
        return terms[0]
    stacked, dtype = np.stack(terms), terms[0].dtype
    if reduction == "sum" and dtype != np.bool_:
        wide = stacked.astype(np.float64) if dtype.kind in "fV" or dtype == ml_dtypes.bfloat16 else stacked
        return np.asarray(wide.sum(0, dtype=wide.dtype)).astype(dtype)
    if dtype == np.bool_ and reduction in ("sum", "max", "or"):
        return np.asarray(stacked.any(0))
    return np.asarray(_UFUNCS[reduction].reduce(stacked, 0))


_UFUNCS = {
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "product": np.multiply,
}


def identity(reduction: str, dtype: np.dtype) -> np.ndarray:
    """What adds nothing to a reduction of this kind."""
    if reduction in ("sum", "or", "xor"):
        return np.zeros((), dtype)
    if reduction == "product":
        return np.ones((), dtype)
    if reduction == "and":
        return np.asarray(True) if dtype == np.bool_ else np.asarray(~np.zeros((), dtype))
    return _extreme(dtype, largest=reduction == "min")


def _extreme(dtype: np.dtype, largest: bool) -> np.ndarray:
    if dtype == np.bool_:
        return np.asarray(largest)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(limits.max if largest else limits.min, dtype)
    return np.asarray(np.inf if largest else -np.inf).astype(dtype)


def _poison(dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_:
        return np.asarray(True)
    try:
        return np.asarray(ml_dtypes.iinfo(dtype).max, dtype)
    except ValueError:
        return np.asarray(np.nan).astype(dtype)
