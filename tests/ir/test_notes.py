"""Notes say what really happens to what could not be split: which value, what moves, what it costs, what would help."""

import functools
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from partitioned_ops import op

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.jax_shardings import bytes_text

X = jnp.ones((64, 32))


def planned(mesh, fun, spec, *args, **options):
    return sdy.partition(fun, mesh=mesh, in_shardings=spec, on_unknown="ignore", **options).plan(*args)


def the_note(plan):
    (note,) = plan.notes
    return note.message


def sort_rows(x):
    """By a comparator that is not lax's, and keeping the order of what is equal: the sorted dimension is not split."""
    dims = "".join(f"{n}x" for n in x.shape)
    return op(
        f""""stablehlo.sort"(%a) <{{dimension = 0 : i64, is_stable = true}}> ({{
          ^bb0(%x: tensor<f32>, %y: tensor<f32>):
            %r = stablehlo.compare GT, %x, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>
            stablehlo.return %r : tensor<i1>
        }}) : (tensor<{dims}f32>) -> tensor<{dims}f32>""",
        f"{dims}f32",
    )(x)


def test_what_an_all_to_all_moves_is_not_said_to_be_gathered(mesh):
    plan = planned(mesh, sort_rows, P("data"), X, layouts="local")
    first, _ = plan.collectives
    assert first.kind == "all_to_all"
    assert the_note(plan) == (
        "cannot be split along dim 0 of `x`, f32[64@data,32]; dim 1 is split over 'data' instead: all_to_all, "
        f"{bytes_text(first.wire_bytes)} per device. To avoid it, split dim 1 from the start, as P(None, 'data')"
    )


def test_what_it_says_would_help_helps(mesh):
    plan = planned(mesh, sort_rows, P(None, "data"), X)
    assert not plan.notes and not plan.collectives
    both = the_note(planned(mesh, sort_rows, P("data", "model"), X))
    assert both.endswith("as P(None, ('model', 'data'))")
    assert not planned(mesh, sort_rows, P(None, ("model", "data")), X).collectives


def test_what_is_gathered_says_so_and_that_work_is_repeated(mesh):
    plan = planned(mesh, sort_rows, P("data"), X[:, 0])
    (gather,) = plan.collectives
    assert gather.kind == "all_gather"
    assert the_note(plan) == (
        "cannot be split along dim 0 of `x`, f32[64@data]; it is gathered: all_gather, "
        f"{bytes_text(gather.wire_bytes)} per device; all devices along 'data' compute the same; no other dimension of "
        "it can take the axes"
    )


def test_several_dimensions_of_one_operand_are_one_note(mesh):
    factor = functools.partial(jax.lax.linalg.cholesky, symmetrize_input=False)
    plan = planned(mesh, factor, P("data", "model"), X[:32])
    assert the_note(plan).startswith("cannot be split along dims 0 and 1 of `x`, f32[32@data,32@model]; it is gathered")


def test_a_value_that_is_made_again_from_what_was_gathered_says_what_that_cost(mesh):
    plan = planned(mesh, lambda row: sort_rows(jnp.broadcast_to(row[:, None], (64, 32))), P("data"), X[:, 0])
    gather = plan.collectives[0]
    assert gather.kind == "all_gather" and gather.shape == (64, 1)
    (note,) = plan.notes
    assert f"all_gather, {bytes_text(gather.wire_bytes)} per device" in note.message
    assert re.search(
        r"dim 0 of the result of broadcast_in_dim at \S*test_notes\.py:\d+, f32\[64@data,32\]", note.message
    )


def test_what_moves_in_a_loop_counts_every_trip(mesh):
    def loop(x):
        return jax.lax.scan(lambda c, _: (sort_rows(c), None), x, length=5)[0]

    plan = planned(mesh, loop, P("data"), X, layouts="local")
    message, first = the_note(plan), plan.collectives[0]
    assert f"all_to_all, {bytes_text(5 * first.wire_bytes)} per device" in message
    assert re.search(r"of a value that while at \S*test_notes\.py:\d+ passes into its body", message)


@pytest.mark.parametrize("constrained", [False, True])
def test_the_kinds_in_a_note_are_those_before_the_op(mesh, constrained):
    """Found again in the partitioned module, from the op's operand backwards."""

    def fun(x):
        return sort_rows(sdy.sharding_constraint(x, P("model"))) if constrained else sort_rows(x * 2)

    plan = planned(mesh, fun, P("data"), X)
    with mlir.make_ir_context():
        (sort,) = [op for op in Graph(plan.program.module).ops if op.name == "stablehlo.sort"]
    kinds, value = [], sort.operands[0]
    while value.defining_op is not None and value.defining_op.name.startswith("sdy."):
        kinds.append(value.defining_op.name.removeprefix("sdy."))
        value = value.defining_op.operands[0]
    assert kinds and f": {' and '.join(reversed(kinds))}, " in the_note(plan)


def test_an_op_without_a_rule_says_what_it_costs_and_what_helps(mesh):
    text = """
    sdy.mesh @mesh = <["data"=2, "model"=4]>
    func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> tensor<8x4xf32> {
      %0 = stablehlo.custom_call @mystery(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>
      return %0 : tensor<8x4xf32>
    }"""
    plan = sdy.partition(sdy.loads(textwrap.dedent(text)), mesh=mesh, on_unknown="ignore").plan(X[:8, :4])
    (gather, *_) = plan.collectives
    assert the_note(plan) == (
        "has no sharding rule, so every device computes all of it; `arg0` is gathered: all_gather, "
        f"{bytes_text(gather.wire_bytes)} per device. To fix, if it can be split: state how, by "
        "sdy.with_sharding_rule, or run it in jax.shard_map"
    )


def test_an_uneven_argument_is_named_with_the_line_that_gives_its_sharding(mesh):
    partitioned = sdy.partition(lambda y: y, mesh=mesh, in_shardings=P("model"), on_unknown="ignore")
    argument, *_ = (note for note in partitioned.plan(X[:6]).notes if note.op == "argument")
    assert argument.source == partitioned._function.source
    assert argument.message == (
        "dim 0 of `y`, f32[6@model,32], cannot be split over 'model', because 4 does not divide 6; it is split over "
        "'model:(1)2' only, and every device holds 384 B. To fix: pad it to 8"
    )


def test_an_uneven_dimension_that_no_part_of_the_axis_divides_is_not_split(mesh):
    plan = planned(mesh, lambda y: y * 2, P("model"), X[:5])
    assert {note.op for note in plan.notes} == {"argument"}
    assert all(
        "because 4 does not divide 5; it is not split, and every device holds 640 B" in str(n) for n in plan.notes
    )


def test_a_warning_for_an_argument_has_a_place(mesh):
    with pytest.warns(sdy.PartitionWarning, match=r"test_notes\.py:\d+: argument: dim 0 of `y`"):
        sdy.partition(lambda y: y, mesh=mesh, in_shardings=P("model")).plan(X[:6])
