"""The textual forms: what is printed is parsed, and what is wrong is shown."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.errors import ParseError
from sdy_jax.ir.collectives import SdyCollective, collective_from_attributes
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis
from sdy_jax.ir.parsers import (
    parse_axis,
    parse_mesh,
    parse_propagation_edges,
    parse_rule,
    parse_sharding,
    parse_shardings,
)
from sdy_jax.ir.shardings import (
    REDUCTION_KINDS,
    AxisSpread,
    DimensionSharding,
    EdgeValue,
    OpShardingRule,
    PropagationEdges,
    PropagationStep,
    TensorSharding,
    factor_symbol,
    per_value,
)

names = st.text(st.characters(codec="utf-8"), max_size=4) | st.sampled_from(['a"b', "a\\b", "é", "x.1.2", "a\n"])
symbols = st.sampled_from(["mesh", "mesh_0", "my mesh", "0m", "", "é"])
axes = st.builds(AxisRef, names) | st.builds(AxisRef.sub, names, st.integers(1, 99), st.integers(2, 99))
meshes = st.builds(
    Mesh,
    st.lists(st.builds(MeshAxis, names, st.integers(1, 99)), max_size=3).map(tuple),
    st.permutations(range(4)).map(tuple).filter(lambda ids: ids != (0, 1, 2, 3)) | st.just(()),
)
axis_lists = st.lists(axes, max_size=3).map(tuple)
dimensions = st.builds(DimensionSharding, axis_lists, st.booleans(), st.none() | st.integers(0, 20))
reducing = st.tuples(st.lists(axes, min_size=1, max_size=2).map(tuple), st.sampled_from(REDUCTION_KINDS))
shardings = st.builds(
    lambda mesh, dims, replicated, unreduced: TensorSharding(mesh, dims, replicated, *unreduced),
    symbols | meshes,
    st.lists(dimensions, max_size=3).map(tuple),
    axis_lists,
    reducing | st.just(((), "sum")),
)
factors = st.integers(0, 24)
mappings = st.lists(st.lists(factors, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
factor_sets = st.frozensets(factors, max_size=3)
rules = st.builds(
    OpShardingRule,
    st.lists(st.integers(0, 99), max_size=24).map(tuple),
    st.lists(mappings, min_size=1, max_size=3).map(tuple),
    st.lists(mappings, min_size=1, max_size=2).map(tuple),
    *(factor_sets,) * 4,
    st.booleans(),
)
ends = st.builds(EdgeValue, st.sampled_from(["operand", "result"]), st.integers(0, 12))
spreads = st.lists(ends, min_size=2, max_size=4, unique=True).flatmap(
    lambda several: st.builds(AxisSpread, axes, st.just(several[0]), st.just(tuple(several[1:])))
)
edges = st.lists(st.integers(0, 200), min_size=1, max_size=3, unique=True).flatmap(
    lambda numbers: st.tuples(
        *(st.builds(PropagationStep, st.just(n), st.lists(spreads, min_size=1, max_size=3).map(tuple)) for n in numbers)
    ).map(PropagationEdges)
)


@given(axes)
def test_axes_round_trip(axis):
    assert parse_axis(str(axis)) == axis


@given(meshes)
def test_meshes_round_trip(mesh):
    assert parse_mesh(str(mesh)) == parse_mesh(f"#sdy.mesh{mesh}") == parse_mesh(f"mesh{mesh}") == mesh


@given(shardings)
def test_shardings_round_trip(sharding):
    text = str(sharding)
    assert parse_sharding(text) == parse_sharding(f"<{text}>") == parse_sharding(f"#sdy.sharding<{text}>") == sharding


@given(rules)
def test_rules_round_trip(rule):
    text = str(rule)
    assert parse_rule(text) == parse_rule(f"<{text}>") == parse_rule(f"#sdy.op_sharding_rule<{text}>") == rule


@given(st.lists(shardings, max_size=3).map(tuple))
def test_lists_of_shardings_round_trip(several):
    text = per_value(several)
    assert parse_shardings(text) == parse_shardings(f"#sdy.sharding_per_value<{text}>") == several


@given(edges)
def test_records_of_propagation_round_trip(record):
    text = str(record)
    assert parse_propagation_edges(text) == parse_propagation_edges(f"#sdy.propagation_edges<{text}>") == record


def test_the_mesh_may_be_left_out_where_a_default_is_given():
    written = parse_sharding('[{"data"}, {"model", ?}p1], replicated={"x"}', mesh="mesh")
    assert str(written) == '@mesh, [{"data"}, {"model", ?}p1], replicated={"x"}'
    assert parse_sharding("<@other, [{}]>", mesh="mesh").mesh == "other"
    assert parse_sharding("[{?}]", mesh=Mesh.of(a=2)).mesh == Mesh.of(a=2)
    with pytest.raises(ParseError, match="expected a mesh"):
        parse_sharding("[{}]")


def test_tails_come_in_either_order_and_print_in_one():
    sharding = parse_sharding('@m,[{ "a" : (1) 2 , ?} p3], unreduced={"b"}, replicated = {"c"}')
    assert str(sharding) == '@m, [{"a":(1)2, ?}p3], replicated={"c"}, unreduced={"b"}'


@pytest.mark.parametrize(
    ("text", "kind"), [("unreduced={", "sum"), ("unreduced=sum{", "sum"), ("unreduced=max{", "max")]
)
def test_unreduced_axes_may_name_their_reduction(text, kind):
    assert parse_sharding(f'@m, [], {text}"b"}}').reduction == kind


def test_identity_device_ids_are_dropped():
    assert parse_mesh('<["a"=2], device_ids=[0, 1]>') == Mesh.of(a=2)
    assert parse_mesh("<[], device_ids=[0]>") == Mesh((), (0,))


@pytest.mark.parametrize(
    ("parse", "text", "column", "expected"),
    [
        (parse_sharding, '@m, [{"a"}', 11, "`,` or `]`, got the end"),
        (parse_sharding, '@m, [{"a", ?, "b"}]', 13, "`}` after `?`"),
        (parse_sharding, '@m, [{"a"}p01]', 11, "without leading zeros"),
        (parse_sharding, '@m, [{"a"}p]', 11, "a priority"),
        (parse_sharding, '@m, [{"a"}p-1]', 11, "a priority"),
        (parse_sharding, '@m, [{"a",}]', 11, "axis name"),
        (parse_sharding, "@m, [{a}]", 7, "double quotes"),
        (parse_sharding, '@m, [{"a":(2}]', 13, "`)`"),
        (parse_sharding, "@m [{}]", 4, "`,`"),
        (parse_sharding, "@m, [{}], replicated={}", 23, "leave an empty list out"),
        (parse_sharding, '@m, [{}], replicated={"a"}, replicated={"b"}', 29, "at most once"),
        (parse_sharding, '@m, [{}], unreduced=mean{"a"}', 21, "one of sum, max"),
        (parse_sharding, '@m, [{}], replicated=max{"a"}', 22, "`{`"),
        (parse_sharding, "<@m, [{}]", 10, "`>`"),
        (parse_sharding, "#sdy.sharding@m, [{}]", 14, "`<`"),
        (parse_sharding, "@m, [{}] x", 10, "the end"),
        (parse_mesh, '<["a"]>', 6, "`=`"),
        (parse_mesh, '<["a"=x]>', 7, "an integer"),
        (parse_mesh, '<["a"=2], device_ids=[]>', 23, "a device id"),
        (parse_mesh, '<["a\\q"=2]>', 3, "axis name"),
        (parse_axis, '"a":(1)', 8, "an integer"),
        (parse_axis, '"a', 1, "axis name"),
        (parse_shardings, "<@m, []>", 2, "`[`"),
        (parse_shardings, "[@m, []]", 2, "`<`"),
        (parse_propagation_edges, "[]", 2, "an entry"),
        (parse_propagation_edges, "[{step-0 = []}]", 13, "an entry"),
        (parse_propagation_edges, '[{step-0 = [{"a" = arg-0 -> [result-0]}]}]', 20, "`operand` or `result`"),
        (parse_rule, "([i])->([i]) {j=3}", 15, "in that order"),
        (parse_rule, "([z_0])->([i]) {i=3}", 4, "`,` or `]`"),
        (parse_rule, "([z_01])->([i]) {i=3}", 4, "`,` or `]`"),
        (parse_rule, "([i j])->([i]) {i=3}", 5, "`,` or `]`"),
        (parse_rule, "([i, ])->([i]) {i=3}", 6, "a factor"),
        (parse_rule, "([h])->([i]) {i=3}", 3, "a factor"),
        (parse_rule, "([i])->([i]) {i=3} custom", 20, "the end"),
        (parse_rule, "([i])->([i]) {i=3} permutation={i} reduction={i}", 36, "the end"),
        (parse_rule, "([i, j])->([i]) {i=3, j=2} reduction={j, i}", 39, "ascending"),
    ],
)
def test_mistakes_are_shown_with_their_column(parse, text, column, expected):
    with pytest.raises(ParseError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(f"column {column}: expected")
    assert expected in message
    assert message.splitlines()[1:] == [f"  {text}", "  " + " " * (column - 1) + "^"]


def test_factor_symbols_go_on_after_z():
    assert [factor_symbol(f) for f in (0, 17, 18, 30)] == ["i", "z", "z_1", "z_13"]
    assert parse_rule("([zz_1z_12])->([i])").operand_mappings == (((17, 18, 29),),)


def test_axes_of_collectives_are_read_by_the_same_grammar():
    odd = AxisRef('a"b')
    split = AxisRef.sub("y", 1, 2)
    for said in (
        SdyCollective("all_gather", ((odd, split), ())),
        SdyCollective("all_reduce", (odd,)),
        SdyCollective("all_to_all", params=(((odd,), 0, 1), ((split,), 1, 0))),
        SdyCollective("all_slice", ()),
    ):
        assert collective_from_attributes(said.kind, said.attributes) == said


def test_an_axis_may_have_any_name():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ('a"b', "y"))
    product = sdy.partition(jnp.dot, mesh=mesh, in_shardings=(P(None, 'a"b'), P('a"b')), out_shardings=P("y"))
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    np.testing.assert_allclose(product(x, x), x @ x)
    assert "all_reduce" in {c.kind for c in product.plan(x, x).collectives}
