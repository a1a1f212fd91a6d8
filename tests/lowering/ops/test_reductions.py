"""Terms that combine otherwise than by the sum: stated in Python, carried through every stage, right in numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.errors import ShardingError
from sdy_jax.ir.attributes import SAYABLE
from sdy_jax.ir.shardings import REDUCTION_KINDS
from sdy_jax.ir.text.modules import SourceError, parse_module
from sdy_jax.ir.verification import verify_module
from sdy_jax.lowering.planner.facts.verifier import verify_partitioned
from sdy_jax.testing import assert_same

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

KINDS = {
    "sum": (jnp.sum, "fic"),
    "product": (jnp.prod, "fic"),
    "max": (jnp.max, "fi"),
    "min": (jnp.min, "fi"),
    "and": (jnp.bitwise_and.reduce, "ib"),
    "or": (jnp.bitwise_or.reduce, "ib"),
    "xor": (jnp.bitwise_xor.reduce, "ib"),
}
"""How the terms are made, and the numbers that have the reduction: floats, integers, complex, booleans."""


def terms(numbers):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(4, 8, 16)).astype(np.float32)
    odd = x.copy()
    odd[0, 3, :4], odd[1, 5, 3:6], odd[2, 1], odd[3, :, 7] = np.nan, -np.inf, np.inf, -0.0
    small = [rng.integers(np.iinfo(d).min, np.iinfo(d).max, x.shape, d, True) for d in (np.int8, np.uint32)]
    made = {"f": [odd, odd.astype(jnp.bfloat16)], "i": small, "c": [(x + 1j * x[::-1]).astype(np.complex64)]}
    return [value for letter in numbers for value in (made | {"b": [x > -1.2]})[letter]]


def unreduced(kind, axis='"b"', split='"a"'):
    return f"[{{{split}}}, {{}}], unreduced={'' if kind == 'sum' else kind}{{{axis}}}"


def reduced(kind, x):
    return sdy.all_reduce(sdy.reshard(x, unreduced(kind)), ["b"], reduction=kind)


def scattered(kind, x):
    return sdy.reduce_scatter(sdy.sharding_constraint(x, unreduced(kind)), [[], ["b"]], reduction=kind)


def moved_about(kind, x):
    """Half of the axis is reduced at once; the other terms move before they are."""
    x = sdy.reshard(x, unreduced(kind, '"b":(1)2'))
    x = sdy.all_gather(sdy.all_to_all(x, [(["a"], 0, 1)]), [[], ["a"]])
    x = sdy.collective_permute(sdy.all_slice(x, [["a"], []]), unreduced(kind, '"b":(1)2', '"b":(2)2'))
    return sdy.all_reduce(x, ["b:(1)2"], reduction=kind)


def made_of_blocks(kind, x):
    """No device has terms: they are made of blocks."""
    x = sdy.reshard(sdy.reshard(x, "[{}, {}]"), P(None, "b"))
    return sdy.all_reduce(sdy.reshard(x, unreduced(kind, split="")), ["b"], reduction=kind)


FINISHED = (reduced, scattered, moved_about, made_of_blocks)


def same(got, expected):
    assert got.dtype == expected.dtype
    if jnp.issubdtype(got.dtype, jnp.inexact):
        close = 2e-2 if got.dtype.itemsize == 2 else 1e-5
        wide = np.complex64 if jnp.issubdtype(got.dtype, jnp.complexfloating) else np.float32
        np.testing.assert_allclose(got.astype(wide), expected.astype(wide), rtol=close, atol=close)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("finish", FINISHED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_reduction_gives_the_numbers_of_the_plain_function(kind, finish):
    reduce, numbers = KINDS[kind]
    values = terms(numbers)

    def function(values):
        return [finish(kind, reduce(x, axis=1).astype(x.dtype)) for x in values]

    run = sdy.partition(function, mesh=MESH, in_shardings=P("a", "b"))
    plan = run.plan(values)
    verify_module(plan.stages["traced"])
    verify_partitioned(plan.stages["partitioned"])
    text = plan.mlir("partitioned")
    assert str(ir.Module.parse(text, mlir.make_ir_context())) == text
    jax.tree.map(same, run(values), function(values))


def test_every_reduction_is_tried():
    assert set(KINDS) == set(REDUCTION_KINDS)


@pytest.mark.parametrize(("finish", "expected"), [(reduced, "all_reduce"), (scattered, "reduce_scatter")])
@pytest.mark.parametrize("kind", KINDS)
def test_terms_are_combined_where_it_is_written_and_nowhere_else(kind, finish, expected):
    x = np.ones((4, 8, 16), np.int32)
    plan = sdy.partition(lambda x: finish(kind, KINDS[kind][0](x, axis=1)), mesh=MESH, in_shardings=P("a", "b")).plan(x)
    assert [c.kind for c in plan.collectives] == [expected] * len(plan.collectives)
    assert len(plan.collectives) == 1


# What is stated need not be what the op makes.

X = np.random.default_rng(3).normal(size=(8, 16)).astype(np.float32)
STATED = {
    "a sum of maxima": lambda x: sdy.reshard(x.max(1), '[{"a"}], unreduced={"b"}'),
    "a maximum of sums": lambda x: sdy.reshard(x.sum(1), '[{"a"}], unreduced=max{"b"}'),
    "a constraint": lambda x: sdy.sharding_constraint(x.max(1), '[{"a"}], unreduced={"b"}'),
    "two reductions": lambda x: (
        sdy.reshard(x.max(1), '[{"a"}], unreduced=max{"b"}') + sdy.reshard(x.max(1), '[{"a"}], unreduced={"b"}')
    ),
    "one after the other": lambda x: sdy.reshard(
        sdy.reshard(x.min(1), '[{"a"}], unreduced=min{"b":(1)2}'), '[{"a"}], unreduced=product{"b":(2)2}'
    ),
    "a barrier": lambda x: jax.lax.optimization_barrier(sdy.reshard(x.max(1), '[{"a"}], unreduced=max{"b"}')),
    "branches": lambda x: sdy.reshard(
        jax.lax.cond(x[0, 0] > 0, lambda: jnp.arange(8.0), lambda: x[:, 0]), '[{}], unreduced={"b"}'
    ),
    "what a loop carries": lambda x: jax.lax.fori_loop(
        0, 3, lambda i, s: s + sdy.reshard(jnp.float32(i), '[], unreduced={"b"}') + sdy.reshard(s, unreduced("sum")), x
    ),
    "a loop": lambda x: jax.lax.fori_loop(
        0, 3, lambda _, s: sdy.reshard(jnp.maximum(s, x.max(1)), '[{"a"}], unreduced=max{"b"}'), x[:, 0]
    ),
}


@pytest.mark.parametrize("given", [P("a", "b"), P("b", "a"), P("a")])
@pytest.mark.parametrize("name", STATED)
def test_any_statement_about_terms_leaves_the_numbers_as_they_are(name, given):
    plan = assert_same(lambda x: STATED[name](x) * 2, X, mesh=MESH, in_shardings=given)
    verify_partitioned(plan.stages["partitioned"])


ERRORS = {
    "another one": (
        lambda x: sdy.all_reduce(sdy.reshard(x, unreduced("max")), ["b"]),
        r'all_reduce for `x` at .*unreduced by max, not by sum; to fix: say reduction="max"',
    ),
    "of another": (
        lambda x: sdy.reduce_scatter(sdy.reshard(x, unreduced("sum")), [["b"], []], reduction="min"),
        r'reduce_scatter for `x` at .*unreduced by sum, not by min; to fix: say reduction="sum"',
    ),
    "unreduced otherwise": (
        lambda x: sdy.replicated_to_unreduced(sdy.reshard(x, unreduced("max")), ["a"]),
        "replicated_to_unreduced for `x` at .*unreduced by max, not by sum; to fix: reduce it first",
    ),
    "of no such name": (
        lambda x: sdy.all_reduce(sdy.reshard(x, unreduced("max")), ["b"], reduction="prod"),
        "all_reduce for `x`: unknown reduction 'prod'; it is one of sum, max, min, and, or, xor, product",
    ),
    "of bits": (
        lambda x: sdy.all_reduce(x, ["b"], unreduced("and"), reduction="and"),
        "all_reduce for `x`: reduction 'and' of float32; it works on the bits of integers and booleans",
    ),
    "of complex numbers": (
        lambda x: sdy.all_reduce(x * 1j, ["b"], unreduced("max"), reduction="max"),
        "all_reduce for `x`: reduction 'max' of complex64; complex numbers have sum and product alone",
    ),
    "stated of complex numbers": (
        lambda x: sdy.reshard(x * 1j, unreduced("min")),
        "reshard for `x`: reduction 'min' of complex64; complex numbers have sum and product alone",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_say_which_reduction_does_not_fit(what):
    function, message = ERRORS[what]
    with pytest.raises(ShardingError, match=message):
        sdy.partition(lambda x: function(x), mesh=MESH).plan(X)


# As text.

MODULE = """sdy.mesh @m = <["p"=2, "q"=2]>
func.func @main(%x: tensor<8x8xi32> {sdy.sharding = #sdy.sharding<@m, [{"q"}, {"p"}]>}) -> tensor<8xi32> {
  %c = stablehlo.constant dense<0> : tensor<i32>
  %0 = stablehlo.reduce(%x init: %c) applies stablehlo.or across dimensions = [1]
    : (tensor<8x8xi32>, tensor<i32>) -> tensor<8xi32>
  %1 = sdy.reshard %0 <@m, [{"q"}], unreduced=WORD{"p"}> NAMED : tensor<8xi32>
  %2 = sdy.all_reduce WORD{"p"} %1 out_sharding=<@m, [{"q"}]> NAMED : tensor<8xi32>
  return %2 : tensor<8xi32>
}
"""


@pytest.mark.parametrize("kind", REDUCTION_KINDS)
def test_text_names_any_reduction_beside(kind):
    module = parse_module(MODULE.replace("WORD", "").replace("NAMED", named(kind)), mlir.make_ir_context())
    verify_module(module.operation)
    assert str(module).count(named(kind)) == 2


def named(kind):
    return f'{{sdy.reduction_kind = "{kind}"}}'


WORDED = MODULE.replace("NAMED", "")


@pytest.mark.parametrize("kind", SAYABLE[1:])
def test_text_names_a_reduction_that_the_dialect_can_say(kind):
    text = WORDED.replace("=WORD", f"={kind}").replace("WORD", f"{kind} ")
    verify_module(parse_module(text, mlir.make_ir_context()).operation)


@pytest.mark.parametrize("kind", [kind for kind in REDUCTION_KINDS if kind not in SAYABLE])
@pytest.mark.parametrize(("word", "line"), [("unreduced=WORD", 6), ("all_reduce WORD", 7)])
def test_text_with_a_reduction_that_the_dialect_cannot_say_is_told_how_to(kind, word, line):
    text = WORDED.replace(word, word.replace("WORD", f"{kind} "), 1).replace("WORD", "")
    problem = (
        rf"m.mlir:{line}:\d+: error: reduction `{kind}`: the SDY dialect of jaxlib .* can say sum.* only; to fix: "
    )
    with pytest.raises(SourceError, match=problem + rf".* give the op {named(kind)}"):
        parse_module(text, mlir.make_ir_context(), "m.mlir")


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_a_constraint_makes_the_terms_of_an_argument_that_comes_whole(kind):
    """Import gives the argument the constraint's sharding; arrays that are passed hold values."""

    def stated(x):
        return sdy.sharding_constraint(x, unreduced(kind))

    functions = [
        lambda x: stated(x) * 1.0,
        lambda x: jax.jit(lambda y: stated(y) * 1.0)(x) + x,
        lambda x: (stated(x), 2 * x)[1],
    ]
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    for function, factor in zip(functions, (1, 2, 2), strict=True):
        found = sdy.partition(function, mesh=MESH, on_unknown="ignore")(x)
        np.testing.assert_allclose(found, factor * x, rtol=1e-6)
