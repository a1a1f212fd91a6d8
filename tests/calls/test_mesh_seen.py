"""The mesh that a function sees inside: where `mesh=` states one that one, else what it sees under `jax.jit`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.base.jax_tracing import context_mesh

JITS = (sdy.partition, jax.jit)
MESHES = {
    kind: jax.make_mesh((2, 4), ("a", "b"), axis_types=types)
    for kind, types in {
        "auto": (AxisType.Auto,) * 2,
        "explicit": (AxisType.Explicit,) * 2,
        "both": (AxisType.Explicit, AxisType.Auto),
    }.items()
}
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def around(context: str, mesh: jax.sharding.Mesh) -> Any:
    match context:
        case "set_mesh":
            return jax.set_mesh(mesh)
        case "with":
            return mesh
        case "use_abstract_mesh":
            return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    return nullcontext()


def argument(kind: str, mesh: jax.sharding.Mesh) -> Any:
    return {"numpy": X, "uncommitted": jnp.asarray(X)}.get(kind, jax.device_put(X, NamedSharding(mesh, P("a"))))


def outcome(run: Callable[[], Any]) -> Any:
    """What it returns, or the class of the error and its first words."""
    try:
        return run()
    except Exception as error:
        return type(error), str(error).split(".")[0]


class Questions:
    """A function that asks what libraries ask, and what it was told."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def __call__(self, x: Any) -> Any:
        y = x * 2
        types = [(str(jax.typeof(each)), jax.typeof(each).sharding) for each in (x, y)]
        self.answers.append((jax.sharding.get_abstract_mesh(), outcome(jax.sharding.get_mesh), context_mesh(), types))
        return y


CONTEXTS = ("none", "set_mesh", "with", "use_abstract_mesh")
STATED = {"in_shardings": ("in_shardings",), "out_shardings": ("out_shardings",), "nothing": ()}
CASES = [
    case
    for case in itertools.product(MESHES, CONTEXTS, ("numpy", "uncommitted", "committed"), STATED)
    if case[1] not in ("none", "use_abstract_mesh") or case[2] == "committed" or case[3] != "nothing"
]


@pytest.mark.parametrize(("kind", "context", "given", "stated"), CASES)
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_questions_are_answered_as_under_jit(kind, context, given, stated):
    mesh, answers = MESHES[kind], []
    for jit in JITS:
        asked, x = Questions(), argument(given, mesh)
        options = {name: NamedSharding(mesh, P("a")) for name in STATED[stated]}
        with around(context, mesh):
            np.testing.assert_array_equal(jit(asked, **options)(x), X * 2)
        answers.append(asked.answers)
    assert answers[0] == answers[1]


NAMES_AXES = {
    "a constraint": lambda x: jax.lax.with_sharding_constraint(x, P(None, "b")),
    "a reshard": lambda x: jax.sharding.reshard(x, P(None, "b")),
    "a shard_map": lambda x: jax.shard_map(lambda x: x + 1, in_specs=P("a"), out_specs=P("a"))(x),
}


@pytest.mark.parametrize("name", NAMES_AXES)
@pytest.mark.parametrize("context", ["none", "set_mesh"])
@pytest.mark.parametrize("given", ["numpy", "committed"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_names_of_axes_alone_need_a_mesh_in_context_as_under_jit(name, context, given, kind):
    mesh, x = MESHES[kind], argument(given, MESHES[kind])

    def run(jit):
        with around(context, mesh):
            return np.asarray(jit(NAMES_AXES[name], in_shardings=NamedSharding(mesh, P("a")))(x))

    ours, theirs = (outcome(lambda jit=jit: run(jit)) for jit in JITS)
    if isinstance(theirs, tuple):
        assert issubclass(ours[0], theirs[0]) and ours[1] == theirs[1]
    else:
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["a constraint", "a shard_map"])
def test_where_a_mesh_is_stated_it_is_in_context(name):
    mesh, asked = MESHES["auto"], Questions()
    f = sdy.partition(lambda x: NAMES_AXES[name](asked(x)), mesh=mesh, in_shardings=P("a"))
    assert outcome(lambda: f(X).shape) == (8, 8)
    seen, _, _, types = asked.answers[0]
    assert seen == mesh.abstract_mesh and all(sharding.mesh == mesh.abstract_mesh for _, sharding in types)


def test_an_error_says_how_a_mesh_comes_into_context():
    f = sdy.partition(NAMES_AXES["a constraint"], in_shardings=NamedSharding(MESHES["auto"], P("a")))
    with pytest.raises(RuntimeError) as raised:
        f(X)
    assert "sdy.partition(..., mesh=mesh), or call the function under jax.set_mesh(mesh)" in raised.value.__notes__[0]


@pytest.mark.parametrize("stated", [False, True])
def test_derivatives_see_the_same(stated):
    """The rules of a derivative are the user's code too."""
    mesh, seen = MESHES["auto"], []

    @jax.custom_vjp
    def double(x):
        return x * 2

    def backward(_, cotangent):
        seen.append(jax.sharding.get_abstract_mesh())
        return (cotangent * 2,)

    double.defvjp(lambda x: (double(x), None), backward)
    options = {"mesh": mesh, "in_shardings": P("a")} if stated else {"in_shardings": NamedSharding(mesh, P("a"))}
    f = sdy.partition(lambda x: double(x).sum(), **options)
    np.testing.assert_array_equal(jax.grad(f)(X), np.full_like(X, 2))
    assert all(found.empty != stated for found in seen) and seen


def test_a_function_inside_has_its_own_mesh_in_context():
    mesh, seen = MESHES["auto"], []
    inner = sdy.partition(lambda x: seen.append(jax.sharding.get_abstract_mesh()) or x * 2, mesh=mesh)
    outer = sdy.partition(lambda x: inner(x) + 1, in_shardings=NamedSharding(mesh, P("a")))
    np.testing.assert_array_equal(outer(X), X * 2 + 1)
    assert seen == [mesh.abstract_mesh]


def test_a_function_that_sees_another_mesh_in_types_is_traced_again_and_not_planned_again():
    mesh, traced = MESHES["auto"], []
    f = sdy.partition(lambda x: traced.append(0) or x * 2, in_shardings=NamedSharding(mesh, P("a")))
    for given in ("numpy", "numpy", "committed", "committed"):
        f(argument(given, mesh))
    assert len(traced) == 2 and f.plans[0].plan.program.module is f.plans[1].plan.program.module


def test_boxes_of_names_that_do_not_fit_are_left_alone_as_under_jit():
    """As flax's boxes of parameters: they constrain a value only where they find a mesh."""
    mesh = MESHES["auto"]

    def unboxed(x, names):
        if jax.sharding.get_abstract_mesh().empty and context_mesh().empty:
            return x
        return jax.lax.with_sharding_constraint(x, P(*names))

    for jit in JITS:
        f = jit(lambda x: unboxed(x.reshape(64), ("a", None)) * 2, in_shardings=NamedSharding(mesh, P("a")))
        np.testing.assert_array_equal(f(X), X.reshape(64) * 2)
    meta = pytest.importorskip("flax.core.meta")
    for jit in JITS:
        boxed = lambda x: meta.Partitioned(x.reshape(64), names=("a", None)).unbox() * 2  # noqa: E731
        np.testing.assert_array_equal(jit(boxed, in_shardings=NamedSharding(mesh, P("a")))(X), X.reshape(64) * 2)
