"""Functions of `custom_partitioning` that refuse layouts, or ask for others: candidates go or are redirected, and plans
are made of what is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.parsers import parse_rule
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.custom_partitioning import alike_rule
from sdy_jax.lowering.ops.registry import AskFunction, Refused, Strategy, Taken
from sdy_jax.lowering.planner.problem.candidates import every_candidate
from sdy_jax.lowering.planner.problem.layout_table import AxesLists, LayoutTable
from sdy_jax.lowering.planner.problem.op_problem import OpKind, OpProblem, Tensor
from sdy_jax.testing import assert_same

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = np.arange(16 * 32, dtype=np.float32).reshape(16, 32) / 100
ASKED: list[tuple[Any, ...]] = []
"""The specs with which functions were asked."""

Answer = Callable[..., Any]


def negated(x: jax.Array) -> jax.Array:
    return -x


def specs_of(tree: Any) -> list[Any]:
    whole = [(*leaf.sharding.spec, None, None, None, None)[: leaf.ndim] for leaf in jax.tree.leaves(tree)]
    return [tuple(entry or None for entry in spec) for spec in whole]


def op_of(fun: Callable[..., Any], answer: Answer, rule: Any, **options: Any) -> Callable[..., Any]:
    """A function whose `partition` is `answer(mesh, argument specs, result specs)`: what it runs, the specs of the
    result and of the arguments. What it raises, it refuses."""
    op = custom_partitioning(fun)

    def partition(mesh: Any, args: Any, outs: Any) -> Any:
        taken, made = specs_of(args), specs_of(outs)
        ASKED.append((tuple(taken), tuple(made)))
        run, result, arguments = answer(mesh, taken, made)
        return mesh, run, NamedSharding(mesh, P(*result)), tuple(NamedSharding(mesh, P(*a)) for a in arguments)

    op.def_partition(partition, sharding_rule=rule, **options)
    return lambda *args: op(*args)


def split(x: jax.Array, *entries: Any) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*entries)))


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    ASKED.clear()


# Refusals.


def shares(x: jax.Array) -> jax.Array:
    """Along rows, which a function of blocks needs whole."""
    return x / jnp.sum(x, 1, keepdims=True)


def only_rows(mesh: Any, taken: Any, made: Any) -> Any:
    if taken[0][1] or made[0] != taken[0]:
        raise NotImplementedError(f"rows are whole here, not {taken[0]}")
    return shares, made[0], taken


by_rows = op_of(shares, only_rows, "i j -> i j")


@pytest.mark.parametrize(
    "spec", [P("data", "model"), P(None, "model"), P(("data", "model")), P(None, ("model", "data"))]
)
def test_what_is_refused_is_no_candidate(spec: P) -> None:
    plan = assert_same(by_rows, X + 1, mesh=MESH, in_shardings=spec, out_shardings=spec, rtol=1e-5)
    assert plan.wire_bytes <= X.nbytes / 2, "not gathered"
    if any("model" in axes for axes in spec[1:] if axes):
        assert re.search(
            r"`.*partition` .* refuses .* \(rows are whole here, not .*; .* is moved: all_to_all", str(plan.notes[0])
        )


def test_it_is_split_where_what_is_around_is_free() -> None:
    plan = assert_same(lambda x: jnp.tanh(by_rows(jnp.exp(x))), X, mesh=MESH, in_shardings=P("data"), rtol=1e-5)
    assert plan.wire_bytes == 0, plan


def test_by_layouts_op_by_op() -> None:
    options = {"mesh": MESH, "in_shardings": P("data", "model"), "layouts": "local", "rtol": 1e-5}
    plan = assert_same(lambda x: by_rows(x) * 2, X + 1, **options)
    assert {c.kind for c in plan.collectives} <= {"all_to_all", "all_gather"}, plan


def test_a_refusal_loses_one_candidate_alone() -> None:
    def both_or_none(mesh: Any, taken: Any, made: Any) -> Any:
        if any(taken[0]) and not all(taken[0]):
            raise ValueError("both or none")
        return negated, taken[0], taken

    op = op_of(negated, both_or_none, "i j -> i j")
    plan = assert_same(op, X, mesh=MESH, in_shardings=P("data", "model"))
    assert plan.wire_bytes == 0
    plan = assert_same(lambda x: op(x + 1), X, mesh=MESH, in_shardings=P(None, "model"), out_shardings=P(None, "model"))
    assert [c.kind for c in plan.collectives if c.wire_bytes] == ["all_gather"], plan


def test_a_function_that_fails_on_blocks_refuses_their_layout() -> None:
    def on_whole_rows(x: jax.Array) -> jax.Array:
        assert x.shape[1] == 32, x.shape
        return shares(x)

    op = op_of(shares, lambda mesh, taken, made: (on_whole_rows, taken[0], taken), "i j -> i j")
    plan = assert_same(op, X + 1, mesh=MESH, in_shardings=P("data", "model"), rtol=1e-5)
    assert {c.kind for c in plan.collectives} == {"all_to_all"}


def test_blocks_of_other_shapes_than_the_answer_says_are_refused() -> None:
    def sums(x: jax.Array) -> jax.Array:
        return x.sum(1)

    def answer(mesh: Any, taken: Any, made: Any) -> Any:
        return (lambda x: lax.all_gather(x.sum(1), "data", tiled=True) if taken[0][0] else x.sum(1)), made[0], taken

    op = op_of(sums, answer, "i j -> i", need_replication_factors=("j",))
    assert_same(op, X, mesh=MESH, in_shardings=P("data"), rtol=1e-5)


@pytest.mark.parametrize("rule", ["i j -> i j", None])
def test_where_all_is_refused_the_error_is_shown_with_the_line(rule: str | None) -> None:
    def refuse(mesh: Any, taken: Any, made: Any) -> Any:
        raise RuntimeError(f"no blocks of mine: {taken[0]}")

    op = op_of(jnp.sin, refuse, rule)
    message = (
        r"(?s)test_asked_layouts.py:\d+: `.*partition` .* not even with nothing split: no blocks of mine: \(None, N"
    )
    with pytest.raises(sdy.SdyError, match=message) as caught:
        sdy.partition(op, mesh=MESH, in_shardings=P("data"))(X)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_without_a_rule_it_runs_whole_where_the_layouts_around_it_are_refused() -> None:
    def whole(mesh: Any, taken: Any, made: Any) -> Any:
        if any(taken[0]):
            raise ValueError("whole ones only")
        return jnp.sin, (), [()]

    op = op_of(jnp.sin, whole, None)
    plan = assert_same(lambda x: op(x + 1), X, mesh=MESH, in_shardings=P("data"), rtol=1e-5)
    assert re.search(r"refuses the layouts .* \(whole ones only\); .* is moved: all_gather", str(plan.notes[0]))


# Other layouts.


def by_columns(mesh: Any, taken: Any, made: Any) -> Any:
    return negated, (None, "model"), [(None, "model")]


def test_a_redirected_layout_is_planned_for() -> None:
    """What is around it makes and takes what the function asks for."""
    op = op_of(negated, by_columns, "i j -> i j")

    def around(x: jax.Array, w: jax.Array) -> jax.Array:
        return op(x @ w) * 2

    specs = (P(), P(None, "model"))
    plan = assert_same(around, X, X.T.copy(), mesh=MESH, in_shardings=specs, out_shardings=P(None, "model"), rtol=1e-5)
    assert plan.wire_bytes == 0, plan


def test_the_price_of_a_redirected_layout_is_that_of_all_that_moves() -> None:
    """Rows that stay would be free, but are answered by whole ones; columns are what they are."""

    def answer(mesh: Any, taken: Any, made: Any) -> Any:
        return negated, (None, taken[0][1]), [(None, taken[0][1])]

    op = op_of(negated, answer, "i j -> i j")
    options = {"mesh": MESH, "in_shardings": P("model"), "out_shardings": P("model"), "rtol": 1e-5}
    x = np.tile(X, (8, 8))
    assert assert_same(op, x, **options).wire_bytes <= 2 * 3 / 4 * x.nbytes / 4, "moved there and back, not gathered"


def test_answers_that_change_with_each_question_are_obeyed() -> None:
    def turned(mesh: Any, taken: Any, made: Any) -> Any:
        other = (None, "model") if taken[0][0] else ("model", None)
        return negated, other, [other]

    op = op_of(negated, turned, "i j -> i j")
    assert_same(lambda x: op(op(x) + 1), X, mesh=MESH, in_shardings=P("model"))


def test_an_answer_that_is_refused_itself_is_none() -> None:
    def answer(mesh: Any, taken: Any, made: Any) -> Any:
        if taken[0][1]:
            raise ValueError("no columns")
        return negated, *(((None, "model"), [(None, "model")]) if taken[0][0] else ((None, None), taken))

    op = op_of(negated, answer, "i j -> i j")
    plan = assert_same(op, X, mesh=MESH, in_shardings=P("data"))
    assert [c.kind for c in plan.collectives if c.wire_bytes] == ["all_gather"], plan


# Operands of which a rule says nothing.


def total(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    return x + 2 * y + 3 * z


def alike(mesh: Any, taken: Any, made: Any) -> Any:
    if not taken[0] == taken[1] == taken[2]:
        raise ValueError("arguments should have the same sharding")
    return total, taken[0], taken


def saying_little(*_: Any) -> SdyShardingRule:
    """As that of cuDNN's attention: of the first operand alone."""
    return SdyShardingRule((ArrayMapping("i", "j"), ArrayMapping("…1"), ArrayMapping("…2")), (ArrayMapping("i", "j"),))


same = op_of(total, alike, saying_little)


@pytest.mark.parametrize("spec", [P("data"), P("data", "model"), P(("data", "model")), P(None, ("model", "data"))])
def test_operands_that_have_to_be_alike_are(spec: P) -> None:
    plan = assert_same(same, X, X + 1, X + 2, mesh=MESH, in_shardings=spec, rtol=1e-5)
    assert plan.wire_bytes == 0, plan


def test_operands_are_brought_to_one_layout() -> None:
    specs = (P("data"), P(None, "model"), P())
    out = P("data", "model")
    plan = assert_same(same, X, X + 1, X + 2, mesh=MESH, in_shardings=specs, out_shardings=out, rtol=1e-5)
    assert plan.wire_bytes == 0, plan


def test_among_equal_prices_operands_are_alike() -> None:
    """A function that takes anything, of which the rule says nothing."""
    op = op_of(total, lambda mesh, taken, made: (total, taken[0], taken), saying_little)
    plan = sdy.partition(op, mesh=MESH, in_shardings=(P("data", "model"), P(), P())).plan(X, X, X)
    assert plan.wire_bytes == 0
    assert_same(op, X, X + 1, X + 2, mesh=MESH, in_shardings=(P("data", "model"), P(), P()), rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "([i, j], [k, l])->([i, j]) {i=4, j=8, k=4, l=8}",
            "([i, j], [i, j])->([i, j]) {i=4, j=8}",
        ),
        (
            "([i, j], [k, l])->([i, j]) {i=4, j=8, k=4, l=2}",  # of another size
            "([i, j], [i, k])->([i, j]) {i=4, j=8, k=2}",
        ),
        (
            "([i, j], [j, k], [l, m])->([i, k]) {i=4, j=4, k=4, l=4, m=4} need_replication={m}",  # of another type
            "([i, j], [j, k], [i, l])->([i, k]) {i=4, j=4, k=4, l=4} need_replication={l}",
        ),
        ("([i, j], [j, k])->([i, k]) {i=4, j=4, k=4}", "([i, j], [j, k])->([i, k]) {i=4, j=4, k=4}"),
    ],
)
def test_dimensions_of_which_a_rule_says_nothing_are_tied_to_those_of_the_first_operand(text: str, wanted: str) -> None:
    assert str(alike_rule(parse_rule(text))) == wanted


# What is asked, and how often.


def test_each_layout_is_asked_for_and_traced_once_by_all_equal_calls() -> None:
    traced = list[tuple[int, ...]]()

    def answer(mesh: Any, taken: Any, made: Any) -> Any:
        run, *layouts = only_rows(mesh, taken, made)
        return lambda x: (traced.append(x.shape), run(x))[1], *layouts

    op = op_of(shares, answer, "i j -> i j")

    def layers(x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jnp.tanh(op(x))
        return x

    sdy.partition(layers, mesh=MESH, in_shardings=P("data")).plan(X)
    assert len(ASKED) == len(set(ASKED)), "no layout twice"
    taken = [asked for asked in ASKED if not asked[0][0][1] and asked[0][0] == asked[1][0]]
    assert len(traced) == len(taken)


def test_equal_calls_with_other_static_arguments_are_others() -> None:
    op = custom_partitioning(lambda x, times: x * times, static_argnums=(1,))

    def partition(times: float, mesh: Any, args: Any, outs: Any) -> Any:
        return mesh, lambda x: x * times, outs.sharding, tuple(a.sharding for a in args)

    op.def_partition(partition, sharding_rule="i j -> i j")
    assert_same(lambda x: op(op(x, 2.0), 3.0), X, mesh=MESH, in_shardings=P("data"), rtol=1e-6)


def test_only_what_is_read_of_the_results_is_sent() -> None:
    op = custom_partitioning(lambda x: (x * 2, x.sum(0)))

    def partition(mesh: Any, args: Any, outs: Any) -> Any:
        rows = specs_of(args)[0][0]

        def run(x: jax.Array) -> Any:
            return x * 2, lax.psum(x.sum(0), rows) if rows else x.sum(0)

        return mesh, run, (NamedSharding(mesh, P(rows)), NamedSharding(mesh, P())), (NamedSharding(mesh, P(rows)),)

    op.def_partition(partition, sharding_rule="i j -> i j, j", reduction_factors=())
    first = assert_same(lambda x: op(x)[0], X, mesh=MESH, in_shardings=P("data"), rtol=1e-5)
    assert not first.collectives
    both = assert_same(lambda x: op(x), X, mesh=MESH, in_shardings=P("data"), rtol=1e-5)
    assert [(c.kind, c.detail) for c in both.collectives if c.wire_bytes] == [("all_reduce", '{"data"}')]


def test_padding_does_not_reach_sums_that_a_rule_does_not_name() -> None:
    """A factor that a result does not have is split evenly: the function does not know of padding. Under jit such sums
    are wrong."""
    op = custom_partitioning(lambda x: x.sum(0))

    def partition(mesh: Any, args: Any, outs: Any) -> Any:
        rows, columns = specs_of(args)[0]

        def run(x: jax.Array) -> jax.Array:
            return lax.psum(x.sum(0), rows) if rows else x.sum(0)

        return mesh, run, NamedSharding(mesh, P(columns)), (NamedSharding(mesh, P(rows, columns)),)

    op.def_partition(partition, sharding_rule="i j -> j")
    for rows in (16, 15, 13):
        found = sdy.partition(lambda x: op(split(jnp.exp(x), "model")), mesh=MESH)(X[:rows])
        np.testing.assert_allclose(found, np.exp(X[:rows]).sum(0), rtol=1e-5)


def test_a_pinned_plan_keeps_redirected_layouts(tmp_path: Any) -> None:
    op = op_of(negated, by_columns, "i j -> i j")
    step = sdy.partition(lambda x: op(x + 1) * 2, mesh=MESH, in_shardings=P("data"))
    plan = step.plan(X)
    plan.save(tmp_path / "plan.json")
    pinned = sdy.partition(lambda x: op(x + 1) * 2, mesh=MESH, in_shardings=P("data"), plan=tmp_path / "plan.json")
    np.testing.assert_allclose(pinned(X), -(X + 1) * 2)
    assert pinned.plan(X).wire_bytes == plan.wire_bytes


# Candidates of the model.


def candidates(ask: AskFunction) -> list[tuple[tuple[tuple[str, ...], ...], float]]:
    """The layouts of a copy of 8 x 8 elements on 2 x 4 devices, as columns of names, and what they send."""
    mesh, rule = sdy.Mesh.of(data=2, model=4), parse_rule("([i, j])->([i, j]) {i=8, j=8}")
    strategy, shape = Strategy("asked", frozenset({0, 1}), ask=ask), (8, 8)
    table, whole = LayoutTable("mesh", mesh), TensorSharding.replicated("mesh", 2)
    kind = OpKind(rule, (strategy,), ((shape, 4.0),) * 2, multiplies=False)
    problem = OpProblem(kind, (Tensor(shape, 4.0, whole),) * 2, mesh, sdy.CostModel())
    atoms = [AxisRef("data"), AxisRef("model")]
    found, _ = every_candidate(problem, len(atoms), (), AxesLists(atoms, table), pads=True)
    return [(_names(table.shardings[c.layouts[0]]), sum(each.wire_bytes for each in c.inside)) for c in found]


def _names(sharding: TensorSharding) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis.name for axis in axes) for axes in sharding.axes)


def test_candidates_of_the_model_are_what_the_op_takes_asks_for_and_sends() -> None:
    def ask(mesh: sdy.Mesh, shardings: Any) -> Taken | Refused:
        rows, columns = _names(shardings[0])
        if columns:
            return Refused("line 1", "it", ValueError("no columns"))
        if rows == ("model",):
            asked = TensorSharding.closed("mesh", [[], [AxisRef("model")]])
            return Taken((asked, asked), {("all_gather", (AxisRef("model"),)): 12.0})
        return Taken(tuple(shardings), {})

    assert sorted(candidates(ask)) == [
        (((), ()), 0.0),
        (((), ("model",)), 12.0),
        ((("data",), ()), 0.0),
        ((("data", "model"), ()), 0.0),
    ]


def test_verify_asks_on_meshes_with_other_numbers_of_devices() -> None:
    """Where rows divide into no equal blocks, for one."""
    found = sdy.verify(lambda x: by_rows(x) * 2, X + 1, mesh=MESH, in_shardings=P("data", "model"))
    assert {case.outcome.status for case in found.cases} == {"same"}, found
