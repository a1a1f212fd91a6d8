"""Small programs of one op each, with dimensions split that a window, an offset, an order or an uneven size cuts.

Each is an ordinary function with boundary shardings; `split` states shardings inside, also such that do not divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from workloads import MESHES

Tree = Any

_MESH: ContextVar[jax.sharding.Mesh | None] = ContextVar("_MESH", default=None)


@contextmanager
def split_over(mesh: jax.sharding.Mesh | None) -> Iterator[None]:
    """Within this context `split` constrains values to a mesh."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def split(x: jax.Array, *spec: Any) -> jax.Array:
    """A value split like `P(*spec)` in programs on a mesh; the plain function leaves it alone."""
    mesh = _MESH.get()
    return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


@dataclass(frozen=True)
class Case:
    """A function with arguments and the PartitionSpecs of arguments and results.

    `bound`: the least that a device has to send, in bytes, as far as it is known. `only_moves`: the function only moves
    elements, so that the bound follows from their places. `mesh`: a name in `MESHES`.
    """

    name: str
    function: Callable[..., Tree]
    arguments: tuple[np.ndarray, ...]
    ins: tuple[P, ...]
    outs: Tree
    bound: float | None
    mesh: str
    only_moves: bool

    def least_bytes(self) -> float | None:
        """The least that a device has to send; None where that is not known. Stated bounds of what only moves are those
        of places that are known at run time."""
        if self.bound is not None or not self.only_moves:
            return self.bound
        sizes, axes = MESHES[self.mesh]
        return least_moved(self.function, self.arguments, self.ins, self.outs, dict(zip(axes, sizes, strict=True)))


def case(
    name: str,
    function: Callable[..., Tree],
    *arguments: np.ndarray,
    ins: P | Sequence[P] = P("a"),
    outs: Tree = P("a"),
    bound: float | None = None,
    mesh: str = "8",
    moves: bool = False,
) -> Case:
    """A `Case`; one specification for `ins` is that of all arguments."""
    each = (ins,) * len(arguments) if isinstance(ins, P) else tuple(ins)
    return Case(name, function, arguments, each, outs, bound, mesh, moves)


moved = partial(case, moves=True)


# --- lower bounds -----------------------------------------------------------------------------------------------------

G = 8
"""The devices of every mesh."""


def reduced(whole: float) -> float:
    """All-reduce of so many bytes among all devices."""
    return 2 * scattered(whole)


def scattered(whole: float) -> float:
    """Reduce-scatter of so many bytes, or an all-to-all of as large a block, among all devices."""
    return (G - 1) / G * whole


def gathered(block: float) -> float:
    """All-gather of blocks of so many bytes among all devices."""
    return (G - 1) * block


def least_moved(
    function: Callable[..., Tree],
    arguments: Sequence[np.ndarray],
    ins: Sequence[P],
    outs: Tree,
    sizes: dict[str, int],
) -> float:
    """The bytes that the busiest device has to receive, or to send, if `function` only moves elements.

    The function runs on indices of elements, counted from 1, instead of elements; what is not among these is fill.

    >>> least_moved(lambda x: x[::-1], [np.zeros(16, np.float32)], [P("a")], P("a"), {"a": 8})
    8.0
    """
    starts = np.cumsum([1, *(x.size for x in arguments)])
    numbered = [
        np.arange(start, start + x.size, dtype=np.int32).reshape(x.shape)
        for start, x in zip(starts, arguments, strict=False)
    ]
    held = _by_device(numbered, ins, sizes)
    results = function(*map(jnp.asarray, numbered))
    specs = jax.tree.leaves(jax.tree.broadcast(outs, results))
    wanted = _by_device([np.asarray(y) for y in jax.tree.leaves(results)], specs, sizes)
    missing = [np.setdiff1d(want[want > 0], have) for want, have in zip(wanted, held, strict=True)]
    anywhere = np.unique(np.concatenate(missing)) if missing else np.zeros(0, np.int32)
    receives = max(map(len, missing))
    # What only one device has, that one must send.
    count = np.bincount(np.concatenate([np.unique(have) for have in held]), minlength=int(starts[-1]))
    sends = max(len(np.intersect1d(have, anywhere[count[anywhere] == 1])) for have in held)
    return float(max(receives, sends) * arguments[0].dtype.itemsize)


def _by_device(arrays: Sequence[np.ndarray], specs: Sequence[P], sizes: dict[str, int]) -> list[np.ndarray]:
    """Per device, the elements of its blocks of some arrays."""
    places = [dict(zip(sizes, index, strict=True)) for index in np.ndindex(*sizes.values())]
    return [
        np.concatenate([_block(x, spec, sizes, place).ravel() for x, spec in zip(arrays, specs, strict=True)])
        for place in places
    ]


def _block(x: np.ndarray, spec: P, sizes: dict[str, int], place: dict[str, int]) -> np.ndarray:
    for dim, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        shards = math.prod(sizes[axis] for axis in axes)
        index = 0
        for axis in axes:
            index = index * sizes[axis] + place[axis]
        n = -(-x.shape[dim] // shards)
        x = x.take(range(min(index * n, x.shape[dim]), min((index + 1) * n, x.shape[dim])), dim)
    return x


# --- arguments --------------------------------------------------------------------------------------------------------


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def i32(*shape: int, high: int = 100) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, high, shape).astype(np.int32)


def c64(*shape: int) -> np.ndarray:
    return f32(*shape).astype(np.complex64)


def at(index: int) -> np.ndarray:
    return np.array(index, np.int32)


ROWS, COLS, WHOLE, BOTH = P("a"), P(None, "a"), P(), P("a", "b")
X = f32(1024, 64)
ROW = 64 * 4
"""Bytes of a row of X."""


def grad(function: Callable[..., jax.Array], arguments: tuple[int, ...] = (0,)) -> Callable[..., Tree]:
    """The gradients of the sum of the squares of a function's result."""
    return jax.grad(lambda *xs: jnp.sum(function(*xs) ** 2), arguments if len(arguments) > 1 else arguments[0])


# --- slices, pads, concatenations, reversals --------------------------------------------------------------------------


def shift(x: jax.Array) -> jax.Array:
    return jnp.pad(x[:-1], ((1, 0), (0, 0)))


def stencil(x: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((1, 1), (0, 0)))
    return padded[:-2] - 2 * padded[1:-1] + padded[2:]


def laplacian(x: jax.Array) -> jax.Array:
    return sum(jnp.roll(x, step, dim) for dim in (0, 1) for step in (-1, 1)) - 4 * x


def pad_rows(low: int, high: int, interior: int = 0) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((low, high, interior), (0, 0, 0)))


def roll(x: jax.Array, shift: jax.Array) -> jax.Array:
    return jnp.roll(x, shift, 0)


def weighted_roll(x: jax.Array, shift: jax.Array) -> jax.Array:
    return roll(x, shift) * jnp.arange(1024.0)[:, None]


def slices() -> list[Case]:
    half = f32(512, 64)
    rolled = partial(moved, ins=(ROWS, WHOLE))
    return [
        moved("shift by one row", shift, X),
        moved("roll by 3", lambda x: jnp.roll(x, 3, 0), X),
        moved("roll by 300", lambda x: jnp.roll(x, 300, 0), X),
        rolled("roll by a traced shift", roll, X, at(300), bound=2 * scattered(128 * ROW)),
        rolled("roll's gradient, traced shift", grad(weighted_roll), X, at(300), bound=2 * scattered(128 * ROW)),
        rolled("roll of a line, traced shift", roll, f32(8192), at(300), bound=4 * 1024 * 4),
        moved("roll of two dims", lambda x: jnp.roll(x, (1, 2), (0, 1)), X, ins=BOTH, outs=BOTH, mesh="2x4"),
        case("stencil of 3 points", stencil, X, bound=2 * ROW),
        case("stencil's gradient", grad(stencil), X, bound=4 * ROW),
        case("stencil of two dims", laplacian, X, ins=BOTH, outs=BOTH, mesh="2x4", bound=2 * 16 * 4 + 2 * 512 * 4),
        case("diff", lambda x: jnp.diff(x, axis=0, prepend=x[:1]), X, bound=ROW),
        moved("slice [::2]", lambda x: x[::2], X),
        moved("slice [5:965:3]", lambda x: x[5:965:3], X),
        moved("slice [512:]", lambda x: x[512:], X),
        moved("slice [:512]", lambda x: x[:512], X),
        case("slice's gradient", grad(lambda x: x[512:]), X, bound=2 * 128 * ROW),
        moved("split in three", lambda x: tuple(jnp.split(x, (256, 512))), X),
        moved("pad edges", pad_rows(3, 5), X),
        moved("pad interior", pad_rows(0, 1, 1), X),
        moved("pad negative", pad_rows(-3, -5), X),
        moved("pad like edge", lambda x: jnp.pad(x, ((4, 4), (0, 0)), "edge"), X),
        moved("pad like mirror", lambda x: jnp.pad(x, ((4, 4), (0, 0)), "reflect"), X),
        moved("concatenate equal", lambda x, y: jnp.concatenate([x, y]), half, half + 1),
        moved("concatenate unequal", lambda x, y: jnp.concatenate([x, y]), f32(256, 64), f32(768, 64)),
        moved("stack and interleave", lambda x, y: jnp.stack([x, y], 1).reshape(-1, 64), X, X + 1),
        moved("repeat rows", lambda x: jnp.repeat(x, 2, 0), X),
        moved("tile", lambda x: jnp.tile(x, (2, 1)), X),
        moved("reverse", lambda x: x[::-1], X),
        moved("reverse two dims", lambda x: x[::-1, ::-1], X, ins=BOTH, outs=BOTH, mesh="2x4"),
        moved("transpose", lambda x: x.T, X),
        moved("reshape minor", lambda x: x.reshape(1024, 64), f32(128, 8, 64), ins=P(None, "a"), outs=P("a")),
    ]


# --- windows ----------------------------------------------------------------------------------------------------------

IMAGE, KERNEL = f32(4, 64, 32, 8), f32(3, 3, 8, 8)
IMAGE_ROW = 4 * 32 * 8 * 4
"""Bytes of a row of all images."""


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, dilation: int = 1, groups: int = 1) -> jax.Array:
    numbers, strides, dilations = ("NHWC", "HWIO", "NHWC"), (stride, stride), (dilation, dilation)
    return lax.conv_general_dilated(
        x, kernel, strides, "SAME", None, dilations, dimension_numbers=numbers, feature_group_count=groups
    )


def conv_transposed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(kind: str, size: int, stride: int) -> Callable[[jax.Array], jax.Array]:
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    if kind == "max":
        return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")
    return lambda x: lax.reduce_window(x, 0.0, lax.add, window, strides, "SAME") / size**2


def any_around(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x > 0, False, lax.bitwise_or, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


def windows() -> list[Case]:
    space, kernel = P(None, "a"), P()
    both = partial(case, ins=(space, kernel), outs=space)
    gradients = partial(case, ins=(space, kernel), outs=(space, kernel))
    one = partial(case, ins=space, outs=space)
    plane = partial(case, ins=(P(None, "b", "a"), kernel), outs=P(None, "b", "a"), mesh="2x4")
    of_kernel = reduced(KERNEL.nbytes)
    cols = 4 * (16 + 2) * 8 * 4
    return [
        both("conv 3x3", conv, IMAGE, KERNEL, bound=2 * IMAGE_ROW),
        both("conv stride 2", partial(conv, stride=2), IMAGE, KERNEL, bound=IMAGE_ROW),
        both("conv dilated", partial(conv, dilation=2), IMAGE, KERNEL, bound=4 * IMAGE_ROW),
        both("conv transposed", conv_transposed, IMAGE, KERNEL, bound=IMAGE_ROW),
        both("conv grouped", partial(conv, groups=4), IMAGE, f32(3, 3, 2, 8), bound=2 * IMAGE_ROW),
        both("conv depthwise", partial(conv, groups=8), IMAGE, f32(3, 3, 1, 8), bound=2 * IMAGE_ROW),
        both("conv 5x5 on single rows", conv, f32(4, 8, 32, 8), f32(5, 5, 8, 8), bound=4 * IMAGE_ROW),
        plane("conv of two dims", conv, IMAGE, KERNEL, bound=2 * 4 * 16 * 8 * 4 + cols),
        gradients("conv's gradients", grad(conv, (0, 1)), IMAGE, KERNEL, bound=4 * IMAGE_ROW + of_kernel),
        gradients("conv stride 2's gradients", grad(partial(conv, stride=2), (0, 1)), IMAGE, KERNEL),
        gradients("conv dilated's gradients", grad(partial(conv, dilation=2), (0, 1)), IMAGE, KERNEL),
        gradients("conv transposed's gradients", grad(conv_transposed, (0, 1)), IMAGE, KERNEL),
        gradients("conv grouped's gradients", grad(partial(conv, groups=4), (0, 1)), IMAGE, f32(3, 3, 2, 8)),
        case("conv of batches", conv, f32(16, 8, 8, 8), KERNEL, ins=(P("a"), kernel), bound=0),
        one("max pool 2x2", pool("max", 2, 2), IMAGE, bound=0),
        one("max pool 3x3 stride 2", pool("max", 3, 2), IMAGE, bound=IMAGE_ROW),
        one("average pool 3x3", pool("average", 3, 1), IMAGE, bound=2 * IMAGE_ROW),
        one("max pool 2x2's gradient", grad(pool("max", 2, 2)), IMAGE, bound=0),
        one("max pool 3x3's gradient", grad(pool("max", 3, 2)), IMAGE),
        one("average pool 3x3's gradient", grad(pool("average", 3, 1)), IMAGE, bound=4 * IMAGE_ROW),
        one("any around", any_around, IMAGE, bound=2 * IMAGE_ROW / 4),
    ]


# --- offsets that are not known ---------------------------------------------------------------------------------------


def scan_layers(layers: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)[0]


def decode(keys: jax.Array, values: jax.Array, new: jax.Array, index: jax.Array) -> tuple[jax.Array, ...]:
    """A step of decoding: the caches with a new row, and what attends to them."""
    keys, values = (lax.dynamic_update_slice(cache, new, (0, index, 0, 0)) for cache in (keys, values))
    scores = jnp.einsum("bhd,bshd->bhs", new[:, 0], keys)
    seen = jnp.arange(keys.shape[1]) <= index
    return keys, values, jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), values)


def offsets() -> list[Case]:
    layers, batch = f32(8, 64, 64) / 8, f32(128, 64)
    cache, new = f32(4, 1024, 8, 16), f32(4, 1, 8, 16)
    along = P(None, "a")
    return [
        case(
            "dynamic slice of a row",
            lambda x, i: lax.dynamic_slice_in_dim(x, i, 1),
            *(X, at(700)),
            ins=(ROWS, WHOLE),
            outs=WHOLE,
            bound=reduced(ROW),
        ),
        case(
            "dynamic slice of 512 rows",
            lambda x, i: lax.dynamic_slice_in_dim(x, i, 512),
            *(X, at(300)),
            ins=(ROWS, WHOLE),
        ),
        case(
            "dynamic update of a row",
            lambda x, row, i: lax.dynamic_update_slice_in_dim(x, row, i, 0),
            *(X, f32(1, 64), at(700)),
            ins=(ROWS, WHOLE, WHOLE),
            bound=0,
        ),
        case(
            "KV cache update",
            lambda x, row, i: lax.dynamic_update_slice(x, row, (0, i, 0, 0)),
            *(cache, new, at(1023)),
            ins=(along, WHOLE, WHOLE),
            outs=along,
            bound=0,
        ),
        case(
            "ring buffer",
            lambda x, row, i: x.at[:, i % 1024].set(row[:, 0]),
            *(cache, new, at(5000)),
            ins=(along, WHOLE, WHOLE),
            outs=along,
            bound=0,
        ),
        case(
            "decoding step",
            decode,
            *(cache, cache + 1, new, at(700)),
            ins=(along, along, WHOLE, WHOLE),
            outs=(along, along, WHOLE),
            bound=reduced(4 * 8 * 4 + 4 * 8 * 4 + new.nbytes),
        ),
        case("scan over layers", scan_layers, layers, batch, bound=scattered(layers.nbytes)),
        case(
            "scan over layers' gradients",
            grad(scan_layers, (0, 1)),
            *(layers, batch),
            outs=(ROWS, ROWS),
            bound=3 * scattered(layers.nbytes),
        ),
        case(
            "scan that stacks rows",
            lambda x: lax.scan(lambda carry, _: (carry * 2, carry), x, None, 16)[1],
            f32(64),
            ins=WHOLE,
            bound=0,
        ),
    ]


# --- orders -----------------------------------------------------------------------------------------------------------


def recurrence(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.associative_scan(lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1]), (a, b), axis=1)[1]


def orders() -> list[Case]:
    counts, rows, line = i32(8, 1024), f32(64, 1024), f32(8192)
    block, line_block = rows.nbytes / G, line.nbytes / G
    along = partial(case, ins=COLS, outs=COLS)
    whole = partial(case, ins=COLS, outs=WHOLE)
    return [
        along("cumsum", lambda x: jnp.cumsum(x, 1), counts, bound=gathered(8 * 4)),
        along("cumsum reverse", lambda x: lax.cumsum(x, 1, reverse=True), counts, bound=gathered(8 * 4)),
        along("cumprod", lambda x: jnp.cumprod(x, 1), counts % 3, bound=gathered(8 * 4)),
        along("cummax", lambda x: lax.cummax(x, 1), counts, bound=gathered(8 * 4)),
        along("cummax reverse", lambda x: lax.cummax(x, 1, reverse=True), counts, bound=gathered(8 * 4)),
        along("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), f32(8, 1024), bound=gathered(8 * 4)),
        along("cumsum's gradient", grad(lambda x: jnp.cumsum(x, 1)), f32(8, 1024), bound=2 * gathered(8 * 4)),
        along("linear recurrence", recurrence, f32(8, 1024) / 4, f32(8, 1024)),
        along("sort, free dim", lambda x: jnp.sort(x, 1), rows, bound=2 * scattered(block)),
        along("argsort, free dim", lambda x: jnp.argsort(x, 1), rows, bound=2 * scattered(block)),
        case("sort", jnp.sort, line, bound=6 * line_block),
        case("argsort", jnp.argsort, line),
        whole("top_k", lambda x: tuple(lax.top_k(x, 4)), f32(2, 8192), outs=(P(), P()), bound=gathered(2 * 4 * 8)),
        whole("argmax", lambda x: jnp.argmax(x, 1), f32(16, 8192), bound=scattered(16 * 8) + gathered(16 * 4 / G)),
        whole("argmin", lambda x: jnp.argmin(x, 1), i32(16, 8192), bound=scattered(16 * 8) + gathered(16 * 4 / G)),
        whole("max and min", lambda x: (x.max(1), x.min(1)), f32(16, 8192), outs=(P(), P()), bound=reduced(128)),
        case("median", lambda x: jnp.median(x, 1), rows, ins=COLS, bound=scattered(block)),
        case("quantile", lambda x: jnp.quantile(x, 0.3, 1), rows, ins=COLS, bound=scattered(block)),
        whole("unique", lambda x: jnp.unique(x, size=64, fill_value=-1), i32(4096, high=50), ins=ROWS),
        along("sort, other dim", lambda x: jnp.sort(x, 0), rows, bound=0),
    ]


# --- look-ups ---------------------------------------------------------------------------------------------------------


def rows_of(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


def one_hot_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jax.nn.one_hot(ids, table.shape[0]) @ table


def tied_loss(table: jax.Array, ids: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(jnp.tanh(table[ids]) @ table.T)
    return -jnp.take_along_axis(logits, ids[:, None], 1).mean()


def by_sorting(x: jax.Array, router: jax.Array, experts: jax.Array) -> jax.Array:
    """Every token to its best expert: sorted by expert, into slots of a fixed capacity, and back."""
    count, (tokens, d) = experts.shape[0], x.shape
    capacity = 2 * tokens // count
    chosen = jnp.argmax(x @ router, 1)
    order = jnp.argsort(chosen)
    sorted_ = chosen[order]
    slot = jnp.arange(tokens) - jnp.searchsorted(sorted_, jnp.arange(count))[sorted_]
    sent = jnp.zeros((count, capacity, d), x.dtype).at[sorted_, slot].set(x[order], mode="drop")
    back = jnp.einsum("ecd,edf->ecf", sent, experts).at[sorted_, slot].get(mode="fill", fill_value=0)
    return jnp.zeros_like(x).at[order].set(back)


def lookups() -> list[Case]:
    table, ids, updates = f32(1024, 64), i32(128, high=1024), f32(128, 64)
    segments = i32(1024, high=16)
    rows = partial(case, ins=(ROWS, ROWS))
    local = partial(case, ins=(ROWS, WHOLE, WHOLE), bound=0)
    found, wide = updates.nbytes, f32(64, 1024)
    from_shards = scattered(found) + gathered(ids.nbytes / G)
    taken = i32(64, 16, high=1024)
    return [
        rows("gather rows", rows_of, table, ids, bound=from_shards),
        case("gather rows, all", rows_of, table, ids, ins=(ROWS, WHOLE), outs=WHOLE, bound=reduced(found)),
        case("gather columns", rows_of, table, ids, ins=(COLS, WHOLE), outs=COLS, bound=0),
        rows("gather's gradient", grad(rows_of), table, ids),
        case("gather from all", rows_of, table, ids, ins=(WHOLE, ROWS), bound=0),
        case(
            "take along the split dim",
            lambda x, i: jnp.take_along_axis(x, i, 1),
            *(wide, taken),
            ins=(COLS, WHOLE),
            outs=WHOLE,
            bound=reduced(taken.nbytes),
        ),
        rows("take along the other dim", lambda x, i: jnp.take_along_axis(x, i, 1), wide, taken, bound=0),
        rows("one-hot product", one_hot_rows, table, ids, bound=from_shards),
        case(
            "segment sum", lambda x, i: jax.ops.segment_sum(x, i, 16), X, segments, outs=WHOLE, bound=reduced(16 * ROW)
        ),
        case("segment sum, split", lambda x, i: jax.ops.segment_sum(x, i, 16), X, segments, bound=scattered(16 * ROW)),
        case(
            "segment max with a NaN",
            lambda x, i: jax.ops.segment_max(x, i, 16),
            *(np.where(np.arange(len(X))[:, None] == 700, np.float32(np.nan), X), segments),
            outs=WHOLE,
            bound=reduced(16 * ROW),
        ),
        local("scatter add", lambda x, i, y: x.at[i].add(y), table, ids, updates),
        local("scatter set", lambda x, i, y: x.at[i].set(y), table, np.unique(ids), f32(len(np.unique(ids)), 64)),
        local("scatter max", lambda x, i, y: x.at[i].max(y), table, ids, updates),
        case("scatter add of split rows", lambda x, i, y: x.at[i].add(y), table, ids, updates, bound=from_shards),
        case(
            "tied embeddings' gradient",
            jax.grad(tied_loss),
            *(f32(256, 64), i32(512, high=256)),
            ins=(WHOLE, ROWS),
            outs=WHOLE,
            bound=reduced(256 * ROW),
        ),
        case(
            "expert dispatch by sorting",
            by_sorting,
            *(f32(512, 64), f32(64, 8), f32(8, 64, 64)),
            ins=(ROWS, WHOLE, ROWS),
        ),
    ]


# --- transforms and linear algebra ------------------------------------------------------------------------------------


POSITIVE = np.asarray([x @ x.T + 64 * np.eye(32, dtype=np.float32) for x in f32(8, 32, 32)])


def solve(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


def spectrum(x: jax.Array) -> jax.Array:
    """The power in each of 16 bands, all of which lie on every device."""
    power = jnp.abs(split(jnp.fft.rfft(x), "a")) ** 2
    return power[1:].reshape(16, -1).sum(1)


def qr(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tuple(jnp.linalg.qr(x))


def transforms() -> list[Case]:
    lines, real, plane, cube = c64(64, 128), f32(64, 128), c64(64, 64), c64(16, 16, 16)
    large = (f32(256, 256) @ f32(256, 256).T + 512 * np.eye(256)).astype(np.float32)
    triangle = np.tril(f32(256, 256) + 32 * np.eye(256, dtype=np.float32))
    along = partial(case, ins=COLS)
    return [
        along("fft", jnp.fft.fft, lines, outs=COLS, bound=2 * scattered(lines.nbytes / G)),
        along("rfft", jnp.fft.rfft, real, bound=scattered(real.nbytes / G)),
        along("irfft", lambda x: jnp.fft.irfft(x, 126), lines[:, :64], bound=scattered(lines.nbytes / 2 / G)),
        case("fft of 2 dims", jnp.fft.fft2, plane, bound=2 * scattered(plane.nbytes / G)),
        case("fft of 3 dims", jnp.fft.fftn, cube, bound=2 * scattered(cube.nbytes / G)),
        case("fft of 3 dims, two split", jnp.fft.fftn, cube, ins=BOTH, outs=BOTH, mesh="2x4"),
        case("fft of a line", jnp.fft.fft, c64(4096), bound=3 * scattered(4096 * 8 / G)),
        case("spectrum of a line", spectrum, f32(8192), outs=WHOLE),
        case("cholesky, batches", lax.linalg.cholesky, POSITIVE, bound=0),
        along("cholesky, rows", lax.linalg.cholesky, POSITIVE, outs=COLS, bound=2 * scattered(POSITIVE.nbytes / G)),
        case("cholesky of one", lax.linalg.cholesky, large),
        case("triangular solve, batches", solve, np.tril(POSITIVE), f32(8, 32, 16), bound=0),
        case(
            "triangular solve, columns",
            solve,
            *(triangle, f32(256, 64)),
            ins=(WHOLE, COLS),
            outs=COLS,
            bound=0,
        ),
        case("triangular solve, rows", solve, triangle, f32(256, 64)),
        case("qr, batches", qr, f32(8, 32, 16), outs=(ROWS, ROWS), bound=0),
        along("qr, rows of batches", qr, f32(8, 32, 16), outs=(COLS, WHOLE)),
        case("qr of one", qr, f32(1024, 16), outs=(ROWS, WHOLE)),
    ]


# --- random numbers ---------------------------------------------------------------------------------------------------


def randoms() -> list[Case]:
    def normal(x: jax.Array) -> jax.Array:
        return x + jax.random.normal(jax.random.key(3), x.shape)

    def dropout(x: jax.Array, seed: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape), x / 0.9, 0)

    def several(x: jax.Array, seed: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(seed), x.shape[0])
        return x + jax.vmap(lambda key: jax.random.randint(key, (64,), 0, 9))(keys)

    return [
        case("normal", normal, X, bound=0),
        case("dropout of two dims", dropout, X, at(4), ins=(BOTH, WHOLE), outs=BOTH, mesh="2x4", bound=0),
        case("a key per row", several, X, at(4), ins=(ROWS, WHOLE), bound=0),
    ]


# --- sizes that do not divide -----------------------------------------------------------------------------------------

TOKENS = f32(72, 64)
"""65 tokens and the padding with which they lie in the same blocks."""


def tokens_of(x: jax.Array, count: int = 65, dim: int = 0) -> jax.Array:
    """The first elements along a dimension, which is split: nothing moves for this if the blocks are as large."""
    return split(lax.slice_in_dim(x, 0, count, axis=dim), *(None,) * dim, "a")


def summed(
    function: Callable[[jax.Array], jax.Array], count: int = 65, dim: int = 0
) -> Callable[[jax.Array], jax.Array]:
    """A function of a value of `count` elements along a split dimension, its result split alike, summed over that."""
    return lambda x: jnp.sum(split(function(tokens_of(x, count, dim)), *(None,) * dim, "a"), axis=dim)


def layer_norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def attention(x: jax.Array) -> jax.Array:
    """Self-attention of 8 heads over [tokens, 3 * 64] queries, keys and values."""
    q, k, v = jnp.moveaxis(x.reshape(x.shape[0], 3, 8, 8), 1, 0)
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / 8**0.5)
    return jnp.einsum("hqk,khd->qhd", weights, v).reshape(x.shape[0], 64)


def of_plane(x: jax.Array) -> jax.Array:
    y = split(x[:7, :5], "a", "b")
    return jnp.sum(split(jnp.tanh(y), "a", "b"), axis=(0, 1))


def unevens() -> list[Case]:
    uneven = partial(case, outs=WHOLE)
    least, block = reduced(ROW), 9 * ROW
    weights, image = f32(64, 64), f32(4, 72, 32, 8)
    local = partial(uneven, bound=least)
    of_two = partial(uneven, ins=(ROWS, WHOLE))
    beside = partial(uneven, ins=P(None, "a"))
    into_heads = 4 * scattered(9 * 64 * 4)
    return [
        local("65 elementwise", summed(lambda x: jnp.tanh(x) * 2), TOKENS),
        of_two("65 @ weights", lambda x, w: summed(lambda x: x @ w)(x), TOKENS, weights, bound=least),
        of_two("weights @ 65", lambda x, w: summed(lambda x: (w @ x.T).T)(x), TOKENS, weights, bound=least),
        uneven("65 contracted", lambda x: tokens_of(x).T @ tokens_of(x), TOKENS, bound=reduced(64 * ROW)),
        uneven("65 softmax over", summed(lambda x: jax.nn.softmax(x, axis=0) ** 2), TOKENS, bound=3 * least),
        local("65 softmax beside", summed(jax.nn.softmax), TOKENS),
        local("65 layer norm", summed(layer_norm), TOKENS),
        uneven("65 reductions", lambda x: (tokens_of(x).max(0), tokens_of(x).min(0)), TOKENS, bound=2 * least),
        uneven("65 variance", lambda x: tokens_of(x).var(0), TOKENS, bound=2 * least),
        uneven("65 argmax", lambda x: tokens_of(x).argmax(0), TOKENS, bound=scattered(2 * ROW) + gathered(ROW / G)),
        uneven("65 attention", summed(attention), f32(72, 192), bound=into_heads + least),
        uneven("65 attention's gradient", grad(summed(attention)), f32(72, 192), outs=ROWS),
        uneven("65 transposed", lambda x: split(tokens_of(x).T, "a"), TOKENS, outs=ROWS, moves=True),
        uneven("65 to another dim", lambda x: split(jnp.tanh(tokens_of(x)), None, "a").sum(0), TOKENS, outs=ROWS),
        uneven(
            "64 patches and a class token",
            lambda x, y: split(jnp.concatenate([y, x]), "a").sum(0),
            *(f32(64, 64), f32(1, 64)),
            ins=(ROWS, WHOLE),
            bound=8 * ROW + least,
        ),
        uneven("65 shifted", summed(lambda x: shift(x) ** 2), TOKENS, bound=ROW + least),
        uneven("65 rolled", summed(lambda x: jnp.roll(x, 3, 0) * jnp.arange(65)[:, None]), TOKENS),
        uneven("65 reversed", summed(lambda x: x[::-1] * jnp.arange(65)[:, None]), TOKENS, bound=block + least),
        uneven("65 stencil", summed(lambda x: stencil(x) ** 2), TOKENS, bound=2 * ROW + least),
        uneven("65 cumsum", summed(lambda x: jnp.cumsum(x, 0) ** 2), TOKENS, bound=gathered(ROW) + least),
        uneven("65 sorted", summed(lambda x: jnp.sort(x, 0) ** 3), TOKENS, bound=scattered(block) + least),
        of_two("65 looked up", lambda x, i: tokens_of(x)[i], TOKENS, i32(16, high=65), bound=reduced(16 * ROW)),
        of_two(
            "65 scatter add",
            lambda x, i: summed(lambda x: x.at[i].add(2.0) ** 2)(x),
            *(TOKENS, i32(16, high=65)),
            bound=least,
        ),
        local("65 random", summed(lambda x: x + jax.random.normal(jax.random.key(1), x.shape)), TOKENS),
        local("7 on 8", summed(jnp.tanh, 7), f32(8, 64)),
        local("3 on 8", summed(jnp.tanh, 3), f32(8, 64)),
        local("7 x 5 on 2 x 4", of_plane, f32(8, 8, 64), ins=BOTH, mesh="2x4"),
        beside(
            "conv of 65 rows",
            lambda x, k: summed(lambda x: conv(x, k) ** 2, 65, 1)(x),
            *(image, KERNEL),
            ins=(P(None, "a"), WHOLE),
            bound=2 * IMAGE_ROW + reduced(IMAGE_ROW),
        ),
        beside("max pool of 65 rows", summed(pool("max", 2, 2), 65, 1), image),
        local("fft beside 65", summed(lambda x: jnp.abs(jnp.fft.fft(x))), TOKENS),
        local("loop over 65", summed(lambda x: lax.fori_loop(0, 4, lambda _, y: jnp.sin(y), x)), TOKENS),
    ]


def cases() -> list[Case]:
    """All of them; names are unique."""
    return [*slices(), *windows(), *offsets(), *orders(), *lookups(), *transforms(), *randoms(), *unevens()]
