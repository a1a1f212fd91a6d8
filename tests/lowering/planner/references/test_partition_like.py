"""sdy.partition_like: kernels are split as plain functions of the same arrays are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE, check

import sdy_jax as sdy
from sdy_jax.errors import SdyError, ShardingError
from sdy_jax.ir.attributes import rule_from_attribute
from sdy_jax.ir.graph import Graph


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32))  # compiles nothing


def rms_norm(x, w):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * w


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def causal(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    mask = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1), v)


def merged_heads(q, k, v):
    """Batch and heads are one dimension inside."""
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    return (jax.nn.softmax(q @ k.mT, -1) @ v).reshape(b, h, s, d)


def recurrent(x, w):
    def step(h, y):
        h = jnp.tanh(h @ w + y)
        return h, h

    return jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)[1]


def rows_one_by_one(x, w):
    return jax.lax.map(lambda row: jnp.tanh(row @ w), x)


HEADS = normal(8, 16, 8, 4)
KEYS = normal(8, 10, 8, 4)
MERGED = normal(2, 8, 4, 4)
INDICES = np.arange(48).reshape(16, 3) % 8

# Of each function: its arguments; which dimensions of which may be split, with what is sent in the end; and which may
# not, with a part of the reason.
CASES = {
    "matrix product": (
        lambda x, w: x @ w,
        (normal(16, 24), normal(24, 8)),
        {(0, 0): "", (1, 1): "", (0, 1): "all_reduce", (1, 0): "all_reduce"},
        {},
    ),
    "rms norm": (rms_norm, (normal(16, 8), normal(8)), {(0, 0): ""}, {(0, 1): "needs the sum", (1, 0): "the sum"}),
    "softmax of rows": (
        lambda x: jax.nn.softmax(x, 1),
        (normal(16, 8),),
        {(0, 0): ""},
        {(0, 1): "needs the"},
    ),
    "attention": (
        attention,
        (HEADS, KEYS, KEYS),
        {(0, 0): "", (0, 1): "", (0, 2): "", (1, 2): ""},
        {(1, 1): "needs the", (0, 3): "needs the"},
    ),
    "causal attention": (causal, (HEADS, HEADS, HEADS), {(0, 0): "", (1, 2): ""}, {(0, 1): "counts positions"}),
    "heads merged with the batch": (
        merged_heads,
        (MERGED, MERGED, MERGED),
        {(1, 0): ""},
        {(2, 2): "needs the"},
    ),
    "convolution": (
        lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"),
        (normal(8, 8, 6, 6), normal(16, 8, 3, 3)),
        {(0, 0): "", (1, 0): "", (0, 1): "all_reduce"},
        {(0, 2): "needs all of it"},
    ),
    "cumulative sum": (lambda x: jnp.cumsum(x, 0), (normal(16, 8),), {(0, 1): ""}, {(0, 0): "reduce_window"}),
    "sort": (lambda x: jnp.sort(x, 1), (normal(16, 8),), {(0, 0): ""}, {(0, 1): "needs all of it"}),
    "argmax": (lambda x: jnp.argmax(x, 1), (normal(16, 8),), {(0, 0): ""}, {(0, 1): "needs all of it"}),
    "einsum of three": (
        lambda x, y, z: jnp.einsum("abc,abd,ae->cde", x, y, z),
        (normal(8, 4, 8), normal(8, 4, 8), normal(8, 16)),
        {(0, 2): "", (1, 2): "", (2, 1): "", (0, 0): "all_reduce"},
        {},
    ),
    "the same array twice": (lambda x: x.T @ x, (normal(16, 8),), {(0, 0): "all_reduce"}, {(0, 1): "two of its dim"}),
    "loop over time": (
        recurrent,
        (normal(4, 16, 8), normal(8, 8)),
        {(0, 1): ""},
        {(0, 0): "dynamic_slice", (1, 0): "tanh"},
    ),
    "loop that maps": (rows_one_by_one, (normal(16, 8), normal(8, 8)), {(0, 0): "", (1, 1): ""}, {(0, 1): "tanh"}),
    "lookup": (
        lambda table, rows: table[rows],
        (normal(8, 16), INDICES),
        {(0, 1): "", (1, 0): ""},
        {(0, 0): "needs all of it"},
    ),
    "concatenation": (
        lambda x, y: jnp.concatenate([x, y], 1),
        (normal(16, 8), normal(16, 16)),
        {(0, 0): ""},
        {(0, 1): "needs all of it"},
    ),
    "dimensions that are merged": (
        lambda x: jnp.tanh(x.reshape(-1, x.shape[-1])),
        (normal(8, 4, 16),),
        {(0, 0): "", (0, 2): ""},
        {},
    ),
    "a dimension that is split": (
        lambda x: x.reshape(-1, 2, x.shape[1]).sum(1),
        (normal(16, 8),),
        {(0, 0): "", (0, 1): ""},
        {},
    ),
    "a sum of squares": (lambda x: (x**2).sum(), (normal(16, 8),), {(0, 0): "all_reduce", (0, 1): "all_reduce"}, {}),
    "extremes": (lambda x: x.max(0), (normal(16, 8),), {(0, 0): "all_reduce", (0, 1): ""}, {}),
    "a mean": (lambda x: x.mean(0), (normal(16, 8),), {(0, 1): ""}, {(0, 0): "takes 16, on blocks 8"}),
    "a sum that is shifted": (lambda x: x.sum(0) + 1, (normal(16, 8),), {}, {(0, 0): "needs the sum"}),
    "what is rolled": (lambda x: jnp.roll(x, 1, 0), (normal(16, 8),), {(0, 1): ""}, {(0, 0): "needs all of it"}),
    "what is shifted by a pad": (
        lambda x: jax.lax.pad(x, 0.0, [(1, -1, 0), (0, 0, 0)]),
        (normal(16, 8),),
        {(0, 1): ""},
        {(0, 0): "needs all of it"},
    ),
    "a loop that ends by the values": (
        lambda x: jax.lax.while_loop(lambda y: y[0].sum() < 9, lambda y: y + 1, x),
        (normal(16, 8),),
        {},
        {(0, 0): "needs all of it", (0, 1): "needs the sum"},
    ),
    "inverses": (lambda x: jnp.linalg.inv(x), (normal(8, 4, 4),), {(0, 0): ""}, {(0, 2): "needs all of it"}),
    "random numbers": (
        lambda x, key: x * jax.random.uniform(key, x.shape),
        (normal(16, 8), jax.random.key_data(jax.random.key(1))),
        {},
        {(0, 0): "counts positions"},
    ),
}


def plain_of(name):
    fun = CASES[name][0]
    if name == "random numbers":
        return lambda x, words: fun(x, jax.random.wrap_key_data(words))
    return fun


def split_along(args, argument, dim):
    specs = [None] * len(args)
    specs[argument] = P(*[None] * dim, "x")
    return tuple(specs)


SPLITS = [(name, *place, kinds) for name, case in CASES.items() for place, kinds in case[2].items()]
WHOLES = [(name, *place, reason) for name, case in CASES.items() for place, reason in case[3].items()]


@pytest.mark.parametrize("name, argument, dim, kinds", SPLITS)
def test_a_kernel_is_split_where_its_reference_may_be(name, argument, dim, kinds):
    args = CASES[name][1]
    fun = sdy.partition_like(jax.jit(plain_of(name)), plain_of(name))
    mesh = LINE if args[argument].shape[dim] % 8 == 0 else PLANE
    specs = split_along(args, argument, dim)
    check(lambda *xs: fun(*xs), args, specs, mesh=mesh, kinds=kinds, rtol=2e-5)


@pytest.mark.parametrize("name, argument, dim, reason", WHOLES)
def test_what_stays_whole_says_why(name, argument, dim, reason):
    args = CASES[name][1]
    fun = sdy.partition_like(jax.jit(plain_of(name)), plain_of(name))

    def call(*xs):
        return fun(*xs)

    specs = split_along(args, argument, dim)
    with pytest.warns(sdy.PartitionWarning, match=f"as its reference's .*{reason}|as the reference.*{reason}"):
        found = sdy.partition(call, mesh=PLANE, in_shardings=specs, layouts="local")(*args)
    np.testing.assert_allclose(found, plain_of(name)(*args), rtol=1e-4, atol=1e-5)


def rule_of(fun, *args):
    plan = sdy.partition(lambda *xs: fun(*xs), mesh=PLANE).plan(*args)
    (op,) = [op for op in Graph(plan.program.module).ops if op.key == "sdy_jax.custom_op"]
    return str(rule_from_attribute(op.attributes["sdy.sharding_rule"])).removesuffix(", custom")


def test_the_rule_of_attention():
    fun = sdy.partition_like(jax.jit(attention), attention)
    assert rule_of(fun, HEADS, KEYS, KEYS) == (
        "([i, j, k, m], [i, n, k, o], [i, p, k, l])->([i, j, k, l]) "
        "{i=8, j=16, k=8, l=4, m=4, n=10, o=4, p=10} need_replication={m, n, o, p}"
    )


def test_heads_behind_a_batch_are_split_once_that_is():
    fun = sdy.partition_like(jax.jit(merged_heads), merged_heads)
    specs = (P("x", "y"),) * 3
    check(lambda *xs: fun(*xs), (MERGED,) * 3, specs, mesh=PLANE, kinds="", rtol=2e-5)


# Kernels.


def norm_by_grid(x, w):
    """A Pallas kernel whose body reads its grid."""

    def body(x_ref, w_ref, out_ref):
        row = x_ref[...]
        is_last = pl.program_id(0) == pl.num_programs(0) - 1
        scale = jax.lax.rsqrt(jnp.mean(row**2, -1, keepdims=True) + 1e-6)
        out_ref[...] = jnp.where(is_last, row * scale * w_ref[...], w_ref[...] * scale * row)

    rows = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    specs = {"in_specs": [rows, pl.BlockSpec(w.shape, lambda i: (0,))], "out_specs": rows}
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, grid=(x.shape[0],), out_shape=shape, interpret=True, **specs)(x, w)


def test_a_pallas_kernel_that_reads_its_grid():
    fun = sdy.partition_like(norm_by_grid, rms_norm)
    check(lambda x, w: fun(x, w), (normal(16, 8), normal(8)), (P("x"), P()), mesh=LINE, kinds="", rtol=2e-5)


def factors_by_library(x):
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", (x_type(x), jax.ShapeDtypeStruct(x.shape[:-2], jnp.int32)))
    return jnp.tril(call(x, uplo=np.uint8(ord("L")))[0])


def x_type(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def test_a_call_of_a_library():
    def reference(x):
        return jnp.linalg.cholesky(x, symmetrize_input=False)

    x = normal(16, 4, 4)
    x = x @ x.mT + jnp.eye(4)
    fun = sdy.partition_like(factors_by_library, reference)
    check(lambda x: fun(x), (x,), (P("x"),), mesh=LINE, kinds="", rtol=2e-5)


def test_a_kernel_that_takes_multiples_of_a_block():
    def kernel(x):
        assert x.shape[0] % 4 == 0, "blocks of four rows"
        return x * 2

    fun = sdy.partition_like(kernel, lambda x: x + x)
    assert rule_of(fun, normal(16, 8)) == "([ik, j])->([ik, j]) {i=4, j=8, k=4} need_replication={k}"
    check(lambda x: fun(x), (normal(16, 8),), (P("y", "x"),), mesh=PLANE, kinds="")
    check(lambda x: fun(x), (normal(16, 8),), (P("x"),), mesh=LINE)


def test_a_pallas_kernel_whose_grid_has_no_steps_for_small_blocks():
    """It raises nothing, and leaves rows out."""

    def doubled(x):
        steps = x.shape[0] // 4
        rows = pl.BlockSpec((4, x.shape[1]), lambda i: (steps - 1 - i, 0))

        def body(x_ref, out_ref):
            out_ref[...] = 2 * x_ref[...]

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, shape, grid=(steps,), in_specs=[rows], out_specs=rows, interpret=True)(x)

    fun = sdy.partition_like(doubled, lambda x: x + x)
    assert rule_of(fun, normal(16, 8)) == "([ik, j])->([ik, j]) {i=4, j=8, k=4} need_replication={k}"
    check(lambda x: fun(x), (normal(16, 8),), (P("x"),), mesh=LINE)


def test_a_kernel_that_refuses_all_blocks():
    fun = sdy.partition_like(lambda x: x * jnp.ones((16, 8)), lambda x: x + x)
    assert rule_of(fun, normal(16, 8)) == "([i, j])->([k, l]) {i=16, j=8, k=16, l=8} need_replication={i, j, k, l}"
    with pytest.warns(sdy.PartitionWarning, match="kernel refuses blocks of .8, 8.: mul got incompatible"):
        sdy.partition(lambda x: fun(x), mesh=PLANE, in_shardings=P("x")).plan(normal(16, 8))


def test_sizes_that_do_not_divide():
    fun = sdy.partition_like(jax.jit(rms_norm), rms_norm)

    def split(x, w):
        return fun(jax.lax.with_sharding_constraint(x * 2, NamedSharding(LINE, P("x"))), w)

    x, w = normal(13, 8), normal(8)
    found = sdy.partition(split, mesh=LINE, layouts="local")
    np.testing.assert_allclose(found(x, w), rms_norm(x * 2, w), rtol=1e-5)
    assert "f32[13@x,8]" in str(found.plan(x, w).table("values"))
    total = sdy.partition_like(jax.jit(lambda x: x.sum(0)), lambda x: x.sum(0))
    check(lambda x: total(x), (normal(13, 8),), (P(None, "x"),), mesh=LINE)


def test_trees_keyword_arguments_and_what_is_no_array():
    def plain(batch, *, scale, activation="tanh", power=1):
        return {"out": getattr(jnp, activation)(batch["x"] * scale) ** power, "sum": batch["x"].sum(0)}

    def kernel(batch, *, scale, activation="tanh", power=1):
        assert power == 2 and isinstance(activation, str)
        return plain(batch, scale=scale, activation=activation, power=power)

    fun = sdy.partition_like(kernel, plain)
    args = ({"x": normal(16, 8)}, jnp.float32(3))
    check(lambda b, s: fun(b, scale=s, activation="sin", power=2), args, (P("x"), P()), mesh=PLANE, rtol=1e-5)


def test_random_keys_are_split_as_their_words():
    def noisy(x, keys):
        return x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)

    fun = sdy.partition_like(jax.jit(noisy), noisy)
    keys = jax.random.split(jax.random.key(0), 16)
    check(lambda x, keys: fun(x, keys), (normal(16, 8), keys), (P("x"), P("x")), mesh=LINE, kinds="", rtol=1e-6)
    words = rule_of(fun, normal(16, 8), keys)
    assert words.startswith("([i, j], [i, k])->([i, l]) {i=16, j=8, k=2, l=8}"), words


def test_a_reference_that_calls_the_host_leaves_its_kernel_whole():
    def on_host(x):
        return jax.pure_callback(lambda y: np.sin(y), x, x)

    fun = sdy.partition_like(jnp.sin, on_host)
    with pytest.warns(
        sdy.PartitionWarning, match="as its reference's xla_ffi_python_cpu_callback at .* needs all of it"
    ):
        sdy.partition(lambda x: fun(x), mesh=LINE, in_shardings=P("x"))(normal(16, 8))


def test_floating_point_numbers_of_another_precision():
    def kernel(x, w):
        return rms_norm(x.astype(jnp.float32), w).astype(jnp.bfloat16)

    def plain(x, w):
        return rms_norm(x.astype(jnp.float32), w)

    fun = sdy.partition_like(kernel, plain)
    check(lambda x, w: fun(x, w), (normal(16, 8).astype(jnp.bfloat16), normal(8)), (P("x"), P()), kinds="")


def test_outside_of_a_partition_it_is_the_kernel():
    fun = sdy.partition_like(lambda x: x * 3, lambda x: 1 / 0)
    np.testing.assert_array_equal(fun(jnp.ones(3)), 3 * np.ones(3))
    np.testing.assert_array_equal(jax.jit(jax.vmap(fun))(jnp.ones((2, 3))), 3 * np.ones((2, 3)))
    assert fun.__name__ == "<lambda>"


# Derivatives and maps.


def with_own_derivative(kernel, plain):
    fun = jax.custom_vjp(kernel)
    fun.defvjp(lambda *xs: (kernel(*xs), xs), lambda xs, g: jax.vjp(plain, *xs)[1](g))
    return fun


def loss_of(fun):
    return lambda *xs: (fun(*xs) ** 3).sum()


def test_the_backward_pass_of_a_kernel_is_one_op():
    fun = sdy.partition_like(with_own_derivative(norm_by_grid, rms_norm), rms_norm)
    args, specs = (normal(16, 8), normal(8)), (P("x"), P())
    plan = check(jax.grad(loss_of(fun), (0, 1)), args, specs, specs, mesh=LINE, kinds="all_reduce", rtol=1e-5)
    ops = [op for op in Graph(plan.program.module).ops if op.key == "sdy_jax.custom_op"]
    assert [op.title for op in ops] == ["norm_by_grid", "vjp(norm_by_grid)"]
    both = rule_from_attribute(ops[1].attributes["sdy.sharding_rule"])
    assert both.factors_of[3] == {0, 4} and 0 not in both.factors_of[4]  # dx is split by rows, dw a sum over them
    expected = jax.grad(loss_of(rms_norm), (0, 1))(*args)
    found = sdy.partition(jax.grad(loss_of(fun), (0, 1)), mesh=LINE, in_shardings=specs)(*args)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("layouts", ["local", "global"])
@pytest.mark.parametrize("specs", [(P("x"), P("y")), (P("y", "x"), P()), (P(("x", "y")), P())])
def test_gradients_that_are_split_and_summed_by_one_op(specs, layouts):
    fun = sdy.partition_like(with_own_derivative(jax.jit(rms_norm), rms_norm), rms_norm)
    grad = jax.grad(loss_of(fun), (0, 1))
    check(grad, (normal(16, 8), normal(8)), specs, specs, mesh=PLANE, rtol=2e-5, layouts=layouts)


def test_a_kernel_without_a_derivative_has_that_of_its_reference():
    fun = sdy.partition_like(factors_by_library, jnp.linalg.cholesky)
    x = normal(16, 4, 4)
    x = x @ x.mT + jnp.eye(4)
    check(jax.grad(loss_of(fun)), (x,), (P("x"),), mesh=LINE, kinds="", rtol=1e-4)
    moved = jax.jvp(fun, (x,), (x,))[1]
    np.testing.assert_allclose(moved, jax.jvp(jnp.linalg.cholesky, (x,), (x,))[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        jax.hessian(loss_of(sdy.partition_like(jnp.sin, jnp.sin)))(jnp.ones(2)),
        jax.hessian(loss_of(jnp.sin))(jnp.ones(2)),
        rtol=1e-5,
    )


def test_integers_of_a_backward_pass_are_as_wide_as_outside():
    def pull(x, g):
        assert jnp.arange(3).dtype == jnp.int32
        return (g * 2,)

    kernel = jax.custom_vjp(lambda x: x * 2)
    kernel.defvjp(lambda x: (x * 2, x), pull)
    fun = sdy.partition_like(kernel, lambda x: x * 2)
    check(jax.grad(loss_of(fun)), (normal(16, 8),), (P("x"),), mesh=LINE, kinds="")


@pytest.mark.parametrize("derivative", ["kernel", "reference"])
def test_whose_derivative_it_is(derivative):
    kernel = with_own_derivative(jnp.sin, lambda x: 7 * jnp.sin(x))
    fun = sdy.partition_like(kernel, jnp.sin, derivative=derivative)
    factor = 7 if derivative == "kernel" else 1
    np.testing.assert_allclose(jax.grad(lambda x: fun(x).sum())(jnp.ones(4)), factor * jnp.cos(jnp.ones(4)), rtol=1e-6)


def test_integers_have_no_derivative():
    def plain(table, rows):
        return table[rows], rows + 1

    fun = sdy.partition_like(with_own_derivative(plain, plain), plain, derivative="kernel")

    def loss(table, rows):
        return (fun(table, rows)[0] ** 2).sum()

    check(jax.grad(loss), (normal(8, 16), INDICES), (P(None, "x"), P()), P(None, "x"), mesh=LINE, kinds="")


def test_a_reference_without_a_derivative_leaves_the_backward_pass_whole():
    def plain(x):
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1]

    fun = sdy.partition_like(with_own_derivative(plain, lambda x: 8 * x), plain)
    with pytest.warns(sdy.PartitionWarning, match="as the reference has no derivative: Reverse-mode"):
        found = sdy.partition(jax.grad(loss_of(fun)), mesh=LINE, in_shardings=P("x"), layouts="local")(normal(8, 4))
    np.testing.assert_allclose(found, jax.grad(lambda x: ((8 * x) ** 3).sum())(normal(8, 4)), rtol=1e-5)


def test_kernels_are_mapped():
    fun = sdy.partition_like(norm_by_grid, rms_norm)
    args = (normal(4, 16, 8), normal(8))
    check(jax.vmap(fun, (0, None)), args, (P("y", "x"), P()), mesh=PLANE, kinds="", rtol=2e-5)
    own = sdy.partition_like(with_own_derivative(jax.jit(rms_norm), rms_norm), rms_norm)
    mapped = jax.vmap(jax.grad(loss_of(own), (0, 1)), (0, None))
    check(mapped, args, (P("y", "x"), P()), mesh=PLANE, kinds="all_reduce", rtol=2e-5)


def test_kernels_in_loops_and_under_rematerialization():
    fun = sdy.partition_like(with_own_derivative(jax.jit(rms_norm), rms_norm), rms_norm)

    def net(x, ws):
        step = jax.checkpoint(lambda h, w: (fun(h, w) + h, None))
        return (jax.lax.scan(step, x, ws)[0] ** 2).sum()

    check(jax.grad(net, (0, 1)), (normal(16, 8), normal(3, 8)), (P("x"), P()), mesh=PLANE, rtol=2e-5)


# What it says.


def test_why_not_names_the_op_of_the_reference():
    fun = sdy.partition_like(jax.jit(rms_norm), rms_norm)
    plan = sdy.partition(lambda x, w: fun(x, w), mesh=PLANE, in_shardings=(P("x"), P())).plan(normal(16, 8), normal(8))
    said = str(plan.why_not("w", "y"))
    assert "`rms_norm` at " in said and "takes dim 0 of it whole, as its reference's stablehlo.add at " in said
    assert "test_partition_like.py" in said.partition("stablehlo.add at ")[2]


def test_plans_count_the_work_of_the_reference():
    fun = sdy.partition_like(jax.jit(lambda x, w: x @ w), lambda x, w: x @ w)
    plan = sdy.partition(lambda x, w: fun(x, w), mesh=LINE, in_shardings=(P("x"), P())).plan(
        normal(16, 24), normal(24, 8)
    )
    assert plan.record().flops == 2 * 16 * 24 * 8 / 8


def partitioned(kernel, reference, *args, **options):
    return sdy.partition(lambda *xs: sdy.partition_like(kernel, reference, **options)(*xs), mesh=PLANE)(*args)


def test_errors():
    x = normal(8, 4)

    def kernel(x):
        return {"out": x, "sum": x.sum(1)}

    def plain(x):
        return {"out": x, "sum": x.sum(0)}

    def plain_product(x):
        return x @ x

    with pytest.raises(ShardingError, match=r"`result\['sum'\]` is float32\[8\] by `kernel`, float32\[4\] by `plain`"):
        partitioned(kernel, plain, x)
    with pytest.raises(ShardingError, match=r"`kernel` returns `result\['sum'\]`, and `<lambda>` does not"):
        partitioned(kernel, lambda x: {"out": x}, x)
    with pytest.raises(ShardingError, match=r"is float32\[8, 4\] by `<lambda>`, int32\[8, 4\] by"):
        partitioned(lambda x: x, lambda x: x.astype(int), x)
    with pytest.raises(ShardingError, match="`plain_product` does not take its arguments: dot_general"):
        partitioned(lambda x: x, plain_product, x)
    with pytest.raises(SdyError, match="got an int as reference; expected a function"):
        sdy.partition_like(kernel, 3)
    with pytest.raises(SdyError, match="got the derivative 'mine'; it is one of 'kernel', 'reference', or None"):
        sdy.partition_like(kernel, plain, derivative="mine")
    with pytest.raises(SdyError, match="`<lambda>` closes over a traced array; to fix: make it an argument"):
        sdy.partition(lambda x, y: sdy.partition_like(lambda x: x + y, lambda x: x)(x), mesh=PLANE)(x, x)
    with pytest.raises(SdyError, match="the reference closes over a traced array; to fix: make it an argument"):
        sdy.partition(lambda x, y: sdy.partition_like(lambda x: x, lambda x: x + 0 * y)(x), mesh=PLANE)(x, x)
