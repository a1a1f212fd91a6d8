"""Decompositions and systems of matrices that stay split along their rows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import agreed, check_inside, rarely, split
from jax import lax
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE
from uneven_blocks import normal

import sdy_jax as sdy
from sdy_jax.lowering.ops import linalg, shards
from sdy_jax.lowering.targets.cost_model import CostModel

pytestmark = pytest.mark.usefixtures("poisoned_padding")


@pytest.fixture(autouse=True)
def every_matrix_is_large(monkeypatch):
    monkeypatch.setattr(linalg, "_LARGE", 1)


def complex_(*shape):
    return normal(*shape) + 1j * normal(*shape[::-1]).T


def positive(x):
    return x @ x.mT.conj() + 5 * jnp.eye(x.shape[-1], dtype=x.dtype)


def triangle(x):
    return x / x.shape[-1] + 3 * jnp.eye(x.shape[-1], dtype=x.dtype)


def factor(x):
    return lax.linalg.cholesky(x, symmetrize_input=False)


CALL, OP = "lapack_", "stablehlo.triangular_solve"
ROWS, COLUMNS = P("x"), P(None, "x")


def test_a_split_matrix_is_factored_by_columns_of_blocks():
    plan = agreed(factor, positive(normal(32, 32)), spec=ROWS, out=ROWS, rtol=1e-4)
    assert plan.wire_bytes == 7 * 7 * 4 * 4 * 4 + 7, plan


def test_a_split_system_shares_its_unknowns():
    def solve(a, b):
        return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)

    plan = agreed(solve, triangle(normal(32, 32)), normal(32, 3), spec=(ROWS, ROWS), out=ROWS, rtol=1e-4)
    assert plan.wire_bytes == 7 * 2 * 7 / 8 * 4 * 3 * 4, plan


@pytest.fixture
def work_is_expensive(monkeypatch):
    """Also in few blocks, which are more work than the whole matrix."""
    monkeypatch.setattr(linalg, "_of_cholesky", lambda *_: lambda shards: 1e9 / math.prod(shards))
    monkeypatch.setattr(linalg, "_operations", lambda is_decomposition, n, count, block: 1e3 / count**2)


MESHES = {"line": (LINE, ("x",)), "plane": (PLANE, (("y", "x"),)), "two": (PLANE, ("x",))}


@pytest.mark.usefixtures("work_is_expensive")
@pytest.mark.parametrize("size", [13, 3, *rarely(16, 17, 65)])
@pytest.mark.parametrize("mesh", MESHES)
def test_decompositions_of_uneven_matrices(size, mesh):
    mesh, spec = MESHES[mesh]
    check_inside(lambda x: factor(split(x, *spec)), positive(normal(size, size)), sent_by=CALL, mesh=mesh, rtol=1e-4)


@pytest.mark.usefixtures("work_is_expensive")
def test_padding_of_zeros_does_not_make_a_matrix_singular(monkeypatch):
    monkeypatch.setattr(shards, "padding_value", lambda dtype: jnp.zeros((), dtype))
    check_inside(lambda x: factor(split(x, "x")), positive(normal(13, 13)), sent_by=CALL, rtol=1e-4)


SIDES = [
    *[(True, True, "N"), (False, True, "T"), (True, False, "C"), (False, False, "N")],
    *rarely((True, True, "T"), (False, True, "C"), (True, False, "N"), (False, False, "T"), (False, True, "N")),
]


@pytest.mark.parametrize("setting", SIDES, ids=str)
def test_systems_of_every_side(setting):
    """The plain function reads one triangle only; nothing may leak from the other one."""
    left, lower, kind = setting

    def solve(a, b):
        a, b = (
            split(a, *(("x",) if left == (kind == "N") else (None, "x"))),
            split(b, *(("x",) if left else (None, "x"))),
        )
        settings = {"left_side": left, "lower": lower, "transpose_a": kind != "N", "conjugate_a": kind == "C"}
        return [lax.linalg.triangular_solve(a, b, **settings, unit_diagonal=unit) for unit in (False, True)]

    a = complex_(29, 29) / 29 + 3 * jnp.eye(29)
    other = jnp.triu(jnp.full_like(a, jnp.nan), 1) if lower else jnp.tril(jnp.full_like(a, jnp.nan), -1)
    b = complex_(29, 5) if left else complex_(5, 29)
    check_inside(solve, a + other, b, sent_by=CALL, rtol=1e-4)


@pytest.mark.usefixtures("work_is_expensive")
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", [jnp.complex64, *rarely(jnp.float32, jnp.float64, jnp.complex128)])
def test_either_triangle_of_batches_of_any_type(dtype, upper):
    """As above: nothing of the other triangle is read."""
    with jax.enable_x64(dtype in (jnp.float64, jnp.complex128)):
        x = positive(complex_(11, 11) if jnp.issubdtype(dtype, jnp.complexfloating) else normal(11, 11)).astype(dtype)
        other = jnp.full_like(x, jnp.nan)
        x = jnp.stack([x, 2 * x, 3 * x]) + (jnp.tril(other, -1) if upper else jnp.triu(other, 1))

        def function(x):
            x = split(x, None, "y", "x") if upper else split(x, "y", "x")
            return jnp.linalg.cholesky(x, upper=upper, symmetrize_input=False)

        check_inside(function, x, sent_by=CALL, mesh=PLANE, rtol=1e-4)


@pytest.mark.usefixtures("work_is_expensive")
@pytest.mark.parametrize("row", [*rarely(0, 4), 12])
def test_a_matrix_that_is_not_positive_is_found_in_any_block(row):
    found = check_inside(lambda x: factor(split(x, "x")), positive(normal(13, 13)).at[row, row].set(-1), sent_by=CALL)
    assert found


@pytest.mark.usefixtures("work_is_expensive")
@pytest.mark.parametrize("make", [complex_, *rarely(normal)])
def test_above_the_diagonal_a_factored_matrix_stays_as_it_is(make):
    x = positive(make(13, 13)) + jnp.triu(make(13, 13), 1)
    check_inside(lambda x: lax.linalg.cholesky_p.bind(split(x, "x")), x, sent_by=CALL, rtol=1e-4)


CHOLESKY = """
func.func @main(%a: tensor<2x16x16xf32>) -> tensor<2x16x16xf32> {{
  %0 = stablehlo.cholesky %a, lower = {lower} : tensor<2x16x16xf32>
  return %0 : tensor<2x16x16xf32>
}}
"""
SOLVE = """
func.func @main(%a: tensor<2x16x16xf32>, %b: tensor<2x16x3xf32>) -> tensor<2x16x3xf32> {
  %0 = "stablehlo.triangular_solve"(%a, %b) {left_side = true, lower = false, unit_diagonal = false,
    transpose_a = #stablehlo<transpose NO_TRANSPOSE>} : (tensor<2x16x16xf32>, tensor<2x16x3xf32>) -> tensor<2x16x3xf32>
  return %0 : tensor<2x16x3xf32>
}
"""


@pytest.mark.usefixtures("work_is_expensive")
@pytest.mark.parametrize("lower", [True, False])
def test_the_ops_split_as_the_calls_do(lower):
    x = positive(normal(2, 16, 16))
    triangle_of = jnp.tril if lower else jnp.triu
    spec = P(None, "x") if lower else P(None, None, "x")
    program = sdy.loads(CHOLESKY.format(lower=str(lower).lower()))
    call = sdy.partition(program, mesh=LINE, in_shardings=spec, out_shardings=spec)
    assert " for stablehlo.cholesky" in str(call.plan(x))
    np.testing.assert_allclose(triangle_of(call(x)), jnp.linalg.cholesky(x, upper=not lower), 1e-4, 1e-4)
    assert jnp.isnan(triangle_of(call(x.at[1].set(-x[1]))[1])).sum() == 136


def test_the_op_solves_split_systems():
    a, b, spec = triangle(normal(2, 16, 16)), normal(2, 16, 3), P(None, "x")
    call = sdy.partition(sdy.loads(SOLVE), mesh=LINE, in_shardings=(spec, spec), out_shardings=spec)
    assert " for stablehlo.triangular_solve" in str(call.plan(a, b))
    np.testing.assert_allclose(call(a, b), np.linalg.solve(np.triu(a), b), 1e-4, 1e-4)


@pytest.mark.more("derivatives of all blocked ops")
@pytest.mark.usefixtures("work_is_expensive")
def test_gradients_of_blocked_ops():
    def loss(x, b):
        lower = jnp.linalg.cholesky(split(positive(x), "x"))
        return (lax.linalg.triangular_solve(lower, split(b, "x"), left_side=True, lower=True) ** 3).sum()

    check_inside(jax.grad(loss, (0, 1)), normal(20, 20) / 4, normal(20, 2), sent_by=CALL, rtol=1e-3)


def test_small_matrices_are_gathered(monkeypatch):
    monkeypatch.setattr(linalg, "_LARGE", 1 << 16)
    x = positive(normal(32, 32))
    plan = agreed(factor, x, spec=ROWS, out=ROWS, rtol=1e-4)
    assert [c.kind for c in plan.collectives if c.wire_bytes] == ["all_gather"], plan


def test_few_blocks_are_more_work_than_the_whole_matrix():
    """Two blocks send less, and cost more where operations are expensive."""
    x = positive(normal(32, 32))
    for flop, kinds in ((0, {"all_gather", "all_reduce"}), (100, {"all_gather"})):
        options = {"costs": CostModel(flop=flop), "in_shardings": ROWS, "out_shardings": ROWS, "on_unknown": "ignore"}
        plan = sdy.partition(factor, mesh=PLANE, layouts="local", **options).plan(x)
        assert {c.kind for c in plan.collectives if c.wire_bytes} == kinds, plan


# Tall matrices.


def test_tall_matrices_send_triangles():
    plan = agreed(lambda x: jnp.linalg.qr(x)[0], normal(64, 4), spec=ROWS, out=ROWS, rtol=1e-4)
    assert plan.wire_bytes == (7 * 16 + 7 / 4 * (20 + 32)) * 4, plan
    assert not plan.notes


@pytest.mark.parametrize("rows", [24, 16])
def test_rows_that_are_too_few_for_triangles_are_gathered(rows):
    plan = agreed(lambda x: jnp.linalg.qr(x)[0], normal(rows, 4), spec=ROWS, out=ROWS, rtol=1e-4)
    assert "all_reduce" not in {c.kind for c in plan.collectives}, plan


@pytest.mark.usefixtures("work_is_expensive")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
def test_the_qr_of_uneven_rows(dtype):
    x = normal(2, 45, 3) + 1j * normal(2, 3, 45).mT
    x = x if dtype == jnp.complex64 else x.real

    def function(x):
        reflectors, scales = jnp.linalg.qr(split(x, None, "x"), mode="raw")
        return reflectors, scales, jnp.linalg.qr(split(x, None, "x"))

    plan = check_inside(function, x, sent_by=CALL, rtol=1e-4)
    assert "all_reduce" in {c.kind for c in plan.collectives}


@pytest.mark.more("structured matrices")
@pytest.mark.usefixtures("work_is_expensive")
def test_the_qr_of_structured_matrices():
    for x in (jnp.eye(32, 3), -jnp.eye(32, 3), jnp.triu(normal(32, 3)), jnp.eye(32, 3).at[9, 1].set(-2)):
        plan = check_inside(lambda x: jnp.linalg.qr(split(x, "x")), x, sent_by=CALL, rtol=1e-4)
        assert "all_reduce" in {c.kind for c in plan.collectives}


@pytest.mark.usefixtures("work_is_expensive")
def test_gradients_of_tall_qr():
    def loss(x):
        q, r = jnp.linalg.qr(split(x, "x"))
        return (q**3).sum() + (r**2 * jnp.arange(3.0)).sum()

    check_inside(jax.grad(loss), normal(40, 3), sent_by=CALL, rtol=1e-3)


def test_what_library_calls_compute_is_counted(monkeypatch):
    monkeypatch.setattr(linalg, "_LARGE", 1 << 16)

    def plan(function, *args, spec):
        return sdy.partition(function, mesh=LINE, in_shardings=spec, on_unknown="ignore").plan(*args)

    def solve(a, b):
        return lax.linalg.triangular_solve(a, b, left_side=True)

    gathered = plan(factor, positive(normal(32, 32)), spec=ROWS)
    assert [w.flops for w in gathered.work if w.op.startswith(CALL)] == [32**3 / 3] and gathered.repeated_flops
    shared = plan(solve, triangle(normal(32, 32)), normal(32, 16), spec=(P(), COLUMNS))
    assert [(w.flops, w.repeated) for w in shared.work if w.op.startswith(CALL)] == [(32 * 32 * 2, 0)]
