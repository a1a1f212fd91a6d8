"""Collectives that the user wrote keep their place and kind, in the plan and in the compiled program."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.lowering.planner.facts.verifier import verify_partitioned
from sdy_jax.plan.profile import collectives_in_hlo, totals

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
X = np.random.default_rng(2).standard_normal((8, 16), dtype=np.float32)
SENDING = ("all_gather", "all_to_all", "collective_permute", "all_reduce", "reduce_scatter")


def by_user(plan):
    return [c.kind for c in plan.collectives if c.origin == "user"]


def in_hlo(run, *arguments):
    """How many collectives of each kind the compiled program has, by the names of the dialect."""
    text = run.lower(*arguments).compile().as_text()
    return collections.Counter(c.kind.replace("-", "_") for c in collectives_in_hlo(text))


# A round trip of each kind, which costs nothing if it is optimized: it ends where it began.
ROUND_TRIPS = {
    "all_gather": (P(("a", "b")), lambda x: sdy.all_slice(sdy.all_gather(x, [["b"], []], P(("a", "b"))), [["b"], []])),
    "all_to_all": (
        P(("a", "b")),
        lambda x: sdy.all_to_all(sdy.all_to_all(x, [(["b"], 0, 1)], P(("a", "b"))) * 1, [(["b"], 1, 0)], P("a", "b")),
    ),
    "collective_permute": (
        P("a", "b"),
        lambda x: sdy.collective_permute(x, '[{"a"}, {"b":(2)2, "b":(1)2}]', P("a", "b")),
    ),
    "all_reduce": (P("a"), lambda x: sdy.all_reduce(sdy.replicated_to_unreduced(x, ["b"], P("a")), ["b"])),
    "reduce_scatter": (
        P("a"),
        lambda x: sdy.reduce_scatter(sdy.replicated_to_unreduced(x, ["b"], P("a")), [[], ["b"]]),
    ),
    "sharded_to_unreduced": (
        P("a", "b"),
        lambda x: sdy.all_reduce(sdy.sharded_to_unreduced(x, [[], ["b"]], P("a", "b")), ["b"]),
    ),
}
PLACES = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: (f(x) ** 2).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "scan": lambda f: lambda x: lax.scan(lambda s, _: (f(jnp.sin(s)), s.sum()), x, None, length=3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ROUND_TRIPS)
def test_a_collective_stays_where_it_is_written(kind, place):
    given, function = ROUND_TRIPS[kind]
    written = PLACES[place](lambda x: jnp.tanh(function(jnp.sin(x))))
    expected = PLACES[place](lambda x: jnp.tanh(jnp.sin(x)))
    specs = {"in_shardings": given, "out_shardings": None}
    run = sdy.partition(written, mesh=MESH, **specs)
    plan = run.plan(X)
    traced = re.findall(r"= sdy\.(\w+)", plan.mlir("traced"))
    assert by_user(plan) == [op for op in traced if op not in ("reshard", "constant")]
    assert kind in by_user(plan)
    verify_partitioned(plan.stages["partitioned"])
    sent = collections.Counter(c for c in by_user(plan) if c in SENDING)
    assert in_hlo(run, X) >= sent
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), run(X), expected(X))


def test_optimized_collectives_may_go():
    _, function = ROUND_TRIPS["all_gather"]
    specs = {"mesh": MESH, "in_shardings": P(("a", "b")), "out_shardings": P(("a", "b"))}
    run = sdy.partition(function, optimize_collectives=True, **specs)
    assert run.plan(X).collectives == ()
    assert not in_hlo(run, X)
    np.testing.assert_array_equal(run(X), X)
    assert by_user(sdy.partition(function, **specs).plan(X)) == ["all_gather", "all_slice"]


def test_derivatives_from_outside_keep_them_too():
    given, function = ROUND_TRIPS["all_gather"]

    def loss(x):
        return (function(jnp.sin(x)) ** 2).sum()

    run = sdy.partition(loss, mesh=MESH, in_shardings=given)
    np.testing.assert_allclose(jax.grad(run)(X), jax.grad(lambda x: (jnp.sin(x) ** 2).sum())(X), rtol=1e-5, atol=1e-6)


TEXT = """
sdy.mesh @mesh = <["a"=2, "b"=4, "one"=1]>
func.func @main(%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", "b"}, {}]>}) -> tensor<8x16xf32> {
  %0 = stablehlo.tanh %x {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a", "one", "b"}, {?}]>]>}
    : tensor<8x16xf32>
  %1 = sdy.all_gather [{"one", "b"}, {}] %0 out_sharding=<@mesh, [{"a"}, {?}]> : tensor<8x16xf32>
  %2 = sdy.all_slice [{"b"}, {}] %1 out_sharding=<@mesh, [{"a", "b"}, {}]> : tensor<8x16xf32>
  %3 = sdy.all_to_all [{"b"}: 0->1] %2 out_sharding=<@mesh, [{"a"}, {"b"}]> : tensor<8x16xf32>
  %4 = sdy.collective_permute %3 out_sharding=<@mesh, [{"b":(1)2}, {"b":(2)2, "a"}]> : tensor<8x16xf32>
  return %4 : tensor<8x16xf32>
}
"""


def test_text_keeps_its_collectives_and_their_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(TEXT)
    run = sdy.partition(sdy.load("m.mlir"))
    plan = run.plan(X)
    assert [(c.kind, c.source) for c in plan.collectives if c.origin == "user"] == [
        ("all_gather", "m.mlir:6"),
        ("all_slice", "m.mlir:7"),
        ("all_to_all", "m.mlir:8"),
        ("collective_permute", "m.mlir:9"),
    ]
    assert [c.wire_bytes for c in plan.collectives if c.origin == "user"] == [3 * 64, 0, 0.75 * 64, 64]
    verify_partitioned(plan.stages["partitioned"])
    np.testing.assert_allclose(run(X), np.tanh(X), rtol=1e-6)
    assert in_hlo(run, X).keys() == {"all_gather", "all_to_all", "collective_permute"}
    found = collectives_in_hlo(run.lower(X).compile().as_text())
    assert totals(found).wire_bytes == plan.wire_bytes
    assert main(["plan", "m.mlir", "--optimize-collectives"]) == 0
    out = capsys.readouterr().out
    assert "m.mlir:6" not in out and "m.mlir:8" not in out


def test_what_nobody_uses_does_not_run():
    def function(x):
        sdy.all_gather(x, [["b"], []], P(("a", "b")))
        return x * 2

    assert sdy.partition(function, mesh=MESH, in_shardings=P(("a", "b"))).plan(X).collectives == ()


def test_what_does_not_divide_keeps_its_kind_too():
    def function(x):
        return sdy.all_to_all(x * 1, [(["b"], 0, 1)], P("b", None))

    run = sdy.partition(function, mesh=MESH, in_shardings=P("b"), on_unknown="ignore")
    odd = X[:, :6]
    assert by_user(run.plan(odd)) == ["all_to_all"]
    np.testing.assert_array_equal(run(odd), odd)


def test_blocks_that_do_not_join_are_said_to_move_otherwise():
    def function(x):
        x = sdy.reshard(x * 1, P(("a", "b"), None))
        return sdy.all_gather(x, [["b"], []])

    run = sdy.partition(function, mesh=MESH, on_unknown="ignore")
    odd = X[:5]  # blocks of 1 on 8 devices; 4 of them are no block of 3
    plan = run.plan(odd)
    assert by_user(plan) == []
    assert "other collectives run in its place" in str(plan)
    np.testing.assert_array_equal(run(odd), odd)


TWO_MESHES = """
sdy.mesh @m = <["x"=2, "y"=4]>
sdy.mesh @n = <["p"=4, "q"=2]>
func.func @main(%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@m, [{"x"}, {}]>}) -> tensor<8x16xf32> {
  %0 = stablehlo.tanh %x {sdy.sharding = #sdy.sharding_per_value<[<@n, [{"p"}, {"q"}]>]>} : tensor<8x16xf32>
  %1 = COLLECTIVE : tensor<8x16xf32>
  return %1 : tensor<8x16xf32>
}
"""


@pytest.mark.parametrize(
    "collective",
    [
        'sdy.all_gather [{"p"}, {}] %0 out_sharding=<@n, [{}, {"q"}]>',
        'sdy.all_gather [{}, {"q"}] %0 out_sharding=<@n, [{"p"}, {}]>',
        'sdy.all_to_all [{"q"}: 1->0] %0 out_sharding=<@n, [{"p", "q"}, {}]>',
        'sdy.collective_permute %0 out_sharding=<@n, [{"p":(2)2, "p":(1)2}, {"q"}]>',
        'sdy.sharded_to_unreduced [{}, {"q"}] %0 out_sharding=<@n, [{"p"}, {}], unreduced={"q"}>',
    ],
    ids=lambda text: text.split()[0],
)
def test_collectives_on_another_mesh_stay_in_axes_of_the_base(collective):
    run = sdy.partition(sdy.loads(TWO_MESHES.replace("COLLECTIVE", collective)))
    plan = run.plan(X)
    assert by_user(plan) == [collective.split()[0].removeprefix("sdy.")]
    verify_partitioned(plan.stages["partitioned"])
    np.testing.assert_allclose(run(X), np.tanh(X), rtol=1e-6)
    found = collectives_in_hlo(run.lower(X).compile().as_text())
    assert totals(found).wire_bytes == plan.wire_bytes


def test_two_bit_integers_are_permuted_as_bytes():
    """They travel as bytes: the CPU's own permute of them corrupts memory."""
    x = (np.arange(64) % 4 - 2).astype(np.int8)
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def shifted(x):
        return lax.ppermute(x.astype(jnp.int2), ("a", "b"), ring).astype(jnp.int8)

    spec = P(("a", "b"))
    run = sdy.partition(jax.shard_map(shifted, mesh=MESH, in_specs=spec, out_specs=spec), mesh=MESH)
    permutes = [line for line in run.lower(x).as_text().splitlines() if "collective_permute" in line]
    assert permutes
    assert not any("xi2>" in line for line in permutes)
    np.testing.assert_array_equal(run(x), np.roll(x, 8))


GROUPS = [[0, 3], [1, 2], [4, 5], [6, 7]]
IN_GROUPS = {
    "all_reduce": lambda x: lax.psum(x, "d", axis_index_groups=GROUPS),
    "maximum": lambda x: lax.pmax(x, "d", axis_index_groups=GROUPS),
    "all_gather": lambda x: lax.all_gather(x, "d", axis_index_groups=GROUPS, axis=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "d", 1, 0, axis_index_groups=GROUPS, tiled=True),
    "reduce_scatter": lambda x: lax.psum_scatter(x, "d", axis_index_groups=GROUPS, scatter_dimension=1, tiled=True),
}


@pytest.mark.parametrize("kind", IN_GROUPS)
def test_two_bit_integers_travel_as_bytes_in_groups_that_no_axes_make(kind):
    """The CPU's own collectives of them corrupt memory, or there are none."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.random.default_rng(3).integers(-2, 2, (8, 8)).astype(np.int8)

    def on_blocks(dtype):
        def in_groups(x):
            return IN_GROUPS[kind](x.astype(dtype)).astype(jnp.int8)

        return jax.shard_map(in_groups, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)

    wide = np.asarray(jax.jit(on_blocks(jnp.int8))(x))  # whose two lowest bits are those of the narrow ones
    np.testing.assert_array_equal(sdy.partition(on_blocks(jnp.int2), mesh=mesh)(x), (wide + 2) % 4 - 2)
