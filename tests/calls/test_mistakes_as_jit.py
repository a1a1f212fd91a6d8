"""What jit refuses, `partition` refuses: with the same kind of exception, as early, and by the path of the argument.

Each case is a call, made with `jax.jit` and with `partition`, directly and by jit's stages. What jit says where a
function is made, traced, lowered, compiled or run is compared by the stage and by the class of the exception. `BEYOND`
has what jit refuses and `partition` takes, as its documentation says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding, reshard
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

AUTO = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
NAMED = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
REVERSED = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[::-1])
HALF = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def on(mesh: jax.sharding.Mesh, *entries: Any, **terms: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*entries, **terms))


ROWS = on(AUTO, "x")


def placed(mesh: jax.sharding.Mesh, *entries: Any) -> jax.Array:
    return jax.device_put(X, on(mesh, *entries))


class Case(NamedTuple):
    """A call.

    Attributes:
        fun: the function.
        args: its arguments.
        options: of jit.
        names: what our message names; empty where jax's words are passed on.
        context: what is around the call.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    names: str
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def taking(in_shardings: Any, names: str, fun: Callable[..., Any] = lambda x: x, *args: Any, **others: Any) -> Case:
    return Case(fun, args or (X,), {"in_shardings": in_shardings}, names, **others)


def making(out_shardings: Any, names: str, fun: Callable[..., Any] = lambda x: x, *args: Any, **others: Any) -> Case:
    return Case(fun, args or (X,), {"out_shardings": out_shardings}, names, **others)


def stating(fun: Callable[..., Any], names: str, *args: Any, **others: Any) -> Case:
    return Case(fun, args or (X,), {}, names, **others)


def add(x, y):
    return x + y


def pair(x):
    return x, x


def first(tree):
    return tree["a"]


def on_auto() -> AbstractContextManager[Any]:
    return jax.set_mesh(AUTO)


def on_explicit() -> AbstractContextManager[Any]:
    return jax.set_mesh(EXPLICIT)


CASES = {
    # Trees of shardings.
    "too few entries": taking((ROWS,), "(x, y)", add, X, X),
    "too many entries": taking((ROWS,) * 3, "(x, y)", add, X, X),
    "an entry of another key": taking(({"b": ROWS},), "`tree`", first, {"a": X}),
    "an entry too many": taking(({"a": ROWS, "b": ROWS},), "`tree`", first, {"a": X}),
    "two entries for an array": taking(((ROWS, ROWS),), "`x`"),
    "an entry for two arrays": taking(((ROWS,),), "`x`", lambda x: x[0], (X, X)),
    "a list for a tuple": taking(([ROWS, ROWS],), "`x`", lambda x: x[0], (X, X)),
    "an entry less, deep": taking(
        ({"a": {"b": [ROWS]}},), "`tree['a']['b']`", lambda tree: tree["a"]["b"][0], {"a": {"b": [X, X]}}
    ),
    "one sharding for two results": making((ROWS,), "`result`", pair),
    "two shardings for one result": making((ROWS, ROWS), "`result`"),
    "a tuple for one result": making((ROWS,), "`result`"),
    "results of another key": making({"b": ROWS}, "`result`", lambda x: {"a": x}),
    "a list for results": making([ROWS, ROWS], "`result`", pair),
    "a dict for results": making({"a": ROWS}, "`result`", pair),
    # What is no sharding.
    "a number": taking(3, "in_shardings is an int"),
    "a number in a tuple": taking((3,), "`x`"),
    "a number in a tree": taking(({"a": 3},), "`tree['a']`", first, {"a": X}),
    "a number for results": making(3, "out_shardings is an int"),
    "a number for one of two results": making((ROWS, 3), "`result[1]`", pair),
    "a mesh": taking(AUTO, "in_shardings is a Mesh"),
    "a device": taking(jax.devices()[0], "in_shardings is a Device"),
    "an array": taking((X,), "`x`"),
    # No mesh.
    "a spec and no mesh": taking(P("x"), "needs a mesh"),
    "specs and no mesh": taking((P("x"),), "needs a mesh"),
    "a spec of results and no mesh": making(P("x"), "needs a mesh"),
    "a constraint and no mesh in context": making(on(AUTO), "", lambda x: lax.with_sharding_constraint(x, P("x"))),
    # Ranks.
    "a spec with too many entries": taking(on(AUTO, "x", "y", None), "`x`"),
    "a spec with too many that are None": taking(on(AUTO, None, None, None), "`x`"),
    "a result's spec with too many entries": making(on(AUTO, "x", "y", None), "`result`"),
    "a split number": taking(ROWS, "`x`", lambda x: x + 1, 1.0),
    "a split sum": making(ROWS, "`result`", lambda x: x.sum()),
    "a split vector in a tree": taking(on(AUTO, "x", "y"), "`tree['b']`", first, {"a": X, "b": X[0]}),
    "a constraint with too many entries": stating(
        lambda x: lax.with_sharding_constraint(x, on(AUTO, "x", "y", None)), ""
    ),
    # Axes.
    "an axis that there is not": taking(P("z"), "'z'", context=on_auto),
    "a result's axis that there is not": making(P("z"), "'z'", context=on_auto),
    "a constraint's axis that there is not": stating(
        lambda x: lax.with_sharding_constraint(x, P("z")), "", context=on_auto
    ),
    "an axis twice": taking(P("x", "x"), "`x`", context=on_auto),
    "an axis twice, in a tree": taking(({"a": P("x", "x")},), "`tree['a']`", first, {"a": X}, context=on_auto),
    "a result's axis twice": making((None, P("x", "x")), "`result[1]`", pair, context=on_auto),
    "an axis twice for one dimension": making(P(("x", "x")), "`result`", context=on_auto),
    "a constraint's axis twice": stating(lambda x: lax.with_sharding_constraint(x, P("x", "x")), "", context=on_auto),
    "unreduced along an Auto axis": taking(P("x", unreduced={"y"}), "`x`", context=on_auto),
    "a result unreduced along an Auto axis": making(P("x", unreduced={"y"}), "`result`", context=on_auto),
    "a constraint that says so": stating(
        lambda x: lax.with_sharding_constraint(x, P("x", unreduced={"y"})), "", context=on_auto
    ),
    "an einsum that says so": stating(
        lambda x: jnp.einsum("ij,jk->ik", x, x, out_sharding=P(unreduced={"x"})), "", context=on_auto
    ),
    # Types on Explicit axes.
    "reshard along an axis that there is not": stating(lambda x: reshard(x, P("z")), "", context=on_explicit),
    "reshard with too many entries": stating(lambda x: reshard(x, P("x", None, "y")), "", context=on_explicit),
    "reshard of a size that does not divide": stating(lambda x: reshard(x, P("x")), "", X[:7], context=on_explicit),
    "reshard to open dimensions": stating(lambda x: reshard(x, P(P.UNCONSTRAINED)), "", context=on_explicit),
    "reshard to another mesh": stating(lambda x: reshard(x, on(NAMED, "a")), "", context=on_explicit),
    "reshard to Auto axes": stating(lambda x: reshard(x, P("x")), "", context=on_auto),
    "reshard without a mesh": stating(lambda x: reshard(x, P("x")), ""),
    "a constraint that is not the type": stating(
        lambda x: lax.with_sharding_constraint(x, P("y")), "", placed(EXPLICIT, "x"), context=on_explicit
    ),
    "a size made that does not divide": stating(lambda x: jnp.zeros(7, out_sharding=P("x")), "", context=on_explicit),
    "an argument on Auto axes": stating(add, "", X, placed(EXPLICIT, "x"), context=on_auto),
    # Devices.
    "arguments on devices in two orders": stating(add, "`y`", placed(AUTO, "x"), placed(REVERSED, "x")),
    "arguments on eight devices and four": stating(add, "`y`", placed(AUTO, "x"), placed(HALF, "x")),
    "an argument on four, the other stated on eight": taking((None, ROWS), "`x`", add, placed(HALF, "x"), X),
    "an argument on four, results on eight": making(ROWS, "`x`", lambda x: x, placed(HALF, "x")),
    "an argument on one device, and one on eight": stating(
        add, "`x`", jax.device_put(X, jax.devices()[3]), placed(AUTO, "x")
    ),
    "an argument on one device, to be split": taking(ROWS, "`x`", lambda x: x, jax.device_put(X, jax.devices()[3])),
    "in_shardings on eight devices and four": taking((ROWS, on(HALF, "x")), "`y`", add, X, X),
    "in_shardings in two orders": taking((ROWS, on(REVERSED, "x")), "`y`", add, X, X),
    "results on other devices than arguments": Case(
        lambda x: x, (X,), {"in_shardings": ROWS, "out_shardings": on(HALF, "x")}, "`result`"
    ),
    "a constraint on other devices": taking(
        ROWS, "same devices", lambda x: lax.with_sharding_constraint(x, on(HALF, "x"))
    ),
    "a mesh in context of other devices": taking(on(HALF, "x"), "jax.set_mesh", context=on_auto),
    "one device, and another": Case(
        lambda x: x,
        (X,),
        {
            "in_shardings": SingleDeviceSharding(jax.devices()[2]),
            "out_shardings": SingleDeviceSharding(jax.devices()[3]),
        },
        "`result`",
    ),
    "a device and a backend": Case(lambda x: x, (X,), {"device": jax.devices()[3], "backend": "cpu"}, "leave one out"),
}

BEYOND = {
    "sizes that do not divide": taking(ROWS, "", lambda x: x * 2, X[:7]),
    "results whose sizes do not divide": making(ROWS, "", lambda x: x * 2, X[:7]),
    "sizes that do not divide, in context": taking(P("x"), "", lambda x: x * 2, X[:7], context=on_auto),
    "open dimensions": taking(on(AUTO, P.UNCONSTRAINED), "", lambda x: x * 2),
    "results with open dimensions": making(on(AUTO, P.UNCONSTRAINED), "", lambda x: x * 2),
    "an argument that lies otherwise": taking(on(AUTO, "y"), "", lambda x: x * 2, placed(AUTO, "x")),
    "one whose type says otherwise": taking(on(EXPLICIT, "y"), "", lambda x: x * 2, placed(EXPLICIT, "x")),
}
"""What docs/guide/functions.md says of `in_shardings` and `out_shardings`, and README of sizes."""

STAGES = ("make", "call", "trace", "lower", "compile", "run")


def made(jit: Callable[..., Any], case: Case, ahead: bool) -> tuple[str, Any]:
    """The stage at which a call fails, and the exception; else what it returns."""
    stage = "make"
    try:
        with case.context():
            f = jit(case.fun, **case.options)
            if not ahead:
                stage = "call"
                return "done", f(*case.args)
            stage = "trace"
            traced = f.trace(*case.args)
            stage = "lower"
            lowered = traced.lower()
            stage = "compile"
            compiled = lowered.compile()
            stage = "run"
            return "done", compiled(*case.args)
    except Exception as error:
        return stage, error


@pytest.mark.parametrize("ahead", [False, True], ids=["called", "by stages"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::sdy_jax.PartitionWarning")
def test_what_jit_refuses_is_refused_as_early(name, ahead):
    case = CASES[name]
    (stage, ours), (wanted, theirs) = (made(jit, case, ahead) for jit in (sdy.partition, jax.jit))
    assert isinstance(theirs, Exception), "jit takes it"
    assert isinstance(ours, Exception), "partition takes it"
    kind = next(kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins")
    assert isinstance(ours, kind), (ours, theirs)
    assert STAGES.index(stage) <= STAGES.index(wanted), (ours, theirs)
    if case.names and wanted != "run":
        assert isinstance(ours, sdy.SdyError) and case.names in str(ours), ours


@pytest.mark.parametrize("ahead", [False, True], ids=["called", "by stages"])
@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")
def test_what_partition_takes_beyond_jit(name, ahead):
    case = BEYOND[name]
    stage, found = made(sdy.partition, case, ahead)
    assert stage == "done", found
    np.testing.assert_array_equal(found, case.fun(*case.args))
    assert isinstance(made(jax.jit, case, ahead)[1], ValueError)


@pytest.mark.parametrize("where", ["in_shardings", "out_shardings"])
def test_sizes_that_do_not_divide_can_be_refused_as_by_jit(where):
    f = sdy.partition(lambda x: x * 2, uneven="error", **{where: ROWS})
    with pytest.raises(ValueError, match="2 does not divide 7"):
        f(X[:7])
