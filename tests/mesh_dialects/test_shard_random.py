"""Random calls of the dialects' ops against a model in NumPy, and their derivatives, under `vmap` too."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import shard_model as model
from shard_devices import run_stacked, stacked

import sdy_jax as sdy

GRIDS = [(2, 4), (2, 2, 2), (2, 1, 1, 4), (3,), (3, 2)]
OPS = [
    "all_gather",
    "all_reduce",
    "all_slice",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send_recv",
    "shift",
    "update_halo",
]
DTYPES = ["int32", "int8", "uint8", "float32", "float16", "bfloat16", "bool", "complex64", "int4"]


def drawn(rng, sizes, op, dtype):
    """Random parameters of an op, and inputs for them."""
    axes = [int(axis) for axis in rng.permutation(len(sizes))[: rng.integers(0, len(sizes) + 1)]]
    group = math.prod(sizes[axis] for axis in axes)
    shape = [int(n) for n in rng.integers(1, 4, rng.integers(1, 4))]
    kwargs = {"grid_axes": axes}
    if op in ("all_gather", "gather"):
        kwargs["gather_axis"] = int(rng.integers(len(shape)))
    for name in {"all_slice": ["slice_axis"], "all_to_all": ["split_axis"]}.get(
        op, ["scatter_axis"] * ("scatter" in op)
    ):
        kwargs[name] = int(rng.integers(len(shape)))
        shape[kwargs[name]] *= group
    if op == "all_to_all":
        kwargs["concat_axis"] = int(rng.integers(len(shape)))
    if op in ("broadcast", "gather", "reduce", "scatter"):
        kwargs["root"] = device(rng, sizes, axes)
    if "reduce" in op:
        kwargs["reduction"] = str(rng.choice(kinds(dtype)))
    if op == "send_recv":
        kwargs |= {"source": device(rng, sizes, axes), "destination": device(rng, sizes, axes)}
    if op == "shift":
        axes = axes or [0]
        axis = int(rng.choice(axes))
        offset = int(rng.integers(-sizes[axis] - 1, sizes[axis] + 2))
        kwargs = {"grid_axes": axes, "shift_axis": axis, "offset": offset, "rotate": bool(rng.integers(2))}
    if op == "update_halo":
        kwargs, shape = drawn_halo(rng, sizes, axes)
    values = rng.normal(0, 3, (math.prod(sizes), *shape)) + 1j * rng.normal(0, 3, (math.prod(sizes), *shape))
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else ml_dtypes.int4 if dtype == "int4" else np.dtype(dtype)
    return kwargs, as_type(values, dtype)


def device(rng, sizes, axes):
    return [int(rng.integers(sizes[axis])) for axis in axes]


def drawn_halo(rng, sizes, axes):
    cut = int(rng.integers(len(axes) + 1))
    lists = [axes[:cut], axes[cut:]]
    halos, shape = [], []
    for split in lists:
        lo, hi = (int(n) for n in rng.integers(0, 3, 2)) if split else (0, 0)
        halos += [lo, hi] if split else []
        shape.append(lo + hi + max(lo, hi, 1) + int(rng.integers(2)))
    return {"split_axes": lists, "halo_sizes": halos}, shape


def kinds(dtype):
    if dtype == "bool":
        return sorted(set(model.COMBINE) - {"average"})
    if dtype == "complex64":
        return ["average", "product", "sum"]
    if "float" in dtype:
        return ["average", "max", "min", "product", "sum"]
    return sorted(model.COMBINE)


def as_type(values, dtype):
    if np.dtype(dtype) == np.bool_:
        return values.real > 0
    if dtype == np.uint8:
        return np.abs(values.real).astype(dtype)
    return values.astype(dtype) if dtype == np.complex64 else np.trunc(values.real).astype(np.int8).astype(dtype)


@pytest.mark.dear
@pytest.mark.parametrize("sizes", GRIDS, ids=lambda sizes: "x".join(map(str, sizes)))
def test_random_calls_are_those_of_the_model(sizes):
    check(sizes, np.random.default_rng(sizes))


def fuzz(seed):
    check(GRIDS[seed % len(GRIDS)], np.random.default_rng(seed))
    return {"numeric": 96}


def check(sizes, rng):
    cases = []
    for number in range(96):
        op = OPS[number % len(OPS)]
        dtype = "int32" if number % 2 else str(rng.choice(DTYPES))
        cases.append((op, *drawn(rng, sizes, op, dtype)))
    results = run_stacked(sizes, [(partial(getattr(sdy.shard, op), **kwargs), xs) for op, kwargs, xs in cases])
    for (op, kwargs, xs), result in zip(cases, results, strict=True):
        expected = getattr(model, op)(xs, sizes, **kwargs)
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape), (op, kwargs)
        exact = xs.dtype.kind in "biu" or xs.dtype == ml_dtypes.int4 or "reduc" not in op
        tolerance = 0 if exact else {2: 2e-2}.get(xs.dtype.itemsize, 1e-5)
        np.testing.assert_allclose(
            result.astype(np.complex64),
            expected.astype(np.complex64),
            rtol=tolerance,
            err_msg=f"{op} {kwargs} {xs.dtype}",
        )


def conversions():
    """(from, to, kind): every pair of these types that a kind can be said for."""
    types = ["int8", "int32", "float32", "bfloat16", "bool"]
    return [(a, b, kind) for a in types for b in types if a != b for kind in kinds(b) if b != "bool" or a == "int8"]


def test_terms_are_converted_before_they_are_combined():
    rng = np.random.default_rng(0)
    cases = []
    for source, target, kind in conversions():
        xs = as_type(rng.normal(0, 3, (4, 2)) + 0j, ml_dtypes.bfloat16 if source == "bfloat16" else np.dtype(source))
        if source == "float32":
            xs = xs + np.float32(0.75) * (-1) ** np.arange(4)[:, None].astype(np.float32)
        if source == "int32" and kind in ("sum", "max", "bitwise_xor"):
            xs = xs + 2**24
        dtype = ml_dtypes.bfloat16 if target == "bfloat16" else np.dtype(target)
        cases.append((xs, {"grid_axes": [0, 1], "reduction": kind, "dtype": dtype}))
    results = run_stacked((2, 2), [(partial(sdy.shard.all_reduce, **kwargs), xs) for xs, kwargs in cases])
    for (xs, kwargs), result in zip(cases, results, strict=True):
        expected = model.all_reduce(xs, (2, 2), **kwargs)
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(
            result.astype(np.float32), expected.astype(np.float32), rtol=1e-2, err_msg=f"{xs.dtype} {kwargs}"
        )


def test_the_average_of_integers_that_cannot_count_the_devices():
    xs = np.ones((8, 2), ml_dtypes.int4)  # whose sum wraps to -8
    average = partial(sdy.shard.all_reduce, grid_axes=0, reduction="average")
    (result,) = run_stacked((8,), [(average, xs)])
    assert result.dtype == ml_dtypes.int4
    assert result.astype(int).tolist() == [[-1, -1]] * 8


LINEAR = [
    ("all_gather", {"grid_axes": [1, 0], "gather_axis": 1}, (2, 3)),
    ("all_reduce", {"grid_axes": [1]}, (3,)),
    ("all_reduce", {"grid_axes": [0, 1], "reduction": "average"}, (3,)),
    ("all_slice", {"grid_axes": [1, 0], "slice_axis": 0}, (8, 2)),
    ("all_to_all", {"grid_axes": [1, 0], "split_axis": 0, "concat_axis": 1}, (8, 2)),
    ("broadcast", {"grid_axes": [1], "root": [2]}, (3,)),
    ("gather", {"grid_axes": [1], "gather_axis": 0, "root": [2]}, (3,)),
    ("reduce", {"grid_axes": [1, 0], "root": [2, 1]}, (3,)),
    ("reduce_scatter", {"grid_axes": [1, 0], "scatter_axis": 0}, (8, 2)),
    ("scatter", {"grid_axes": [1, 0], "scatter_axis": 0, "root": [2, 1]}, (8, 2)),
    ("send_recv", {"grid_axes": [1, 0], "source": [3, 0], "destination": [1, 1]}, (3,)),
    ("shift", {"shift_axis": 1, "offset": 1}, (3,)),
    ("shift", {"shift_axis": 1, "offset": -1, "rotate": True}, (3,)),
    ("update_halo", {"split_axes": [[0], [1]], "halo_sizes": [1, 2, 1, 0]}, (6, 3)),
]
CURVED = [
    (op, {"grid_axes": [1, 0], "reduction": kind, **({"scatter_axis": 0} if op == "reduce_scatter" else {})}, (8, 2))
    for op in ("all_reduce", "reduce_scatter")
    for kind in ("max", "min", "product")
]


def ring(x):
    me, size = sdy.shard.process_multi_index(1)[0], 4
    return sdy.shard.send_recv(x, grid_axes=1, source=[(me - 1) % size], destination=[(me + 1) % size])


@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_are_those_of_the_model(check_vma):
    """Along random directions: of a sum of all results with random weights, forward and backward."""
    sizes, rng = (2, 4), np.random.default_rng(1)
    functions, models, inputs = [ring], [partial(model.shift, shift_axis=1, offset=1, rotate=True)], [(3,)]
    for op, kwargs, shape in LINEAR + CURVED:
        functions.append(partial(getattr(sdy.shard, op), **kwargs))
        models.append(partial(getattr(model, op), **kwargs))
        inputs.append(shape)
    xs = [rng.uniform(1, 2, (8, *shape)).astype(np.float32) for shape in inputs]
    tangents = [rng.normal(size=x.shape).astype(np.float32) for x in xs]
    run = stacked(sizes, functions, check_vma=check_vma)
    out, forward, backward = jax.jit(lambda xs, ts: derivatives(run, xs, ts))(xs, tangents)
    for number, (x, t, of) in enumerate(zip(xs, tangents, models, strict=True)):
        x64, t64, step = x.astype(np.float64), t.astype(np.float64), 1e-6
        expected = (of(x64 + step * t64, sizes) - of(x64 - step * t64, sizes)) / (2 * step)
        np.testing.assert_allclose(out[number], of(x64, sizes), rtol=1e-4)
        np.testing.assert_allclose(forward[number], expected, rtol=2e-3, atol=2e-3, err_msg=str(of))
        np.testing.assert_allclose(np.vdot(backward[number], t), np.vdot(weights(out[number]), expected), rtol=1e-3)


def weights(y):
    return np.linspace(-1, 2, y.size, dtype=np.float32).reshape(y.shape)


def derivatives(run, xs, tangents):
    out, forward = jax.jvp(lambda *xs: run(*xs), tuple(xs), tuple(tangents))
    _, pull = jax.vjp(lambda *xs: run(*xs), *xs)
    return out, forward, pull([jnp.asarray(weights(y)) for y in out])


def test_equal_extremes_share_their_derivative_and_second_derivatives_are_zero():
    def run(xs):
        return stacked((4,), [partial(sdy.shard.all_reduce, grid_axes=0, reduction="max")])(xs)[0].sum() / 4

    xs = jnp.array([[1.0], [3.0], [3.0], [2.0]])
    assert jax.jit(jax.grad(run))(xs)[:, 0].tolist() == [0, 0.5, 0.5, 0]
    assert not np.any(jax.jit(jax.hessian(run))(xs))


def test_vmap_maps_every_op():
    """Over an outer dimension, of a stack of inputs."""
    sizes, rng = (2, 4), np.random.default_rng(2)
    cases = LINEAR + CURVED
    functions = [jax.vmap(partial(getattr(sdy.shard, op), **kwargs), in_axes=-1, out_axes=0) for op, kwargs, _ in cases]
    xs = [rng.uniform(1, 2, (8, *shape, 3)).astype(np.float32) for _, _, shape in cases]
    results = run_stacked(sizes, list(zip(functions, xs, strict=True)))
    for (op, kwargs, _), x, result in zip(cases, xs, results, strict=True):
        for lane in range(3):
            expected = getattr(model, op)(x[..., lane], sizes, **kwargs)
            np.testing.assert_allclose(result[:, lane], expected, rtol=1e-4, err_msg=op)
