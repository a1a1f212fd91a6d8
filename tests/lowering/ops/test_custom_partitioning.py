"""`custom_partitioning` functions as under `jax.jit`: asked with the layouts that were chosen, and obeyed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import BATCHING, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
LINE = jax.make_mesh((8,), ("q",), axis_types=(AxisType.Auto,))
X = np.arange(32 * 16, dtype=np.float32).reshape(32, 16)
SEEN: list[Any] = []


def on(*entries: Any, mesh: jax.sharding.Mesh = MESH) -> NamedSharding:
    return NamedSharding(mesh, P(*entries))


def given(mesh: Any, args: Any, result: Any) -> tuple[Any, Any]:
    """What a `partition` is asked with, noted; as jit gives it."""
    taken = jax.tree.map(lambda s: s.sharding, args)
    made = jax.tree.map(lambda s: s.sharding, result)
    leaves = jax.tree.leaves((args, result))
    SEEN.append((mesh, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)))
    return taken, made


class Case(NamedTuple):
    """A function with a rule and a partition; its arguments and their shardings."""

    fun: Callable[..., Any]
    partition: Callable[..., Any]
    rule: Any
    specs: tuple[Any, ...]
    out: Any = None
    args: tuple[Any, ...] = (X,)
    options: dict[str, Any] = {}  # noqa: RUF012 - not changed

    def defined(self) -> Callable[..., Any]:
        op = custom_partitioning(self.fun)
        op.def_partition(self.partition, sharding_rule=self.rule, **self.options)
        return lambda *args: op(*args)


def doubled(x):
    return x * 2


def wanting(arguments: tuple[Any, ...], result: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Asks for these specs, whatever was chosen."""

    def partition(mesh, args, outs):
        given(mesh, args, outs)
        return mesh, run, NamedSharding(mesh, result), tuple(NamedSharding(mesh, spec) for spec in arguments)

    return partition


def agreeing(run: Callable[..., Any]) -> Callable[..., Any]:
    def partition(mesh, args, outs):
        taken, made = given(mesh, args, outs)
        return mesh, run, made, taken

    return partition


def on_another_mesh(mesh, args, outs):
    given(mesh, args, outs)
    return mesh, doubled, on("q", mesh=LINE), (on("q", mesh=LINE),)


def numbered(x):
    """Along `y` of the mesh each half of the rows has the number of its device."""
    return x + jnp.repeat(jnp.arange(2, dtype=x.dtype), x.shape[0] // 2)[:, None]


def flat_sum(x, y):
    return x.reshape(y.shape) + y


def rule_by_function(mesh, operands, results):
    assert mesh.axis_names == ("x", "y") and str(operands[0]) == str(results[0]) == "tensor<32x16xf32>"
    return "i j -> i j", {"need_replication_factors": ("j",)}


COMPOSED = np.arange(64, dtype=np.float32)

CASES = {
    "whole": Case(doubled, wanting((P(None),), P(None), doubled), "i j -> i j", (P(None, "x"),), P("x")),
    "swapped": Case(
        numbered,
        wanting((P("y", "x"),), P("y", "x"), lambda x: x + jax.lax.axis_index("y")),
        "i j -> i j",
        (P("x", "y"),),
        P("x", "y"),
    ),
    "result": Case(
        doubled,
        wanting((P("x"),), P(), lambda x: jax.lax.all_gather(x, "x", tiled=True) * 2),
        "i j -> i j",
        (P("x", "y"),),
        P("x", "y"),
    ),
    "split": Case(doubled, wanting((P("x"),), P("x"), doubled), "i j -> i j", (P(),), P()),
    "uneven": Case(doubled, wanting((P("x"),), P("x"), doubled), "i j -> i j", (P(),), P(), (X[:30],)),
    "other mesh": Case(doubled, on_another_mesh, "i j -> i j", (P(None, "x"),), P("x")),
    "no rule": Case(doubled, wanting((P("x"),), P("x"), doubled), None, (P("x", "y"),), P()),
    "composed": Case(
        flat_sum,
        agreeing(lambda x, y: x.reshape((16,)) + y),
        "(i k) j, (i k j) -> (i k j)",
        (P("x", None), P("x")),
        P("x"),
        (COMPOSED.reshape(16, 4), COMPOSED),
        {"i": 4, "k": 4, "need_replication_factors": ("k",)},
    ),
    "product": Case(
        lambda x, w: x @ w,
        wanting((P("x", "y"), P("y")), P("x"), lambda x, w: jax.lax.psum(x @ w, "y")),
        "i j, j k -> i k",
        (P("x"), P()),
        P("x"),
        (X, X.T),
        {"reduction_factors": ("j",)},
    ),
    "tree": Case(
        lambda xs: xs["a"] + xs["b"],
        agreeing(lambda xs: xs["a"] + xs["b"]),
        "i j, i j -> i j",
        (P("x", "y"),),
        P("x", "y"),
        ({"a": X, "b": X},),
    ),
    "rule as an object": Case(
        doubled,
        agreeing(doubled),
        SdyShardingRule(operand_mappings=((BATCHING, "i"),), result_mappings=((BATCHING, "i"),)),
        (P("x", "y"),),
        P("x", "y"),
    ),
    "rule by a function": Case(doubled, agreeing(doubled), rule_by_function, (P("x"),), P("x")),
}


def both(case: Case) -> list[tuple[Any, list[Any]]]:
    """The results of jit, then ours, and what their partitions were asked with."""
    found = []
    for jit in (jax.jit, sdy.partition):
        SEEN.clear()
        shardings = [NamedSharding(MESH, spec) for spec in case.specs]
        out = NamedSharding(MESH, case.out)
        result = jit(case.defined(), in_shardings=tuple(shardings), out_shardings=out)(*case.args)
        found.append((result, list(SEEN)))
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_partition_asks_for_is_obeyed_as_under_jit(name: str) -> None:
    (wanted, jits), (result, asked) = both(CASES[name])
    np.testing.assert_array_equal(result, wanted)
    np.testing.assert_array_equal(result, CASES[name].fun(*CASES[name].args))
    assert result.sharding == wanted.sharding
    assert jits and {type(mesh) for mesh, _ in asked} == {type(mesh) for mesh, _ in jits}
    assert {mesh for mesh, _ in asked} == {mesh for mesh, _ in jits}, "the mesh, its names and types"
    assert {tuple(leaf[:2] for leaf in leaves) for _, leaves in asked} == {
        tuple(leaf[:2] for leaf in leaves) for _, leaves in jits
    }


@pytest.mark.parametrize("name", CASES)
def test_the_plan_lists_what_obeying_sends(name: str) -> None:
    case = CASES[name]
    run = sdy.partition(case.defined(), mesh=MESH, in_shardings=case.specs, out_shardings=case.out)
    compiled = totals(collectives_in_hlo(run.lower(*case.args).compile().as_text()))
    by_jit = jax.jit(
        case.defined(),
        in_shardings=tuple(NamedSharding(MESH, spec) for spec in case.specs),
        out_shardings=NamedSharding(MESH, case.out),
    )
    jits = totals(collectives_in_hlo(by_jit.lower(*case.args).compile().as_text()))
    assert run.plan(*case.args).wire_bytes == compiled.wire_bytes
    # No axis is cut in parts that the function does not know by name: `swapped` sends 960 B, not 768.
    assert compiled.wire_bytes <= jits.wire_bytes * (1.25 if name == "swapped" else 1)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_in_the_context_of_a_mesh_and_without(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    run = sdy.partition(Case(doubled, agreeing(doubled), "i j -> i j", ()).defined())
    outside = run(x)
    with jax.set_mesh(mesh):
        inside = run(x)
    for result in (outside, inside):
        np.testing.assert_array_equal(result, X * 2)
        assert result.sharding.is_equivalent_to(x.sharding, 2)


def test_ops_around_and_loops() -> None:
    op = CASES["swapped"].defined()

    def around(x):
        x, _ = jax.lax.scan(lambda c, _: (op(c) / 2, None), x, None, length=3)
        return op(x) @ x.T

    run = sdy.partition(around, mesh=MESH, in_shardings=P("x", "y"), out_shardings=P("x", "y"))
    wanted = X
    for _ in range(3):
        wanted = np.asarray(numbered(wanted)) / 2
    np.testing.assert_allclose(run(X), np.asarray(numbered(wanted)) @ wanted.T, rtol=1e-5)


def raising(mesh, args, outs):
    raise RuntimeError("my own problem")


def raising_on_blocks(mesh, args, outs):
    return mesh, lambda x: raising(mesh, x, x), *reversed(given(mesh, args, outs))


WRONG = {
    "raises": (raising, "i j -> i j", "my own problem"),
    "function raises": (raising_on_blocks, "i j -> i j", "my own problem"),
    "shapes": (
        lambda mesh, *_: (mesh, doubled, on(), (on(None, "x"),)),
        "i j -> i j",
        "Mismatch in result shapes",
    ),
    "no shardings": (lambda mesh, *_: (mesh, doubled, None, (None,)), "i j -> i j", "must return Sharding"),
    "too few": (lambda mesh, *_: (mesh, doubled), "i j -> i j", r"expected 4"),
    "rank": (agreeing(doubled), "i j k -> i j k", "0th operand has rank 3, but the operation 0th operand has rank 2"),
    "rule": (agreeing(doubled), lambda *_: 3, "must produce either an SdyShardingRule object or an Einsum-like"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_callbacks_say_what_jits_say(name: str) -> None:
    partition, rule, message = WRONG[name]
    run = Case(doubled, partition, rule, ()).defined()
    for jit in (jax.jit, sdy.partition):
        with pytest.raises(Exception, match=message) as caught:
            jit(run, in_shardings=on(None, "x"), out_shardings=on("x"))(X)
    assert "bug in sdy_jax" not in str(caught.value)


def test_shardings_of_another_tree_than_the_arguments() -> None:
    run = Case(doubled, lambda mesh, *_: (mesh, doubled, on(), (on(), on())), "i j -> i j", ()).defined()
    with pytest.raises(sdy.SdyError, match=r"argument shardings .* expected one for each leaf"):
        sdy.partition(run, in_shardings=on("x"))(X)


@pytest.mark.parametrize("name", ["split", "whole", "composed"])
def test_parts_of_axes_elsewhere_in_the_program(name: str) -> None:
    case = CASES[name]
    op = case.defined()
    parts = '[{"x":(1)2}, {"x":(2)2}]'
    run = sdy.partition(lambda z, *args: (op(*args), z * 2), mesh=MESH, in_shardings=(parts, *case.specs))
    found, doubles = run(X, *case.args)
    np.testing.assert_array_equal(found, case.fun(*case.args))
    np.testing.assert_array_equal(doubles, X * 2)


def test_operands_in_parts_of_axes_are_given_on_whole_ones() -> None:
    run = sdy.partition(CASES["split"].defined(), mesh=MESH, in_shardings='[{"x":(1)2}, {"x":(2)2}]')
    np.testing.assert_array_equal(run(X), X * 2)


def in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, x: x + i * jax.lax.pmean(x, "x"), x)


def in_a_call(x):
    return jax.jit(lambda x: x + jax.lax.psum(x, ("x", "y")))(x) + COMPOSED[:16]


def ring(size):
    return [(i, (i + 1) % size) for i in range(size)]


ROWS, COLUMNS = P("x"), P(None, "x")
NAMING = {
    "index": (lambda x: x + jax.lax.axis_index("x"), ROWS, ROWS),
    "index of an axis that is whole": (lambda x: x + jax.lax.axis_index("y"), P("y"), P("y")),
    "size": (lambda x: x * jax.lax.axis_size("x"), ROWS, ROWS),
    "sum": (lambda x: jax.lax.psum(x, "x"), ROWS, P()),
    "sum over all": (lambda x: jax.lax.psum(x, ("x", "y")), P(("x", "y")), P()),
    "gather": (lambda x: jax.lax.all_gather(x, "x", tiled=True), ROWS, P()),
    "scatter": (lambda x: jax.lax.psum_scatter(x, "x", tiled=True), P(), ROWS),
    "exchange": (lambda x: jax.lax.all_to_all(x, "x", 1, 0, tiled=True), ROWS, COLUMNS),
    "ring": (lambda x: jax.lax.ppermute(x, "x", ring(4)), ROWS, ROWS),
    "loop": (in_a_loop, ROWS, ROWS),
    "call and constant": (in_a_call, ROWS, ROWS),
}


def naming(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What a function that names axes computes, and a program with it."""
    run, taken, made = NAMING[name]
    mapped = jax.shard_map(run, mesh=MESH, in_specs=taken, out_specs=made, check_vma=False)
    shape = jax.eval_shape(mapped, X).shape
    op = custom_partitioning(lambda x: jnp.zeros(shape, x.dtype))
    op.def_partition(wanting((taken,), made, run), sharding_rule=None)
    return mapped, lambda z, x: (op(x), z * 2)


PARTS = '[{"x":(1)2}, {"x":(2)2}]'


@pytest.mark.parametrize("name", NAMING)
def test_a_function_that_names_an_axis_which_the_program_cuts(name: str) -> None:
    mapped, program = naming(name)
    (found, doubled_z), wanted = sdy.partition(program, mesh=MESH, in_shardings=(PARTS, P("x")))(X, X), mapped(X)
    by_jit, _ = jax.jit(program, in_shardings=on("x"))(X, X)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(found, by_jit, rtol=1e-6)
    np.testing.assert_array_equal(doubled_z, X * 2)


def test_a_product_over_an_axis_that_the_program_cuts() -> None:
    case = CASES["product"]
    op = case.defined()
    run = sdy.partition(lambda z, *args: (op(*args), z * 2), mesh=MESH, in_shardings=(PARTS, *case.specs))
    np.testing.assert_array_equal(run(X, *case.args)[0], X @ X.T)
    compiled = totals(collectives_in_hlo(run.lower(X, *case.args).compile().as_text()))
    assert run.plan(X, *case.args).wire_bytes == compiled.wire_bytes > 0


def test_such_a_function_under_vmap() -> None:
    _, program = naming("index")
    run, two = sdy.partition(program, mesh=MESH, in_shardings=(PARTS, P("x"))), np.stack([X, X + 1])
    found, _ = jax.vmap(run)(two, two)
    np.testing.assert_array_equal(found, two + np.repeat(np.arange(4), 8)[None, :, None])


@custom_partitioning
def shares(x: jax.Array) -> jax.Array:
    return x / x.sum(0) + jnp.arange(len(x))[:, None]


def of_shares(mesh: Any, arguments: Any, result: Any) -> Any:
    def on_blocks(x: jax.Array) -> jax.Array:
        first = lax.axis_index("x") * x.shape[0]
        return x / lax.psum(x.sum(0), "x") + first + jnp.arange(x.shape[0])[:, None]

    lies = NamedSharding(mesh, P("x", "y"))
    return mesh, on_blocks, lies, (lies,)


shares.def_partition(partition=of_shares, sharding_rule="i j -> i j")


@pytest.mark.parametrize("is_in_loop", [False, True])
def test_a_function_that_names_an_axis_which_the_plan_cuts_is_written_in_python(is_in_loop: bool) -> None:
    """In the names of the parts, of which it is made."""

    def fun(x: jax.Array) -> Any:
        x = sdy.sharding_constraint(x, '[{"x":(1)2}, {"y"}]')
        if is_in_loop:
            return lax.scan(lambda x, _: (shares(x) + 1, x.sum()), x, None, length=3)
        return shares(x) + shares(jnp.sin(x))[::-1]

    mesh, x = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), jnp.arange(64.0).reshape(8, 8) + 1
    text = str(sdy.partition(fun, mesh=mesh).plan(x).to_python())
    assert re.search(r'lax\.psum\(.*\("x\.1\.2", "x\.2\.2"\)\)', text), text
    module: dict[str, Any] = {}
    exec(text, module)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), module["fun"](x), fun(x))
