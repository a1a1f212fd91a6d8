"""Errors speak of the user's function, arguments and lines, and say what would be right."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = jnp.ones((8, 8))
PARAMS = {"w1": X, "w2": X}
HERE = re.escape(__file__)


def mlp(params, x):
    return x @ params["w1"] @ params["w2"]


def pair(a, b):
    return a + b, {"s": a - b}


def line_of(fun):
    return inspect.getsourcelines(fun)[1]


# Tracing errors -------------------------------------------------------------------------------------------------------


def branches(params, x, scale=1):
    return x if params["w1"].sum() > 0 else x * scale


def chosen(n, x, *, flag):
    return x[:n] if flag else x


def through_numpy(params, x):
    return np.asarray(x)


class Model:
    def __call__(self, params, x):
        return x if x.sum() > 0 else -x


def wrapped(params, x):
    return through_numpy(params, x)


TRACED = {
    "an argument in a tree": (branches, {}, (PARAMS, X), {}, "branches", "params['w1']"),
    "behind a static argument": (chosen, {"static_argnums": 0}, (3, X), {"flag": True}, "chosen", "flag"),
    "static by name": (branches, {"static_argnames": "scale"}, (PARAMS, X), {"scale": 2}, "branches", "params['w1']"),
    "by keyword": (branches, {}, (), {"params": PARAMS, "x": X}, "branches", "params['w1']"),
    "to numpy": (through_numpy, {}, (PARAMS, X), {}, "through_numpy", "x"),
    "bound by partial": (functools.partial(branches, scale=2), {}, (PARAMS, X), {}, "branches", "params['w1']"),
    "a callable object": (Model(), {}, (PARAMS, X), {}, "__call__", "x"),
    "a method": (Model().__call__, {}, (PARAMS, X), {}, "__call__", "x"),
}


@pytest.mark.parametrize("fun, options, args, kwargs, name, argument", TRACED.values(), ids=TRACED)
@pytest.mark.parametrize("method", ["__call__", "plan", "lower", "eval_shape"])
def test_tracing_errors_name_the_users_function_and_argument(mesh, fun, options, args, kwargs, name, argument, method):
    partitioned = sdy.partition(fun, mesh=mesh, **options)
    with pytest.raises(jax.errors.JAXTypeError) as caught:
        getattr(partitioned, method)(*args, **kwargs)
    said = str(caught.value)
    assert re.search(rf"function {name} at {HERE}:\d+ for jit", said), said
    assert f"the value of the argument {argument}." in said


def test_a_leaked_value_names_the_function_that_leaked_it(mesh):
    kept = []

    def leaks(x):
        kept.append(x * 2)
        return x

    sdy.partition(leaks, mesh=mesh)(X)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=rf"leaks at {HERE}:{line_of(leaks)} traced for jit"):
        kept[0] + 1


def test_a_plan_of_a_partial_function_has_the_functions_name(mesh):
    assert sdy.partition(functools.partial(mlp, PARAMS), mesh=mesh).plan(X).name == "mlp"


# Calls ----------------------------------------------------------------------------------------------------------------


def only_named(a, *, b):
    return a + b


CALLS = {
    "too few": (
        mlp,
        (PARAMS,),
        {},
        "mlp() missing 1 required positional argument: 'x'; its parameters are (params, x)",
    ),
    "far too few": (mlp, (), {}, "mlp() missing 2 required positional arguments: 'params' and 'x'"),
    "too many": (mlp, (PARAMS, X, X), {}, "mlp() takes 2 positional arguments but 3 were given"),
    "unknown keyword": (mlp, (PARAMS, X), {"y": X}, "mlp() got an unexpected keyword argument 'y'; its parameters are"),
    "twice": (mlp, (PARAMS, X), {"x": X}, "mlp() got multiple values for argument 'x'"),
    "a keyword is missing": (only_named, (X,), {}, "only_named() missing 1 required keyword-only argument: 'b'"),
}


@pytest.mark.parametrize("fun, args, kwargs, said", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("method", ["__call__", "plan", "lower", "eval_shape"])
def test_a_call_that_does_not_fit_is_refused_as_python_does(mesh, fun, args, kwargs, said, method):
    partitioned = sdy.partition(fun, mesh=mesh, in_shardings=(None, P("data")))
    for kind in (TypeError, sdy.ArgumentError, sdy.SdyError):
        with pytest.raises(kind, match=re.escape(said)):
            getattr(partitioned, method)(*args, **kwargs)


def test_annotations_of_parameters_are_left_out(mesh):
    def annotated(x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x * scale

    with pytest.raises(TypeError, match=re.escape("its parameters are (x, scale=1.0)")):
        sdy.partition(annotated, mesh=mesh)()


PROGRAM = "func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> { return %x : tensor<8x8xf32> }"


@pytest.mark.parametrize(
    "args, kwargs, got",
    [((), {}, "none"), ((X, X), {}, "arg0: f32[8,8], args[1]: f32[8,8]"), ((), {"y": X}, "y: f32[8,8]")],
)
def test_a_loaded_program_says_what_it_takes(mesh, args, kwargs, got):
    with pytest.raises(TypeError, match=re.escape(f"main() takes arg0: f32[8,8]; it got {got}")):
        sdy.partition(sdy.loads(PROGRAM), mesh=mesh)(*args, **kwargs)


# Arguments that are no arrays -----------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class Layer:
    """As an equinox module: a tree with leaves that are functions, and no hash."""

    __hash__ = None

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation

    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.GetAttrKey, ("weight", "activation"))
        return tuple(zip(keys, (self.weight, self.activation), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Plain:
    """A class that jax knows nothing of."""

    def __call__(self, x):
        return x


def apply(layer, x):
    return layer.activation(x @ layer.weight)


LEAVES = {
    "a function in a tree": (
        (Layer(X, jax.nn.relu), X),
        {},
        ["`layer.activation`", "close over the rest", "eqx.combine"],
    ),
    "a static tree with arrays": (
        (Layer(X, jnp.sin), X),
        {"static_argnums": 0},
        ["static argument `layer` is a Layer", "It holds arrays", "ordinary argument"],
    ),
    "an object": ((Plain(), X), {}, ["`layer` is a Plain", "register_dataclass"]),
    "text": (("relu", X), {}, ["`layer` is a str", "static_argnums"]),
    "text for numpy": (
        (np.array(["a"]), X),
        {},
        ["`layer` is an array of numpy's dtype <U1", "of a dtype that jax has"],
    ),
}


@pytest.mark.parametrize("args, options, words", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("method", ["__call__", "plan", "eval_shape"])
def test_what_is_no_array_gets_advice_that_helps(mesh, args, options, words, method):
    with pytest.raises(sdy.SdyError) as caught:
        getattr(sdy.partition(apply, mesh=mesh, **options), method)(*args)
    assert all(word in str(caught.value) for word in words), caught.value
    if "a tree" in words[0] or "activation" in words[0]:
        assert "static_arg" not in str(caught.value)


def test_the_advice_for_trees_with_functions_works(mesh):
    layer = Layer(X, jax.nn.relu)
    leaves, tree = jax.tree.flatten(layer)
    arrays = [leaf if isinstance(leaf, jax.Array) else None for leaf in leaves]

    def applied(arrays, x):
        whole = [leaf if array is None else array for array, leaf in zip(arrays, leaves, strict=True)]
        return apply(jax.tree.unflatten(tree, whole), x)

    assert (sdy.partition(applied, mesh=mesh)(arrays, X) == apply(layer, X)).all()


# Shardings and options ------------------------------------------------------------------------------------------------


SAYS_P = ["is the string 'data'", "write P('data')", """'[{"data"}, {?}]'"""]
OPTIONS = {
    "the name of an axis": (mlp, {"in_shardings": "data"}, ["in_shardings for `params['w1']`", *SAYS_P]),
    "the name of an axis, for one": (mlp, {"in_shardings": (None, "data")}, ["in_shardings for `x`", *SAYS_P]),
    "the name of an axis, for results": (mlp, {"out_shardings": "data"}, ["out_shardings for `result`", *SAYS_P]),
    "names of axes": (mlp, {"in_shardings": "data,model"}, ["write P('data', 'model')"]),
    "a tuple too long": (
        pair,
        {"out_shardings": (P(), P(), P())},
        ["does not match `result`", "has a tuple of 3 there, where the function returns a tuple of 2"],
    ),
    "another key": (
        pair,
        {"out_shardings": (P(), {"t": P()})},
        ["does not match `result[1]`", "lacks ['s'] and it has ['t'], which `result[1]` has not"],
    ),
    "a tuple for a dict": (
        pair,
        {"out_shardings": (P(), (P(),))},
        ["`result[1]`", "has a tuple of 1 there, where the function returns a dict"],
    ),
    "a tuple for an array": (mlp, {"out_shardings": (P(), P())}, ["where the function returns a single array"]),
    "an argument's key": (mlp, {"in_shardings": ({"w1": P()}, P())}, ["does not match `params`", "lacks ['w2']"]),
    "a dict of arrays": (mlp, {"in_shardings": {"w1": P()}}, ["entry for 'w1', which is no parameter", "(params, x)"]),
    "a mesh": (mlp, {"in_shardings": jax.sharding.Mesh(jax.devices(), "i")}, ["is a Mesh", "pass it as mesh="]),
    "a number": (
        mlp,
        {"in_shardings": (None, 3)},
        ["in_shardings has an int for `x`", "expected None, a PartitionSpec"],
    ),
    "the shape of a mesh": (
        mlp,
        {"mesh": (2, 4)},
        ["the tuple (2, 4)", "mesh=jax.make_mesh((2, 4), ('data', 'model'))"],
    ),
    "three sizes": (mlp, {"mesh": (2, 2, 2)}, ["jax.make_mesh((2, 2, 2), ('data', 'model', 'axis2'))"]),
    "axes by name": (mlp, {"mesh": {"x": 8}}, ["jax.make_mesh((8,), ('x',))"]),
    "the text of a mesh": (mlp, {"mesh": "data=2,model=4"}, ["jax.make_mesh((2, 4), ('data', 'model'))"]),
    "a static position": (mlp, {"static_argnums": 5}, ["mlp() has static_argnums=(5,)", "2 positional arguments"]),
    "a static name": (mlp, {"static_argnames": "foo"}, ["mlp() has invalid argnames {'foo'}"]),
    "a position that is text": (mlp, {"static_argnums": "x"}, ["static_argnums='x'; expected an int"]),
    "donated text": (mlp, {"donate_argnums": "x"}, ["the options of mlp: "]),
    "a spec in quotes": (mlp, {"in_shardings": (None, "P('data')")}, ["in_shardings for `x`", "without the quotes"]),
    "a donated position": (mlp, {"donate_argnums": 7}, ["mlp() has donate_argnums=(7,)"]),
    "costs": (mlp, {"costs": 3}, ["costs is an int; expected a CostModel"]),
    "compiler options": (mlp, {"compiler_options": 3}, ["compiler_options is an int; expected a dict"]),
}


@pytest.mark.parametrize("fun, options, words", OPTIONS.values(), ids=OPTIONS)
def test_wrong_shardings_and_options_say_what_would_be_right(mesh, fun, options, words):
    with pytest.raises(sdy.SdyError) as caught:
        sdy.partition(fun, **({"mesh": mesh} | options))(PARAMS if fun is mlp else X, X)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_constraint_on_what_is_no_array_names_it(mesh):
    with pytest.raises(sdy.ShardingError, match=re.escape("sharding_constraint: `x['f']` is a str ('relu'); expected")):
        sdy.partition(lambda x: sdy.sharding_constraint({"f": "relu"}, P("data")), mesh=mesh)(X)


def test_a_call_needs_values_and_a_plan_does_not(mesh):
    like, partitioned = jax.ShapeDtypeStruct((8, 8), jnp.float32), sdy.partition(mlp, mesh=mesh)
    with pytest.raises(
        sdy.ArgumentError, match=re.escape("`x` is a ShapeDtypeStruct, which holds no values; call mlp()")
    ):
        partitioned(PARAMS, like)
    partitioned.plan(PARAMS, like), partitioned.lower(PARAMS, like)


def test_a_constraint_that_is_the_name_of_an_axis_says_what_to_write(mesh):
    with pytest.raises(sdy.ParseError, match=re.escape("sharding_constraint for `x` is the string 'data'")):
        sdy.partition(lambda x: sdy.sharding_constraint(x, "data"), mesh=mesh)(X)


def test_questions_that_are_no_names_are_refused(mesh):
    plan = sdy.partition(mlp, mesh=mesh, in_shardings=(None, P("data"))).plan(PARAMS, X)
    with pytest.raises(sdy.SdyError, match="3 is no name of a value"):
        plan.why(3)
    with pytest.raises(sdy.SdyError, match="no mesh axis is called 3"):
        plan.why_not("x", 3)


def test_a_program_is_loaded_from_a_path_or_bytes():
    with pytest.raises(sdy.ArgumentError, match="load got an int; expected a path"):
        sdy.load(3)


def test_arguments_with_shardings_still_work(mesh):
    sharding = NamedSharding(mesh, P("data"))
    result = sdy.partition(mlp, mesh=mesh, in_shardings=(None, sharding), out_shardings=sharding)(PARAMS, X)
    assert (result == mlp(PARAMS, X)).all()
