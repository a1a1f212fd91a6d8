"""Decompositions and solvers: batches and right-hand sides are split, in functions and programs from files."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import export, lax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, PLANE, check
from random_programs.tensors import Case, Tensor
from rule_oracle import assert_same_rules, function_of, our_rule

import sdy_jax as sdy
from sdy_jax.ir.attributes import rule_from_attribute
from sdy_jax.ir.graph import Graph
from sdy_jax.shardy.rules.linalg import batch_dimensions, batch_rule
from sdy_jax.shardy.rules.registry import RuleBook

RNG = np.random.default_rng(11)
linalg = lax.linalg


def normal(*shape, dtype=np.float32):
    values = RNG.standard_normal(shape)
    return (values + 1j * RNG.standard_normal(shape) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def positive(x):
    return x @ jnp.swapaxes(x, -1, -2).conj() + 5 * jnp.eye(x.shape[-1], dtype=x.dtype)


def triangular(x):
    return jnp.tril(x) + 5 * jnp.eye(x.shape[-1], dtype=x.dtype)


def absolute(function):
    """Vectors are unique up to their signs, or phases."""
    return lambda *xs: jax.tree.map(jnp.abs, function(*xs))


def reflected(x):
    reflectors, scales = jnp.linalg.qr(x, mode="raw")
    return reflectors, scales, linalg.householder_product(jnp.swapaxes(reflectors, -1, -2), scales)


def applied(x, y):
    reflectors, scales = jnp.linalg.qr(x, mode="raw")
    reflectors = jnp.swapaxes(reflectors, -1, -2)
    return linalg.ormqr(reflectors, scales, y), linalg.ormqr(reflectors, scales, jnp.swapaxes(y, 1, 2), left=False)


def tridiagonal_system(x, y):
    return linalg.tridiagonal_solve(x[..., 0], 5 + jnp.abs(x[..., 1]), x[..., 2], y)


SQUARE, TALL, SIDES = (4, 4), (5, 4), (4, 6)
CALLS = {
    "cholesky": (lambda x: linalg.cholesky(positive(x)), SQUARE),
    "eig": (absolute(linalg.eig), SQUARE),
    "eigvals": (absolute(jnp.linalg.eigvals), SQUARE),
    "eigh": (absolute(lambda x: jnp.linalg.eigh(positive(x))), SQUARE),
    "svd": (absolute(jnp.linalg.svd), TALL),
    "svd, thin": (absolute(lambda x: jnp.linalg.svd(x, full_matrices=False)), TALL),
    "singular values": (jnp.linalg.svdvals, TALL),
    "svd by qr": (absolute(lambda x: linalg.svd(x, algorithm=linalg.SvdAlgorithm.QR)), TALL),
    "schur": (absolute(linalg.schur), SQUARE),
    "qr": (jnp.linalg.qr, TALL),
    "reflectors": (reflected, TALL),
    "apply reflectors": (applied, SQUARE, SIDES),
    "qr with pivots": (lambda x: linalg.qr(x, pivoting=True), TALL),
    "lu": (linalg.lu, TALL),
    "hessenberg": (linalg.hessenberg, SQUARE),
    "tridiagonal": (lambda x: linalg.tridiagonal(positive(x), lower=True), SQUARE),
    "tridiagonal solve": (tridiagonal_system, SQUARE, SIDES),
    "triangular solve": (lambda a, b: linalg.triangular_solve(triangular(a), b, left_side=True, lower=True), SQUARE,
                         SIDES),
    "solve": (lambda a, b: jnp.linalg.solve(positive(a), b), SQUARE, SIDES),
    "inverse": (lambda a: jnp.linalg.inv(positive(a)), SQUARE),
    "determinant": (jnp.linalg.det, SQUARE),
    "exponential": (jsl.expm, SQUARE),
}  # fmt: skip

COMPLEX = ["cholesky", "eig", "eigh", "svd", "schur", "qr", "lu", "solve", "tridiagonal"]


def arguments(name, batch, dtype=np.float32):
    function, *shapes = CALLS[name]
    return function, [normal(*batch, *shape, dtype=dtype) for shape in shapes]


@pytest.mark.dear
@pytest.mark.parametrize("name", CALLS)
def test_batches_are_split_and_nothing_is_sent(name):
    function, args = arguments(name, (8,))
    spec = P(("x", "y"))
    check(function, args, [spec] * len(args), kinds="", rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", COMPLEX)
def test_batches_of_complex_matrices_along_two_dimensions(name):
    function, args = arguments(name, (2, 4), np.complex64)
    check(function, args, [P("x", "y")] * len(args), kinds="", rtol=1e-3, atol=1e-3)


@pytest.mark.dear
@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")
@pytest.mark.parametrize(("number", "name"), [*enumerate(CALLS)])
def test_batches_that_do_not_divide_and_matrices_that_are_split_have_the_same_numbers(number, name):
    """Of neighbours one is split along the rows, with the batch, and one along the columns."""
    function, args = arguments(name, (6,))
    for spec in (P("y"), P("x", "y") if number % 2 else P(None, None, "y")):
        check(function, args, [spec] * len(args), rtol=1e-3, atol=1e-3)


def loaded(function, args, **settings):
    """`function` exported for arrays like `args`; jax serializes no named tuples."""
    flat = jax.jit(lambda *xs: jax.tree.leaves(function(*xs)))
    return sdy.load(export.export(flat, **settings)(*args).serialize())


NOT_STABLE = [export.DisabledSafetyCheck.custom_call(f"lapack_s{name}_ffi") for name in ("gesvd", "geqp3", "ormqr")]
"""Calls that jax exports only where it is told to."""


def same_without_collectives(program, function, args):
    call = sdy.partition(program, mesh=PLANE, in_shardings=(P(("x", "y")),) * len(args))
    plan = call.plan(*args)
    assert not plan.collectives and not plan.notes, plan
    wanted = jax.tree.leaves(jax.jit(function)(*args))
    for found, leaf in zip(jax.tree.leaves(call(*args)), wanted, strict=True):
        np.testing.assert_allclose(found, leaf, 1e-3, 1e-3)


@pytest.mark.dear
@pytest.mark.parametrize("name", CALLS)
def test_batches_are_split_in_programs_from_files(name):
    pytest.importorskip("flatbuffers")
    function, args = arguments(name, (8,))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    same_without_collectives(loaded(function, types, disabled_checks=NOT_STABLE), function, args)


@pytest.mark.parametrize("name", ["svd", "eig", "schur", "qr", "lu", "cholesky", "triangular solve", "hessenberg"])
def test_batches_of_symbolic_size_are_split_though_jax_writes_no_rule_on_their_calls(name):
    pytest.importorskip("flatbuffers")
    function, args = arguments(name, (8,))
    scope = export.SymbolicScope()
    types = [jax.ShapeDtypeStruct((*export.symbolic_shape("n", scope=scope), *x.shape[1:]), x.dtype) for x in args]
    same_without_collectives(loaded(function, types), function, args)


def test_batches_are_split_in_files_that_were_exported_without_shardy():
    """The number of batch dimensions stands on the calls, and no rule."""
    pytest.importorskip("flatbuffers")
    function, args = arguments("singular values", (8,))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        program = loaded(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    same_without_collectives(program, function, args)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("split", ["x", ("y", "x")], ids=str)
def test_triangular_systems_are_split_along_their_right_hand_sides(left, transposed, split):
    def solve(a, b):
        return linalg.triangular_solve(triangular(a), b, left_side=left, lower=True, transpose_a=transposed)

    a, b = normal(8, 8), normal(8, 16) if left else normal(16, 8)
    spec = P(None, split) if left else P(split)
    plan = check(solve, [a, b], [P(), spec], kinds="", rtol=1e-3, atol=1e-3)
    assert plan.results[0].sharding == plan.arguments[1].sharding and not plan.notes


SOLVE = """
func.func @main(%a: tensor<4x8x8xf32>, %b: tensor<4x8x6xf32>) -> tensor<4x8x6xf32> {
  %0 = "stablehlo.triangular_solve"(%a, %b) {left_side = true, lower = true, unit_diagonal = false,
    transpose_a = #stablehlo<transpose NO_TRANSPOSE>} : (tensor<4x8x8xf32>, tensor<4x8x6xf32>) -> tensor<4x8x6xf32>
  return %0 : tensor<4x8x6xf32>
}
"""


@pytest.mark.parametrize("specs", [(P("x"), P("x", None, "y")), (P(), P(None, None, "z")), (P("y"), P("y"))], ids=str)
def test_the_op_splits_as_the_call_does(specs):
    a, b = np.asarray(triangular(normal(4, 8, 8))), normal(4, 8, 6)
    call = sdy.partition(sdy.loads(SOLVE), mesh=CUBE, in_shardings=specs)
    assert not [c for c in call.plan(a, b).collectives if c.wire_bytes]
    np.testing.assert_allclose(call(a, b), np.linalg.solve(np.tril(a), b), 1e-3, 1e-3)


def test_right_hand_sides_of_tridiagonal_systems_and_of_reflectors_are_columns_of_their_own():
    x, y = normal(4, 4), normal(4, 8)
    check(tridiagonal_system, [x, y], [P(), P(None, ("x", "y"))], P(None, ("x", "y")), kinds="", rtol=1e-3, atol=1e-3)

    def applied_to(x, y):
        reflectors, scales = jnp.linalg.qr(x, mode="raw")
        return linalg.ormqr(reflectors.T, scales, y), linalg.ormqr(reflectors.T, scales, y.T, left=False)

    check(applied_to, [x, y], [P(), P(None, "y")], kinds="", rtol=1e-3, atol=1e-3)


def solved(left_side, kind="NO_TRANSPOSE"):
    settings = f"left_side = {str(left_side).lower()}, lower = true, unit_diagonal = false"
    return Case(
        "stablehlo.triangular_solve",
        [Tensor((3, 4, 4)), Tensor((3, 4, 5) if left_side else (3, 5, 4))],
        [Tensor((3, 4, 5) if left_side else (3, 5, 4))],
        f"{settings}, transpose_a = #stablehlo<transpose {kind}>",
    )


def test_right_hand_sides_pass_and_unknowns_are_split_like_equations_except_in_shardys_terms():
    rules = {side: (text, our_rule(text, "stablehlo.triangular_solve")) for side in (True, False)
             for text in [function_of(solved(side), 0)]}  # fmt: skip
    assert rules[True][1].startswith("([i, j, l], [i, j, k])->([i, j, k])")
    assert rules[False][1].startswith("([i, l, j], [i, k, j])->([i, k, j])")
    for text, ours in rules.values():
        shardys = our_rule(text, "stablehlo.triangular_solve", compat="shardy")
        assert "need_replication={j, l}" in ours and "need_replication={j, k, l}" in shardys
        assert_same_rules(text, False)


def test_the_rule_that_jax_writes_on_calls_gives_way_and_any_other_does_not():
    lowered = jax.jit(lambda a, b: linalg.triangular_solve(a, b, left_side=True)).lower(
        normal(3, 4, 4), normal(3, 4, 5)
    )
    module = lowered.compiler_ir("stablehlo")
    op = next(op for op in Graph(module.operation).main.walk() if op.name == "stablehlo.custom_call")
    book, shardys = RuleBook(), RuleBook(compat="shardy")
    jaxs = str(batch_rule(op))
    assert jaxs == str(shardys.rule_of(op)) == str(rule_from_attribute(op.attribute("sdy.sharding_rule")))
    assert str(book.rule_of(op)).startswith("([i, j, l], [i, j, k])->([i, j, k])")
    text = jaxs.replace("[i, n, o]", "[i, n, m]").replace("n=4, o=5", "n=4").replace(", custom", "")
    op.mlir.attributes["sdy.sharding_rule"] = ir.Attribute.parse(
        f"#sdy.op_sharding_rule<{text}, custom>", module.context
    )
    op = next(op for op in Graph(module.operation).main.walk() if op.name == "stablehlo.custom_call")
    assert str(book.rule_of(op)) == f"{text}, custom"


@pytest.mark.parametrize(
    ("platform", "functions"),
    [
        ("cpu", ["cholesky", "eig", "eigh", "svd", "svd by qr", "schur", "qr", "qr with pivots", "lu", "hessenberg",
                 "tridiagonal", "tridiagonal solve", "apply reflectors", "triangular solve"]),
        ("cuda", ["cholesky", "eig", "eigh", "svd", "svd by qr", "qr", "qr with pivots", "lu", "tridiagonal",
                  "tridiagonal solve", "apply reflectors"]),
        ("tpu", ["cholesky", "eigh", "svd", "qr", "lu", "triangular solve"]),
    ],
)  # fmt: skip
def test_every_call_that_jax_makes_for_a_batch_has_its_batch_dimension_known_by_its_name(platform, functions):
    """Also where jax wrote neither a rule nor the number of batch dimensions on it."""
    for name in functions:
        function, args = arguments(name, (3,))
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
        module = lowered.compiler_ir("stablehlo")
        for op in [op for f in Graph(module.operation).functions.values() for op in f.walk()]:
            if op.name == "stablehlo.custom_call" and op.results and op.operands:
                for written in ("mhlo.frontend_attributes", "sdy.sharding_rule"):
                    if written in op.mlir.attributes:
                        del op.mlir.attributes[written]
        graph = Graph(module.operation)
        calls = [op for f in graph.functions.values() for op in f.walk() if op.name == "stablehlo.custom_call"]
        for op in calls:
            rule = RuleBook().rule_of(op)
            assert rule is not None and all(m[0] == (0,) for m in rule.mappings), op.text("call_target_name")


def test_shardy_has_no_rules_for_calls_of_libraries():
    shapes = [(3, 4, 4)], [(3, 4, 4), (3,)]
    operands, results = ([Tensor(shape) for shape in side] for side in shapes)
    case = Case("stablehlo.custom_call", operands, results, 'call_target_name = "lapack_spotrf_ffi"')
    text = function_of(case, 0)
    assert_same_rules(text, False)
    assert our_rule(text, case.name, compat="shardy") == "none"
    assert our_rule(text, case.name).startswith("([i, j, k])->([i, j, k], [i]) {i=3,")


def test_calls_without_batch_and_of_unknown_targets_have_no_rule():
    for target, shape in (("lapack_sgetrf_ffi", (4, 4)), ("somebodys_call", (3, 4, 4))):
        case = Case("stablehlo.custom_call", [Tensor(shape)], [Tensor(shape)], f'call_target_name = "{target}"')
        assert our_rule(function_of(case, 0), case.name) == "none"
    with mlir.make_ir_context():
        case = Case(
            "stablehlo.custom_call",
            [Tensor((3, 4, 4))],
            [Tensor((3, 4, 4)), Tensor((2,))],
            'call_target_name = "lapack_spotrf_ffi"',
        )
        graph = Graph(ir.Module.parse(function_of(case, 0)).operation)
        assert batch_dimensions(next(op for op in graph.ops if op.name == case.name)) == 0
