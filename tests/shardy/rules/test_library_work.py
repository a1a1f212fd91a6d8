"""How many operations calls of LAPACK and its like perform, and what plans make of that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.shardy.rules.op_attributes import operations_of, operations_of_library

linalg = lax.linalg
F32 = np.float32


def of_matrix(function, *rest, **options):
    return lambda x: function(x, *rest, **options)


def reflected(x):
    reflectors, scales = jnp.linalg.qr(x, mode="raw")
    return linalg.ormqr(jnp.swapaxes(reflectors, -1, -2), scales, x)


def tridiagonal(x):
    return linalg.tridiagonal_solve(x[..., 0], x[..., 1] + 5, x[..., 2], x)


CALLS = {
    "gesdd": (of_matrix(linalg.svd, full_matrices=False), 22),
    "gesdd values": (of_matrix(linalg.svd, compute_uv=False), 8 / 3),
    "syevd": (linalg.eigh, 9),
    "geev": (linalg.eig, 25),
    "geev values": (
        of_matrix(linalg.eig, compute_left_eigenvectors=False, compute_right_eigenvectors=False),
        10,
    ),
    "gees": (linalg.schur, 25),
    "gees values": (of_matrix(linalg.schur, compute_schur_vectors=False), 10),
    "gehrd": (linalg.hessenberg, 10 / 3),
    "sytrd": (linalg.tridiagonal, 4 / 3),
    "getrf": (linalg.lu, 2 / 3),
    "geqp3": (of_matrix(linalg.qr, pivoting=True), 4 / 3),
    "mqr": (reflected, 2),
}


def called(function, *shape, target):
    """The operations of the call of a function's program whose target has this name in it."""
    module = jax.jit(function).lower(jax.ShapeDtypeStruct(shape, F32)).compiler_ir()
    with module.context:
        found = [op for op in Graph(module.operation).ops if target in op.text("call_target_name")]
        assert len(found) == 1, [op.text("call_target_name") for op in Graph(module.operation).ops]
        return operations_of(found[0])


@pytest.mark.parametrize("name", CALLS)
def test_decompositions_are_cubic(name):
    function, factor = CALLS[name]
    target = name.split()[0]
    assert called(function, 12, 12, target=target) == pytest.approx(factor * 12**3)
    assert called(function, 24, 24, target=target) == pytest.approx(factor * 24**3)
    assert called(function, 5, 12, 12, target=target) == pytest.approx(5 * factor * 12**3)


def test_of_tall_and_wide_matrices_the_shorter_side_counts_twice():
    for shape in ((1000, 10), (10, 1000)):
        assert called(of_matrix(linalg.svd, compute_uv=False), *shape, target="gesdd") == pytest.approx(4e5, rel=0.01)
        assert called(linalg.lu, *shape, target="getrf") == pytest.approx(1e5, rel=0.01)


def test_tridiagonal_systems_are_linear():
    for n, columns, batch in ((640, 4, ()), (1280, 4, ()), (640, 8, (3,))):
        found = called(tridiagonal, *batch, n, columns, target="gtsv")
        assert found == n * (4 + 7 * columns) * (batch[0] if batch else 1)


def spline(x, y, q):
    """A natural cubic spline through points with several values each."""
    h = jnp.diff(x)
    slopes = jnp.diff(y, axis=0) / h[:, None]
    middle = jnp.concatenate([jnp.ones(1), 2 * (h[1:] + h[:-1]), jnp.ones(1)])
    lower, upper = (jnp.concatenate([jnp.zeros(1), side, jnp.zeros(1)]) for side in (h[:-1], h[1:]))
    bent = jnp.pad(6 * jnp.diff(slopes, axis=0), ((1, 1), (0, 0)))
    m = linalg.tridiagonal_solve(lower, middle, upper, bent)
    i = jnp.clip(jnp.searchsorted(x, q) - 1, 0, len(x) - 2)
    t, h = (q - x[i])[:, None], h[i][:, None]
    found = (
        y[i] + t * (slopes[i] - h * (2 * m[i] + m[i + 1]) / 6) + t**2 * m[i] / 2 + t**3 * (m[i + 1] - m[i]) / (6 * h)
    )
    return (found**2).sum()


def solved(dl, d, du, b, c):
    return linalg.tridiagonal_solve(dl, d, du, b), c.sum()


RNG = np.random.default_rng(3)
SYSTEM = [RNG.uniform(size=640).astype(F32) + i % 2 * 5 for i in range(3)] + [RNG.uniform(size=(640, 4)).astype(F32)]
POINTS = [np.sort(RNG.uniform(size=640)).cumsum().astype(F32), RNG.uniform(size=(640, 4)).astype(F32)]


OF_SYSTEM = (solved, (*SYSTEM, RNG.uniform(size=(64, 640)).astype(F32)))
OF_SPLINE = (spline, (*POINTS, RNG.uniform(10, 200, size=512).astype(F32)))


@pytest.mark.dear
@pytest.mark.parametrize(
    "function, args, machine, most",
    [
        (*OF_SYSTEM, "h100", 4),  # four bytes are summed over two devices
        (*OF_SYSTEM, None, 7),  # or over all eight
        (*OF_SPLINE, "h100", 4),
        (*OF_SPLINE, None, 775),  # to compute a third of what op by op is computed
    ],
    ids=["system h100", "system cpu", "spline h100", "spline cpu"],
)
def test_right_hand_sides_of_cheap_systems_are_not_sent(mesh, function, args, machine, most):
    costs = None if machine is None else sdy.CostModel.of_machine(machine, mesh.axis_names)
    f = sdy.partition(function, mesh=mesh, in_shardings=(None,) * (len(args) - 1) + (P("data"),), costs=costs)
    assert f.plan(*args).wire_bytes <= most
    for found, wanted in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_calls_of_no_library_have_no_count():
    module = """
        func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
          %y = stablehlo.custom_call @mine(%x) : (tensor<8x8xf32>) -> tensor<8x8xf32>
          return %y : tensor<8x8xf32>
        }"""
    with jax.interpreters.mlir.make_ir_context():
        (call,) = [op for op in Graph(ir.Module.parse(module).operation).ops if op.name == "stablehlo.custom_call"]
        assert operations_of_library(call) is None and operations_of(call) == 0
