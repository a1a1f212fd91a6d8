"""`partition` in the place of `jax.jit`: by assignment, and by `install`, for all code or some modules, and back."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.calls.partitioned_function import PartitionedFunction

JIT = jax.jit
MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
ROWS = NamedSharding(MESH, P("a"))
X = jnp.arange(64.0).reshape(8, 8)

CODE = """
import functools
import jax
from jax import jit

def make(fun, **options):
    return jax.jit(fun, **options)

def make_by_name(fun, **options):
    return jit(fun, **options)

def make_later(fun, **options):
    import jax as another
    return functools.partial(another.jit, **options)(fun)

def make_decorated(fun, **options):
    return jax.jit(**options)(fun)
"""
WAYS = ("make", "make_by_name", "make_later", "make_decorated")


@pytest.fixture(autouse=True)
def jit_is_back() -> Iterator[None]:
    yield
    assert jax.jit is JIT


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """A module of a package, which has asked jax for jit at its import."""
    module = types.ModuleType("trainer.loop")
    sys.modules["trainer.loop"] = module
    exec(CODE, vars(module))
    yield module
    del sys.modules["trainer.loop"]


def is_partitioned(function: object) -> bool:
    return isinstance(function, PartitionedFunction)


@pytest.mark.parametrize("replacement", ["partition", "an object"])
def test_jit_itself_may_be_replaced(replacement, monkeypatch):
    """Nothing of ours comes back to it, whatever is planned, run, differentiated or compared."""

    class Replacement:
        def __call__(self, *args, **options):
            raise AssertionError("asked for")

        def __getattr__(self, name):
            raise AssertionError(name)

    monkeypatch.setattr(jax, "jit", sdy.partition if replacement == "partition" else Replacement())
    f = sdy.partition(lambda x: jnp.sort(jnp.sin(x) @ x, 1).sum(), in_shardings=ROWS)
    np.testing.assert_allclose(f(X), np.sort(np.sin(X) @ X, 1).sum(), rtol=1e-5)
    assert jax.grad(f)(X).shape == X.shape and f.lower(X).compile() is not None
    sdy.testing.assert_same(lambda x: x * 2, X, mesh=MESH, in_shardings=P("a"))
    sdy.verify(f, X)
    monkeypatch.undo()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chosen", [(), ("trainer",), ("trainer.loop",), ("other", "trainer")], ids=str)
def test_functions_of_the_chosen_modules_are_partitioned(library, way, chosen):
    with sdy.install(*chosen):
        f = getattr(library, way)(lambda x: x * 2, in_shardings=ROWS)
        assert is_partitioned(f) and f.plan(X).results[0].type == "f32[8@a,8]"
    np.testing.assert_array_equal(f(X), X * 2)  # and it stays so
    after = getattr(library, way)(lambda x: x * 2, in_shardings=ROWS)
    assert type(after) is type(JIT(abs))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chosen", ["train", "trainer.loops", "loop"])
def test_those_of_other_modules_are_not(library, way, chosen):
    with sdy.install(chosen):
        assert not is_partitioned(getattr(library, way)(lambda x: x * 2, in_shardings=ROWS))
        assert not is_partitioned(jax.jit(abs))


def test_a_module_itself_may_be_given_and_installing_undone(library):
    installed = sdy.install(library, on_unknown="ignore")
    assert "in trainer.loop>" in repr(installed) and is_partitioned(library.make(abs))
    assert library.make(abs)._function.options.on_unknown == "ignore"
    installed.uninstall()
    installed.uninstall()
    assert library.jit is JIT and "uninstalled" in repr(installed)


def test_the_newest_that_covers_a_module_decides(library):
    with sdy.install(on_unknown="error") as outer:
        with sdy.install("trainer", on_unknown="ignore"):
            assert library.make(abs)._function.options.on_unknown == "ignore"
            assert jax.jit(abs)._function.options.on_unknown == "error"
            outer.uninstall()
            assert is_partitioned(library.make_by_name(abs)) and not is_partitioned(jax.jit(abs))
        assert jax.jit is JIT


def with_mesh_known(jit, how):
    """A call that knows a mesh in one way, of a function that counts how often it is traced."""
    count = []

    def f(x):
        count.append(jax.sharding.get_abstract_mesh().empty)
        return (x @ x.T).sum(0)

    match how:
        case "stated":
            return jit(f, in_shardings=ROWS)(X), count
        case "of results":
            return jit(f, out_shardings=NamedSharding(MESH, P("b")))(X), count
        case "an argument":
            return jit(f)(jax.device_put(X, ROWS)), count
        case "set_mesh":
            with jax.set_mesh(MESH):
                return jit(f, in_shardings=P("a"))(X), count
        case "with mesh":
            with MESH:
                return jit(f, in_shardings=P("a"))(X), count


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", ["stated", "of results", "an argument", "set_mesh", "with mesh"])
def test_calls_that_know_a_mesh_are_partitioned(how):
    made = []
    with sdy.install(__name__):

        def jit(*args, **options):
            made.append(jax.jit(*args, **options))
            return made[-1]

        (ours, count), (theirs, wanted) = with_mesh_known(jit, how), with_mesh_known(JIT, how)
    assert made[0].plans and count == wanted
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


STAYS = {
    "no mesh": lambda jit: jit(lambda x: x * 2)(X),
    "numbers and trees": lambda jit: jit(lambda x, *, y: {"a": x + y["b"]})(2.0, y={"b": 1}),
    "static arguments": lambda jit: jit(lambda x, n: x * n, static_argnums=1)(X, 3),
    "donated": lambda jit: jit(lambda x: x * 2, donate_argnums=0)(X + 0),
    "under grad": lambda jit: jax.grad(lambda x: jit(jnp.sin)(x).sum())(X),
    "under vmap": lambda jit: jax.vmap(jit(jnp.sum))(X),
    "inside of jit": lambda jit: jit(lambda x: jit(jnp.sin)(x) + 1)(X),
    "shapes": lambda jit: jit(jnp.sin).eval_shape(X).shape,
    "lowered": lambda jit: jit(jnp.sin).lower(X).compile()(X),
    "traced": lambda jit: str(jit(jnp.sin).trace(X).jaxpr),
    "on a device": lambda jit: jit(jnp.sin, device=jax.devices()[1])(X).devices(),
    "a constraint inside": lambda jit: jit(lambda x: jax.lax.with_sharding_constraint(x, ROWS))(X).sharding.spec,
}


@pytest.mark.parametrize("name", STAYS)
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_calls_without_a_mesh_are_those_of_jit(name):
    made = []
    with sdy.install(__name__):

        def jit(*args, **options):
            made.append(jax.jit(*args, **options))
            return made[-1]

        ours = STAYS[name](jit)
    theirs = STAYS[name](JIT)
    assert not any(function.plans for function in made if is_partitioned(function))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_call_without_a_mesh_that_was_seen_goes_the_way_of_jit():
    with sdy.install(__name__):
        f = jax.jit(lambda x: x * 2)
    f(X)
    asked = f._function.knows_mesh
    f._function.knows_mesh = lambda *args: pytest.fail("asked again")
    np.testing.assert_array_equal(f(X), X * 2)
    f._function.knows_mesh = asked
    assert f._cache_size() == 1


def test_functions_that_partitioned_ones_call_are_parts_of_these():
    with sdy.install(__name__):
        inner = jax.jit(lambda x, w: x @ w, in_shardings=(ROWS, None))
        outer = jax.jit(lambda x: inner(jnp.sin(x), x).sum(), in_shardings=ROWS)
    np.testing.assert_allclose(outer(X), (np.sin(X) @ X).sum(), rtol=1e-5)
    assert len(outer.plans) == 1 and not inner.plans


def test_methods_and_functions_with_options_given_before(library):
    with sdy.install(__name__):

        class Model:
            @functools.partial(jax.jit, static_argnums=0)
            def apply(self, x):
                return x + 1

    np.testing.assert_array_equal(Model().apply(X), X + 1)
    np.testing.assert_array_equal(Model().apply(jax.device_put(X, ROWS)), X + 1)


def test_jax_and_libraries_of_jax_have_jit():
    with sdy.install():
        for name, module in [*sys.modules.items()]:
            if name.split(".")[0] in ("jax", "sdy_jax") and "jit" in vars(module) and name != "jax":
                assert vars(module)["jit"] is not jax.jit, name


@pytest.mark.parametrize(
    "options, said",
    [({"mesh": MESH}, "no option 'mesh'"), ({"in_shardings": ROWS}, "no option"), ({"memory": -1}, "memory=-1")],
    ids=str,
)
def test_what_is_no_option_is_refused(options, said):
    with pytest.raises(sdy.SdyError, match=said):
        sdy.install(**options)
    with pytest.raises(sdy.ArgumentError, match="expected modules"):
        sdy.install(3)
