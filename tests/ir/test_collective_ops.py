"""The sdy collectives as ops: verified as jaxlib does, more strictly in our own modules, and as Python functions."""

from __future__ import annotations

import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_vectors import SYNTAX, VECTORS, WITH_REDUCTION, built, text_of
from jax import lax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from partitioned_text import partitioned as text_partitioned
from partitioned_text import run_partitioned
from sdy_oracle import Oracle
from written_collectives import PARTIAL, RNG, WRITTEN, W, X, workloads

import sdy_jax as sdy
from sdy_jax.errors import ShardingError
from sdy_jax.ir.attributes import SAYABLE
from sdy_jax.ir.collectives import STRICT_RULES, SdyCollective, sharding_after
from sdy_jax.ir.meshes import AxisRef, Mesh, merge_neighbours, sort_and_merge
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.text.modules import SourceError, parse_module
from sdy_jax.ir.validity import RuleError
from sdy_jax.ir.verification import rule_of, verify_module
from sdy_jax.lowering.planner.facts.verifier import verify_partitioned

IDS = [f"{operand} {op}" for operand, op, _, _ in VECTORS]


def broken_rule(verify, operand, op):
    """The rule that an op breaks, "" if none."""
    try:
        module = built(operand, op)
    except ir.MLIRError:
        return SYNTAX
    try:
        verify(module.operation)
    except RuleError as error:
        return re.match(r"\[(\w+)\]", str(error))[1]
    return ""


@pytest.mark.parametrize(("operand", "op", "rule", "strict"), VECTORS, ids=IDS)
def test_the_rules_of_the_dialect(operand, op, rule, strict):
    assert broken_rule(verify_module, operand, op) == rule


@pytest.mark.parametrize(("operand", "op", "rule", "strict"), VECTORS, ids=IDS)
def test_the_rules_of_a_partitioned_module(operand, op, rule, strict):
    assert broken_rule(verify_partitioned, operand, op) == strict


def test_jaxlib_accepts_and_rejects_the_same():
    with Oracle() as oracle:
        for operand, op, rule, _ in VECTORS:
            accepted = oracle.run(text_of(operand, op)) is not None
            assert accepted == (not rule), (operand, op, oracle.error)
            assert rule in ("", SYNTAX, rule_of(oracle.error)), (operand, op, oracle.error)


def test_every_strict_rule_is_broken_somewhere():
    assert {strict for _, _, _, strict in VECTORS} >= set(STRICT_RULES) - {"V6", "V7", "V8", "V9", "V10"}


@pytest.mark.parametrize(("operand", "op", "strict"), WITH_REDUCTION)
def test_reductions_that_the_dialect_can_say_are_read(operand, op, strict):
    context, text = mlir.make_ir_context(), text_of(operand, op)
    if "max" not in SAYABLE:
        with pytest.raises(SourceError, match=r"^m.mlir:\d:\d+: error: reduction `(max|min)`: the SDY dialect"):
            parse_module(text, context, "m.mlir")
        return
    module = parse_module(text, context)
    try:
        verify_partitioned(module.operation)
        assert not strict
    except RuleError as error:
        assert str(error).startswith(f"[{strict}]")


DOUBLED = """sdy.mesh @mesh = <["p"=2]>
func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"p"}]>}) -> tensor<8x8xf32> {
  %0 = stablehlo.dot %x, %x : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = sdy.all_reduce {"p"} %0 out_sharding=<@mesh, [{}, {}]> : tensor<8x8xf32>
  %2 = sdy.reduce_scatter [{"p"}, {}] %0 out_sharding=<@mesh, [{"p"}, {}]> : tensor<8x8xf32>
  %3 = stablehlo.subtract %1, %2 : tensor<8x8xf32>
  %4 = stablehlo.add %3, %1 : tensor<8x8xf32>
  return %4 : tensor<8x8xf32>
}"""


def test_a_reduction_of_what_is_not_said_to_be_terms_is_imported_as_the_reduction_of_the_op_before_it():
    x = RNG.standard_normal((8, 8)).astype(np.float32)
    module = text_partitioned(DOUBLED)
    verify_partitioned(module.operation)
    (found,) = run_partitioned(module, [x])
    np.testing.assert_allclose(found, x @ x, rtol=1e-5, atol=1e-5)


PRODUCT = """sdy.mesh @m = <["p"=2]>
func.func @f(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@m, [{}, {"p"}]>}) -> (tensor<8x8xf32> TERMS) {
  %0 = stablehlo.dot %x, %x {sdy.sharding = #sdy.sharding_per_value<[<@m, [{}, {}], unreduced={"p"}>]>}
    : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.negate %0 {sdy.sharding = #sdy.sharding_per_value<[<@m, [{}, {}]UNREDUCED>]>} : tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}"""


def test_terms_of_a_sum_stay_terms():
    kept, lost = ', unreduced={"p"}', ""
    returned = f"{{sdy.sharding = #sdy.sharding<@m, [{{}}, {{}}]{kept}>}}"
    context = mlir.make_ir_context()

    def module(inside, outside):
        return ir.Module.parse(PRODUCT.replace("UNREDUCED", inside).replace("TERMS", outside), context)

    verify_partitioned(module(kept, returned).operation)
    with pytest.raises(RuleError, match=r"\[V6\] stablehlo.negate: operand 0 is unreduced along \"p\""):
        verify_partitioned(module(lost, returned).operation)
    with pytest.raises(RuleError, match=r"\[V6\] func.return"):
        verify_partitioned(module(kept, "").operation)


# What the collectives do to shardings.

MESH_OF_FIVE = Mesh.of(p=2, q=4, r=2, s=2)
PARTS = [AxisRef("p"), AxisRef.sub("q", 1, 2), AxisRef.sub("q", 2, 2), AxisRef("r"), AxisRef("s")]


def after(operand, kind, *said):
    return sharding_after(SdyCollective(kind, *said), operand, MESH_OF_FIVE)


@pytest.mark.parametrize("seed", range(200))
def test_identities_between_collectives(seed):
    rng = random.Random(seed)
    parts = rng.sample(PARTS, rng.randint(2, 5))
    cut, kept = sorted(rng.choices(range(len(parts) + 1), k=2)), rng.randint(0, 1)
    dims = [parts[: cut[0]], parts[cut[0] : cut[1]], parts[cut[1] :]]
    merged = [merge_neighbours(axes, MESH_OF_FIVE) for axes in dims]
    lists = tuple(merge_neighbours(axes[kept:], MESH_OF_FIVE) for axes in dims)
    flat = sort_and_merge([axis for axes in lists for axis in axes], MESH_OF_FIVE)
    x = TensorSharding.closed("m", merged)
    gathered = after(x, "all_gather", lists)
    assert after(gathered, "all_slice", lists) == x
    assert after(after(x, "sharded_to_unreduced", lists), "all_reduce", flat) == gathered
    partial = after(gathered, "replicated_to_unreduced", flat)
    assert after(partial, "all_reduce", flat) == gathered
    assert after(partial, "reduce_scatter", lists) == after(after(partial, "all_reduce", flat), "all_slice", lists)
    moved = after(x, "all_to_all", (), ((lists[0], 0, 2),))
    only, there = (lists[0], (), ()), ((), (), lists[0])
    assert moved == after(after(x, "all_gather", only), "all_slice", there)


# What the partitioner makes keeps the strict rules, and reads back.

TABLE = {"8": ((8,), ("a",)), "2x4": ((2, 4), ("a", "b"))}


def mesh_of(name):
    sizes, names = TABLE[name]
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


MESH = mesh_of("2x4")


def partitioned(plan):
    module = plan.stages["partitioned"]
    verify_partitioned(module)
    text = plan.mlir("partitioned")
    assert str(ir.Module.parse(text, mlir.make_ir_context())) == text
    return text


@pytest.mark.dear
@pytest.mark.parametrize("name", ["mlp", "transformer", "moe", "fsdp", "sequence", "conv"])
def test_partitioned_workloads_keep_the_strict_rules(name):
    workload = workloads()[name]
    inputs, outputs = workload.shardings("2x4")
    step = sdy.partition(workload.step(MESH, "2x4"), mesh=MESH, in_shardings=inputs, out_shardings=outputs)
    text = partitioned(step.plan(*workload.arguments))
    assert "sdy.all_reduce" in text or "sdy.reduce_scatter" in text


# As Python functions.


def traced_ops(plan):
    return re.findall(r"= sdy\.(\w+)", plan.mlir("traced"))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_collective_is_the_one_that_runs(name):
    function, given, wanted, kinds = WRITTEN[name]
    run = sdy.partition(function, mesh=MESH, in_shardings=given, out_shardings=wanted)
    plan = run.plan(X)
    assert [c.kind for c in plan.collectives] == kinds
    assert name.split()[0] in traced_ops(plan)
    verify_module(plan.stages["traced"])
    partitioned(plan)
    np.testing.assert_allclose(run(X), function(X), rtol=1e-5, atol=1e-5)


def chain(x):
    """Every one of them, between functions that propagation may split as it likes."""
    x = sdy.all_slice(sdy.reshard(jnp.sin(x), P("a")), [["b"], []])
    x = sdy.all_to_all(x, [(["b"], 0, 1)])
    x = sdy.all_gather(x, [["a"], []])
    x = sdy.collective_permute(x, '[{}, {"b":(2)2, "b":(1)2}]')
    x = sdy.all_reduce(sdy.sharded_to_unreduced(x, [[], ["b:(1)2"]]), ["b:(1)2"])
    x = sdy.reduce_scatter(sdy.replicated_to_unreduced(x, ["a"]), [["a"], []])
    return x * jnp.cos(x)


def plain(x):
    return jnp.sin(x) * jnp.cos(jnp.sin(x))


def summed(function):
    return lambda x: (function(x) ** 2).sum()


TRANSFORMATIONS = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(summed(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x * x,)),
    "vmap": lambda f: lambda x: jax.vmap(f, in_axes=1, out_axes=1)(jnp.stack([x, 2 * x], 1)),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(summed(f)))(jnp.stack([x, 2 * x])),
    "scan": lambda f: lambda x: lax.scan(lambda s, _: (f(s), s.sum()), x, None, length=3),
    "grad of scan": lambda f: jax.grad(lambda x: lax.scan(lambda s, _: (f(s), s.sum()), x, None, length=3)[1].sum()),
    "grad of remat": lambda f: jax.grad(summed(jax.checkpoint(f))),
    "cond": lambda f: lambda x: lax.cond(x.sum() > 0, f, lambda y: y - 1, x),
}


@pytest.mark.parametrize("how", TRANSFORMATIONS)
def test_under_transformations_the_numbers_stay(how):
    written, expected = TRANSFORMATIONS[how](chain), jax.jit(TRANSFORMATIONS[how](plain))(X)
    run = sdy.partition(written, mesh=MESH)
    plan = run.plan(X)
    verify_module(plan.stages["traced"])
    assert "collective_permute" in traced_ops(plan)
    partitioned(plan)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, run(X), expected)
    jax.tree.map(close, jax.jit(written)(X), expected)


def test_vmap_splits_the_new_dimension_along_its_axis():
    def gathered(x):
        return sdy.all_gather(x, [["b"]], P("b"))

    mapped = jax.vmap(gathered, in_axes=1, out_axes=1, spmd_axis_name="a")
    text = sdy.partition(mapped, mesh=MESH).plan(X).mlir("traced")
    assert 'sdy.all_gather [{"b"}, {}]' in text
    assert '<@mesh, [{}, {"a"}]>' in text


def test_a_tree_is_taken_leaf_by_leaf():
    def function(tree):
        return sdy.all_gather(tree, [["b"], []], sharding={"u": P("b"), "v": P(("a", "b"))})

    tree = {"u": X, "v": W}
    run = sdy.partition(function, mesh=MESH)
    assert traced_ops(run.plan(tree)).count("all_gather") == 2
    jax.tree.map(np.testing.assert_array_equal, run(tree), tree)


def test_keys_have_a_dimension_that_only_mlir_sees():
    keys = jax.random.split(jax.random.key(0), 8)
    run = sdy.partition(lambda k: jax.random.key_data(sdy.all_gather(k, [["b"]], P("b"))), mesh=MESH)
    np.testing.assert_array_equal(run(keys), jax.random.key_data(keys))


ERRORS = {
    "unstated": (lambda x: sdy.all_gather(x + 1, [["b"], []]), "all_gather for `x` at .*not known here; to fix: give"),
    "counted twice": (lambda x: sdy.all_reduce(x, ["b"], P("a")), r"\[V3\] all_reduce for `x`.*not unreduced along"),
    "scattered twice": (lambda x: sdy.reduce_scatter(x, [[], ["b"]], P("a")), r"\[V3\] reduce_scatter for `x`"),
    "sliced unreduced": (lambda x: sdy.all_slice(x, [[], ["b"]], PARTIAL), r"\[V2\] all_slice for `x`"),
    "not the end": (lambda x: sdy.all_gather(x, [["a"], []], P(("a", "b"))), r'\[C8\].*dimension 0: \{"a", "b"\}'),
    "in use": (lambda x: sdy.all_slice(x, [[], ["a"]], P("a")), r"\[A2\] all_slice for `x`"),
    "unknown axis": (lambda x: sdy.all_gather(x, [["z"], []], P("a")), r"\[A1\] all_gather for `x`"),
    "rank": (lambda x: sdy.all_gather(x, [["a"]], P("a")), r"\[C4\] all_gather for `x`: 1 lists of axes"),
    "dimension": (lambda x: sdy.all_to_all(x, [(["a"], 0, 2)], P("a")), r"\[C10\] all_to_all for `x`.*dimension 2"),
    "blocks": (lambda x: sdy.collective_permute(x, P("b"), P("a")), r"\[C11\].*2 shards become 4"),
    "no list": (lambda x: sdy.all_gather(x, "b", P("b")), r"all_gather: got 'b', expected a list"),
    "no axis": (lambda x: sdy.all_reduce(x, [3], P("b")), r"all_reduce: got 3 for an axis"),
    "no part": (lambda x: sdy.all_reduce(x, ["b:(1"], P("b")), r"all_reduce: got 'b:\(1' for an axis, expected a name"),
    "one move": (lambda x: sdy.all_to_all(x, (["a"], 0, 1), P("a")), r"all_to_all: got \['a'\] for a parameter"),
    "no moves": (lambda x: sdy.all_to_all(x, None, P("a")), r"all_to_all: got None, expected a list"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_say_what_does_not_fit(what):
    function, message = ERRORS[what]
    with pytest.raises(ShardingError, match=message):
        sdy.partition(lambda x: function(x), mesh=MESH).plan(X)
