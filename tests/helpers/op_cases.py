"""Functions of all families of ops, with arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(8, 6)), jnp.float32)
ODD = jnp.array([[np.nan, -np.inf, -0.0, 0.0], [np.inf, 1.5, -2.5, 0.5]], jnp.float32)
INTS = jnp.array([3, -1, 7, 100, -9, 0], jnp.int32)


def elementwise(x: jax.Array) -> Any:
    unary = (
        jnp.abs,
        jnp.exp,
        jnp.log,
        jnp.sin,
        jnp.cos,
        jnp.tan,
        jnp.tanh,
        jnp.sqrt,
        lax.rsqrt,
        jnp.floor,
        jnp.ceil,
        jnp.round,
        jnp.sign,
        jnp.isfinite,
        jnp.cbrt,
        jnp.expm1,
        jnp.log1p,
        lax.logistic,
        lax.erf,
        lax.erf_inv,
        lax.erfc,
        lax.lgamma,
        lax.digamma,
        lax.bessel_i1e,
        jnp.arcsin,
        jnp.arccos,
        jnp.arctan,
        jnp.sinh,
        jnp.cosh,
        jnp.arcsinh,
        jnp.arccosh,
        jnp.arctanh,
        jnp.square,
        lax.round,
        lambda v: lax.reduce_precision(v, 5, 3),
    )
    binary = (
        jnp.add,
        jnp.subtract,
        jnp.multiply,
        jnp.divide,
        jnp.maximum,
        jnp.minimum,
        jnp.power,
        lax.rem,
        jnp.arctan2,
        lax.nextafter,
        lax.eq,
        lax.ne,
        lax.lt,
        lax.le,
        lax.gt,
        lax.ge,
    )
    return [f(x) for f in unary], [f(x, x[::-1]) for f in binary], jnp.clip(x, -1, 1), jnp.where(x > 0, x, 2.0)


def integers(x: jax.Array) -> Any:
    out = []
    for dtype in (jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, jnp.int16):
        a, b = x.astype(dtype), (x % 5 + 1).astype(dtype)
        out += [
            a + b,
            a * b,
            a // b,
            a % b,
            a & b,
            a | b,
            a ^ b,
            ~a,
            a << b,
            a >> b,
            lax.clz(a),
            lax.population_count(a),
            lax.shift_right_logical(a, b),
            lax.shift_right_arithmetic(a, b),
            jnp.maximum(a, b),
            a < b,
            a.astype(bool),
            a.astype(jnp.bfloat16),
            jnp.abs(b.astype(jnp.int8)),
        ]
    return out


def booleans(x: jax.Array) -> Any:
    a, b = x > 0, x > 0.5
    return (
        a & b,
        a | b,
        a ^ b,
        ~a,
        jnp.any(a, 0),
        jnp.all(b, 1),
        a.astype(jnp.float16),
        jnp.maximum(a, b),
        a == b,
        jnp.array([True, False, True, True, False, True]) & a,
        jnp.sort(a, 0),
        jnp.sum(a),
    )


def complexes(x: jax.Array) -> Any:
    z = lax.complex(x, x[::-1])
    return (
        z * z,
        z / (z + 2),
        jnp.abs(z),
        jnp.exp(z),
        z.real,
        z.imag,
        jnp.conj(z),
        jnp.sin(z),
        z == z,
        jnp.sum(z, 0),
        z * jnp.array([1, 2j, 3, 4, 5, 6]),
        z * (1 + 2j),
        z @ z.T,
        jnp.sqrt(z),
        jnp.prod(z, 1),
        x.astype(jnp.complex64),
    )


def halves(x: jax.Array) -> Any:
    return [
        (
            v @ v.T,
            jnp.sum(v, 0),
            jnp.max(v),
            jnp.sort(v, 1),
            v * jnp.array([1, 2, 3, 4, 5, 6], v.dtype),
            jnp.tanh(v),
            jnp.cumsum(v, 0),
            jnp.arange(300, dtype=v.dtype),
            v.astype(jnp.float8_e4m3fn).astype(v.dtype),
        )
        for v in (x.astype(jnp.bfloat16), x.astype(jnp.float16))
    ]


def movement(x: jax.Array) -> Any:
    return (
        jnp.broadcast_to(x[:, None], (8, 3, 6)),
        x.reshape(4, 12),
        x.T,
        x[::-1],
        x[1:7:2, 3:],
        jnp.pad(x, 1),
        lax.pad(x, 9.0, ((1, -1, 1), (-2, 3, 0))),
        jnp.concatenate([x, x[:2]]),
        jnp.tile(x, 2),
        jnp.roll(x, 3, 0),
        lax.bitcast_convert_type(x, jnp.int32),
        lax.bitcast_convert_type(x, jnp.uint8),
        jnp.eye(6),
        jnp.stack([x, x]),
        lax.iota(jnp.float32, 7),
        x + jnp.asarray(np.arange(48.0).reshape(8, 6), jnp.float32),
        jnp.split(x, 2),
    )


def dynamic(x: jax.Array, i: jax.Array) -> Any:
    slices = [lax.dynamic_slice(x, (i[k], i[k + 1]), (3, 2)) for k in range(5)]
    updates = [lax.dynamic_update_slice(x, x[:2, :3] * 2, (i[k], i[k + 1])) for k in range(5)]
    raw = lax.dynamic_slice_p.bind(x, i[1], i[4], slice_sizes=(3, 2))
    return slices, updates, raw, lax.dynamic_update_slice_p.bind(x, x[:2], i[1], i[4])


def indexing(x: jax.Array, i: jax.Array) -> Any:
    rows = x[i], x.at[i].get(mode="fill"), x.at[i].get(mode="clip"), jnp.take(x, i, 1), x[i, i % 6], x[:, i[:2]]
    along = jnp.take_along_axis(x, jnp.argsort(x, 0), 0), jnp.take_along_axis(x, i[None] % 6, 1)
    at = x.at[i]
    updates = [
        at.add(2),
        at.max(0.5),
        at.min(0.5),
        at.multiply(3),
        at.set(0),
        at.add(2, mode="clip"),
        x.at[:, i].add(1),
        x.at[i, i % 6].add(1),
        x.at[1:3].set(7),
        x.at[i].apply(jnp.sin),
        jax.vmap(lambda r, k: r.at[k].add(1))(x, jnp.arange(8)),
        jax.vmap(lambda r: r[i])(x),
    ]
    return rows, along, updates, jax.ops.segment_sum(x, jnp.arange(8) % 3, 3), jax.grad(lambda v: jnp.sum(v[i] ** 2))(x)


def reductions(x: jax.Array) -> Any:
    custom = lax.reduce(x, jnp.float32(2), lax.add, (0,)), lax.reduce(x, jnp.float32(0), lax.mul, (1,))
    pairs = lax.reduce((x, x), (jnp.float32(0), jnp.float32(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,))
    odd = lax.reduce(x, jnp.float32(0), lambda a, b: a + b * b, (1,))
    kinds = [f(x, 0) for f in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin, jnp.mean, jnp.var)]
    ints = x.astype(jnp.int32)
    bits = [
        lax.reduce(ints, jnp.int32(n), f, (0,))
        for n, f in ((-1, lax.bitwise_and), (0, lax.bitwise_or), (0, lax.bitwise_xor))
    ]
    return custom, pairs, odd, kinds, bits, jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(x, reverse=True)


def windows(x: jax.Array) -> Any:
    pool = lambda v, f, init: lax.reduce_window(v, init, f, (3, 2), (2, 1), "SAME")  # noqa: E731
    return (
        pool(x, lax.max, -jnp.inf),
        pool(x, lax.add, 0.0),
        jax.grad(lambda v: jnp.sum(pool(v, lax.max, -jnp.inf) ** 2))(x),
    )


def dots(x: jax.Array) -> Any:
    b = jnp.stack([x, x + 1])
    return (
        x @ x.T,
        jnp.einsum("bij,bkj->bik", b, b),
        jnp.dot(x, x.T, precision="highest"),
        jnp.tensordot(x, x, 2),
        lax.dot_general(
            x.astype(jnp.int8), x.T.astype(jnp.int8), (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
        ),
        lax.dot_general(
            x.astype(jnp.bfloat16),
            x.T.astype(jnp.bfloat16),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        ),
        lax.dot_general(x, x.T, (((1,), (0,)), ((), ())), precision=lax.DotAlgorithmPreset.F32_F32_F32),
    )


def convolutions(x: jax.Array) -> Any:
    image, kernel = (
        jnp.arange(2 * 9 * 9 * 4.0).reshape(2, 9, 9, 4) / 99,
        jnp.arange(3 * 3 * 4 * 8.0).reshape(3, 3, 4, 8) / 99,
    )
    names = ("NHWC", "HWIO", "NHWC")

    def conv(k: jax.Array, **options: Any) -> jax.Array:
        options = {"window_strides": (1, 1), "padding": "SAME", **options}
        return lax.conv_general_dilated(image * x[0, 0], k, dimension_numbers=names, **options)

    gradient = jax.grad(lambda k: jnp.sum(conv(k, window_strides=(2, 2)) ** 2))(kernel)
    return (
        conv(kernel),
        conv(kernel, window_strides=(2, 1), padding="VALID"),
        conv(kernel, rhs_dilation=(2, 2)),
        conv(kernel, lhs_dilation=(2, 1), padding=((1, 2), (0, -1))),
        conv(kernel[:, :, :2], feature_group_count=2),
        conv(kernel[:, :, :1], feature_group_count=4),
        conv(kernel, batch_group_count=2),
        gradient / 1e4,
    )


def control(x: jax.Array, i: jax.Array) -> Any:
    scan = lax.scan(lambda c, r: (c * 0.5 + r, c + x[0]), x[0], x)
    loop = lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2 + x), (0, x))
    cond = lax.cond(x[0, 0] > 0, lambda: x, lambda: -x)
    cases = [lax.switch(i[k], [lambda: x, lambda: x + 1, lambda: x * 2]) for k in range(5)]
    return scan, loop, cond, cases, lax.fori_loop(0, i[0], lambda k, c: c + k, x), lax.optimization_barrier((x, i))


def sorting(x: jax.Array) -> Any:
    keys = lax.sort((jnp.round(x), x), num_keys=2, dimension=0), lax.sort((jnp.round(x), x), num_keys=1)
    return (
        jnp.sort(x),
        jnp.argsort(x),
        keys,
        lax.top_k(x, 2),
        jnp.median(x, 0),
        jnp.unique(x[:, 0], size=4),
        lax.sort(x, 0),
    )


def random(x: jax.Array) -> Any:
    key = jax.random.key(7)
    k = jax.random.key(3, impl="rbg")
    return (
        jax.random.normal(key, (5,)),
        jax.random.permutation(key, 9),
        jax.random.randint(key, (4,), 0, 99),
        jax.random.bits(k, (6,)),
        jax.random.categorical(key, x),
        lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,)),
    )


def linear_algebra(x: jax.Array) -> Any:
    a = x[:6] @ x[:6].T + 6 * jnp.eye(6)
    return (
        jnp.linalg.qr(x),
        jnp.linalg.svd(x, compute_uv=False),
        jnp.linalg.eigvalsh(a),
        jnp.linalg.cholesky(a),
        jnp.linalg.solve(a, x[:6]),
        jnp.linalg.inv(a),
        jnp.linalg.det(a),
        jnp.fft.fft(x),
        jnp.fft.rfft2(x),
        jnp.fft.irfft(jnp.fft.rfft(x)),
        lax.linalg.triangular_solve(a, x[:6], left_side=True, lower=True),
    )


def network(x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        h = jax.nn.gelu(x @ w) + jax.nn.silu(x @ w)
        h = jax.nn.softmax(h) + jax.nn.log_softmax(h) + jax.nn.relu(h)
        return jnp.mean(jax.nn.standardize(h) ** 2 + jax.nn.one_hot(jnp.arange(8), 5)) + jax.nn.logsumexp(h)

    return jax.value_and_grad(loss)(jnp.ones((6, 5)) / 3)


CASES = {
    "elementwise": (elementwise, X / 3),
    "odd values": (elementwise, ODD),
    "integers": (integers, INTS),
    "booleans": (booleans, X),
    "complex": (complexes, X),
    "half floats": (halves, X),
    "movement": (movement, X),
    "dynamic slices": (dynamic, X, INTS),
    "gather and scatter": (indexing, X, INTS),
    "reductions": (reductions, X),
    "reductions of odd values": (reductions, ODD),
    "windows": (windows, X),
    "dots": (dots, X),
    "convolutions": (convolutions, X),
    "control flow": (control, X, INTS),
    "sorting": (sorting, X),
    "sorting odd values": (sorting, ODD),
    "random": (random, X),
    "linear algebra": (linear_algebra, X),
    "network": (network, X),
}


def pairs(x: jax.Array, i: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(1, 0))
    return lax.gather(x, jnp.stack([i // 2, i], 1), numbers, (1, 1), mode="promise_in_bounds")


def conv(groups: int) -> Callable[..., Any]:
    return lambda v, k: lax.conv_general_dilated(
        v, k[:, : 8 // groups], (1,), "SAME", feature_group_count=groups, dimension_numbers=("NWC", "WIO", "NWC")
    )
