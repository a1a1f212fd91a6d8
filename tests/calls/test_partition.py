"""Numbers: functions of every op family, partitioned over eight devices in several ways, against the plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.testing import assert_same

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ints(high, *shape):
    return RNG.integers(0, high, shape).astype(np.int32)


X, Y, W = floats(8, 16), floats(8, 16), floats(16, 8)
IMAGE, KERNEL = floats(8, 8, 8, 4), floats(3, 3, 4, 8)
ROWS = P("data", None)
COLUMNS = P(None, "model")
BOTH = P("data", "model")
STACKED = P(("model", "data"), None)
MATRICES = [ROWS, COLUMNS, BOTH, STACKED, '[{"model":(1)2}, {"model":(2)2, ?}]', None]


def several(x):
    """Element-wise ops of several kinds and dtypes."""
    y = jnp.tanh(x) * 2 + jnp.where(x > 0, x, jnp.exp(x)) - jnp.clip(x, -1, 1)
    return y, (x > 0) & (y < 1), jnp.round(x).astype(jnp.int32) // 2, x.astype(jnp.bfloat16) * 3, jnp.sign(x) % 2


ONE_MATRIX = {
    "elementwise": several,
    "transpose": lambda x: x.T @ x,
    "matrix product": lambda x: x @ x.T,
    "reshape": lambda x: (x.reshape(4, 2, 16), x.reshape(8, 4, 4).sum(2), x.reshape(-1), x[None], x.reshape(16, 8)),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None, :], (8, 3, 16)) + x.sum(0),
    "reduce": lambda x: (x.sum(), x.max(0), x.min(1), x.mean(), x.prod(1), (x > 0).any(0), (x > 9).all(), x.argmax(1)),
    "variance": lambda x: (x.var(0), x.std(1), jax.nn.softmax(x), jax.nn.logsumexp(x, axis=0)),
    "slice": lambda x: (x[2:6], x[:, ::2], x[::-1], x[:, 3], jnp.roll(x, 3, 1)),
    "pad": lambda x: (jnp.pad(x, ((1, 2), (0, 0))), jnp.pad(x, ((0, 0), (3, 1)), constant_values=7)),
    "concatenate": lambda x: (jnp.concatenate([x, 2 * x], 0), jnp.concatenate([x, x[:, :4]], 1), jnp.stack([x, -x])),
    "sort": lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), jax.lax.top_k(x, 3), jnp.median(x)),
    "cumulative": lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1), jax.lax.cummax(x, 1)),
    "fft": lambda x: (jnp.fft.fft(x), jnp.fft.rfft(x, axis=0), jnp.fft.ifft(jnp.fft.fft2(x))),
    "gather": lambda x: (x[jnp.array([1, 3, 7])], x[:, jnp.array([0, 5])],
                         jnp.take_along_axis(x, jnp.argsort(x, 1), 1)),
    "scatter": lambda x: (x.at[jnp.array([1, 3, 1])].add(1.0), x.at[:, 2].set(0.0), x.at[jnp.array([0, 9])].max(0.5)),
    "dynamic slices": lambda x: (jax.lax.dynamic_slice(x, (3, 2), (4, 16)),
                                 jax.lax.dynamic_update_slice(x, -x[:2], (7, 0))),
    "iota": lambda x: x + jnp.arange(16) + jnp.arange(8)[:, None],
    "linear algebra": lambda x: (jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(8)), jnp.linalg.solve(x[:, :8], x),
                                 jnp.linalg.qr(x)[1]),
    "einsum": lambda x: (jnp.einsum("ij,kj->ik", x, x), jnp.einsum("ij,ij->", x, x),
                         jnp.einsum("ij,kl->ijkl", x, x).sum((0, 2))),
    "random": lambda x: (x + jax.random.normal(jax.random.key(3), x.shape)
                         * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape)),
    "gradient": lambda x: jax.grad(lambda y: (jnp.sin(y @ y.T) * jax.nn.gelu(y).sum(1)).sum())(x),
    "complex": lambda x: (jnp.abs(x + 1j * x[::-1]), (x + 1j) @ (x - 2j).T),
}  # fmt: skip


@pytest.mark.dear
@pytest.mark.parametrize("name", ONE_MATRIX)
def test_one_matrix(mesh, name):
    for spec in MATRICES:
        assert_same(ONE_MATRIX[name], X, mesh=mesh, in_shardings=(spec,), atol=1e-6)


def loop(x, w):
    def body(carry, row):
        carry = jnp.tanh(carry @ w + row[:8] * 0.1)
        return carry, carry.sum()

    return jax.lax.scan(body, x[:, :8], jnp.stack([w[0], w[1], w[2]]))


def branches(x, w):
    y = jax.lax.cond(x.sum() > 0, lambda a: a @ w, lambda a: (a * 2) @ w, x)
    z = jax.lax.switch(jnp.int32(x[0, 0]), [jnp.sin, jnp.cos, lambda a: -a], y)
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5), (0, z))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

TWO_MATRICES = {
    "product": lambda x, w: x @ w,
    "scan": lambda x, w: loop(x, w[:8] if w.shape[0] != 8 else w),
    "branches": branches,
    "nested jit": lambda x, w: jax.jit(lambda a, b: jax.jit(jnp.dot)(a, b) + 1)(x, w),
    "custom derivative": lambda x, w: jax.grad(lambda a: (clipped(a @ w) ** 2).sum())(x),
    "remat": lambda x, w: jax.grad(lambda b: jax.checkpoint(lambda c: jnp.tanh(x @ c))(b).sum())(w),
    "outer sum": lambda x, w: (x[:, :, None] + w[None]).sum(1),
}


@pytest.mark.parametrize("name", TWO_MATRICES)
def test_two_matrices(mesh, name):
    cases = [(ROWS, None), (BOTH, P("model", None)), (P(None, "model"), P("model", "data")), (None, P("data", "model")),
             (STACKED, COLUMNS)]  # fmt: skip
    for case in cases:
        assert_same(TWO_MATRICES[name], X, W, mesh=mesh, in_shardings=case, atol=1e-5)


@pytest.mark.dear
@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", None, None, "model"), P("model", "data")])
def test_convolution(mesh, spec):
    def conv(x, k):
        y = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y, jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    assert_same(conv, IMAGE, KERNEL, mesh=mesh, in_shardings=(spec, None), atol=1e-5)
    grads = jax.grad(lambda x, k: (conv(x, k)[1] ** 2).sum(), (0, 1))
    assert_same(grads, IMAGE, KERNEL, mesh=mesh, in_shardings=(spec, P(None, None, None, "model")), atol=1e-3)


@pytest.mark.parametrize("table", [P("model"), P(None, "model"), P("data", "model"), None])
def test_embedding_and_its_gradient(mesh, table):
    def loss(t, ids):
        return (t[ids] * 0.5).sum(), jax.grad(lambda u: (u[ids] ** 2).sum())(t)

    assert_same(loss, floats(16, 8), ints(16, 8, 3), mesh=mesh, in_shardings=(table, P("data")))


@pytest.mark.parametrize("shape", [(7, 16), (8, 5), (3, 3), (1, 1)])
def test_sizes_that_do_not_divide(mesh, shape):
    x = floats(*shape)
    assert_same(lambda a: (jnp.tanh(a) @ a.T, a.sum(0)), x, mesh=mesh, in_shardings=(BOTH,), atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "bfloat16", "float16", "complex64", "float8_e4m3fn"])
def test_dtypes(mesh, dtype):
    x = jnp.asarray(ints(2, 8, 16)).astype(dtype)
    assert_same(lambda a: (a[::-1], a.T, jnp.stack([a, a])), x, mesh=mesh, in_shardings=(BOTH,))
    if dtype not in ("bool", "float8_e4m3fn"):
        assert_same(lambda a: (a + a, a.sum(), a @ a.T), x, mesh=mesh, in_shardings=(BOTH,))
    if dtype == "bool":
        assert_same(lambda a: (a.any(), a.all(1), a.sum(), a ^ a[::-1]), x, mesh=mesh, in_shardings=(BOTH,))


def test_a_transform_keeps_its_layout_between_collectives_that_want_another(mesh):
    def body(z):
        y = jnp.fft.fft(jax.lax.all_gather(z, "data", axis=1, tiled=True))
        piece = jax.lax.dynamic_slice_in_dim(y, jax.lax.axis_index("data") * 5, 5, 1)
        return jax.lax.all_gather(piece, "data", axis=1, tiled=True)

    specs = {"in_specs": P(None, "data"), "out_specs": P(), "check_vma": False}
    f = sdy.partition(lambda z: jax.shard_map(body, **specs)(z), mesh=mesh)
    z = np.arange(60, dtype=np.complex64).reshape(6, 10)
    np.testing.assert_allclose(f(z), np.fft.fft(z), rtol=1e-4, atol=1e-3)


def test_out_shardings_are_obeyed(mesh):
    f = sdy.partition(lambda x, w: x @ w, mesh=mesh, in_shardings=(COLUMNS, P("model", None)), out_shardings=BOTH)
    assert f(X, W).sharding.spec == BOTH
    assert [c.kind for c in f.plan(X, W).collectives] == ["reduce_scatter", "all_slice"] or f.plan(
        X, W
    ).wire_bytes < 400
    np.testing.assert_allclose(f(X, W), X @ W, rtol=1e-4, atol=1e-5)


def test_partitioned_module_parses_and_verifies(mesh):
    from jax.extend.mlir import ir
    from jax.interpreters import mlir

    plan = sdy.partition(TWO_MATRICES["scan"], mesh=mesh, in_shardings=(BOTH, P("model")), on_unknown="ignore").plan(
        X, W
    )
    with mlir.make_ir_context():
        for stage in plan.stages:
            assert ir.Module.parse(plan.mlir(stage)).operation.verify()


def test_an_op_without_a_rule_is_computed_replicated_and_named(mesh):
    f = sdy.partition(lambda x: jnp.linalg.svd(x, compute_uv=False), mesh=mesh, in_shardings=(BOTH,))
    with pytest.warns(sdy.PartitionWarning, match="lapack_sgesdd_ffi"):
        result = f(X)
    np.testing.assert_allclose(result, np.linalg.svd(X, compute_uv=False), rtol=1e-4)
    assert "lapack_sgesdd_ffi" in str(f.plan(X)) and "test_partition.py" in str(f.plan(X))
    strict = sdy.partition(
        lambda x: jnp.linalg.svd(x, compute_uv=False), mesh=mesh, in_shardings=(BOTH,), on_unknown="error"
    )
    with pytest.raises(sdy.UnsupportedError, match="lapack_sgesdd_ffi"):
        strict(X)


def test_a_call_that_nobody_wrote_a_rule_for_is_computed_replicated_and_named(mesh):
    def factor(x):
        types = [jax.ShapeDtypeStruct(*t) for t in (((8, 8), jnp.float32), ((8,), jnp.int32), ((), jnp.int32))]
        return jax.ffi.ffi_call("lapack_sgetrf_ffi", types)(x @ x.T + 9 * jnp.eye(8))[0]

    jax.scipy.linalg.lu_factor(jnp.eye(2))  # jax registers LAPACK's kernels when it first needs one
    with pytest.warns(sdy.PartitionWarning, match=r"test_partition.py:\d+: lapack_sgetrf_ffi: has no sharding rule"):
        plan = assert_same(factor, X, mesh=mesh, in_shardings=(BOTH,), on_unknown="warn", atol=1e-5)
    assert "lapack_sgetrf_ffi: has no sharding rule, so every device computes all of it" in str(plan)


def test_composites_and_empty_arrays(mesh):
    composite = jax.lax.composite(lambda x: jnp.sin(x) * 2, name="my.op")
    assert_same(lambda x: (composite(x), x[:0] * 2, x[:, :0].sum(1)), X, mesh=mesh, in_shardings=(BOTH,))


def test_a_mesh_of_other_devices_is_refused_with_both_meshes_named(mesh):
    other = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",)), P("x"))

    def constrained(x):
        return jax.lax.with_sharding_constraint(x * 2, other) + 1

    with pytest.raises(sdy.SdyError, match=r'"x"=4.*"data"=2'):
        sdy.partition(constrained, mesh=mesh)(X)
