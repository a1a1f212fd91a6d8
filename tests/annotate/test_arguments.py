"""What the user says of shardings against the arguments: prefix trees, and mistakes told by path with a remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.annotate.arguments import argument_leaves, match_prefix

PARAMS = {"w1": np.ones((8, 4), np.float32), "w2": np.ones((4, 8), np.float32)}
X = np.ones((16, 8), np.float32)


def f(params, x):
    return x @ params["w1"] @ params["w2"]


def test_one_specification_stands_for_all_leaves():
    leaves = argument_leaves(P("data"), (PARAMS,), {"x": X}, ["params", "x"])
    assert [(leaf.path, leaf.spec) for leaf in leaves] == [
        ("params['w1']", P("data")),
        ("params['w2']", P("data")),
        ("x", P("data")),
    ]


def test_entries_go_with_positions_and_with_names():
    leaves = argument_leaves(({"w1": P("a"), "w2": None}, P("b")), (PARAMS,), {"x": X}, ["params", "x"])
    assert [leaf.spec for leaf in leaves] == [P("a"), None, P("b")]


def test_arguments_without_names_are_told_by_position():
    assert [leaf.path for leaf in argument_leaves(None, (X, [X]), {}, [])] == ["args[0]", "args[1][0]"]


def test_fields_of_named_tuples_go_by_their_names():
    state = optax.ScaleByAdamState(X, {"w": X}, {"w": X})
    leaves = match_prefix(optax.ScaleByAdamState(None, {"w": P("a")}, None), state, "state", "in_shardings")
    assert [(leaf.path, leaf.spec) for leaf in leaves] == [
        ("state.count", None),
        ("state.mu['w']", P("a")),
        ("state.nu['w']", None),
    ]


@jax.tree_util.register_pytree_node_class
class Block:
    """Registered without keys, as many libraries' classes are; `heads` are children one by one."""

    def __init__(self, kernel, heads, scale):
        self.kernel, self.heads, self.scale, self.depth = kernel, heads, scale, 2

    def tree_flatten(self):
        return (self.scale, *self.heads, {"k": self.kernel}), self.depth

    @classmethod
    def tree_unflatten(cls, depth, children):
        scale, *heads, held = children
        return cls(held["k"], heads, scale)


class Slotted:
    __slots__ = ("bias",)

    def __init__(self, bias):
        self.bias = bias


jax.tree_util.register_pytree_node(Slotted, lambda x: ((x.bias,), None), lambda _, children: Slotted(*children))


def test_children_without_keys_go_by_the_attributes_that_hold_them():
    block = Block(np.ones(2), [np.ones(3), Slotted(np.ones(4))], np.ones(1))
    paths = ["x.scale", "x.heads[0]", "x.heads[1].bias", "x[<flat index 3>]['k']"]
    assert [leaf.path for leaf in match_prefix(P(), block, "x", "in_shardings")] == paths
    stated = Block(P("a"), [P("b"), P("c")], P("d"))
    found = match_prefix(stated, block, "x", "in_shardings")
    assert [(leaf.path, leaf.spec) for leaf in found] == list(zip(paths, map(P, "dbca"), strict=True))


def test_one_array_in_several_attributes_goes_by_their_order():
    x, other = np.ones(2), np.ones(3)
    assert [leaf.path for leaf in match_prefix(P(), Block(other, [x, x], other), "x", "in_shardings")][1:3] == [
        "x.heads[0]",
        "x.heads[1]",
    ]
    block = Block(other, [x], other)
    block.copy = x  # which of both names is the child's cannot be known
    assert match_prefix(P(), block, "x", "in_shardings")[1].path == "x[<flat index 1>]"


def test_plans_call_such_arguments_and_results_by_attributes(mesh):
    def step(x):
        return Slotted(x.bias + 1)

    plan = sdy.partition(step, mesh=mesh, in_shardings=P("data")).plan(Slotted(X))
    assert [plan.arguments[0].path, plan.results[0].path] == ["x.bias", "result.bias"]
    assert "x.bias" in str(plan) and "flat index" not in str(plan.why("result.bias"))


def test_prefixes_may_end_at_any_depth():
    leaves = match_prefix([P("a"), (None, P("b"))], [{"k": 1, "l": 2}, (3, [4, 5])], "r", "here")
    assert [(leaf.path, leaf.spec) for leaf in leaves] == [
        ("r[0]['k']", P("a")),
        ("r[0]['l']", P("a")),
        ("r[1][0]", None),
        ("r[1][1][0]", P("b")),
        ("r[1][1][1]", P("b")),
    ]


def named(x, *, w, b=None):
    return x @ w if b is None else x @ w + b


def with_default(x, scale=2.0, *, offset=1.0):
    return x * scale + offset


def of_many(x, *rest, last):
    return x + sum(rest) + last


def static_first(n, x, *, y, mode="add"):
    return n * x + y if mode == "add" else n * x - y


# A function, its call, in_shardings, and the types of the arguments that say so.
ENTRIES = {
    "keyword-only parameters come after the positional ones": (
        named,
        ((X,), {"w": np.ones((8, 4), np.float32)}),
        {"in_shardings": (P("data"), P(None, "model"), None)},
        ["f32[8,4@model]", "f32[16@data,8]"],
    ),
    "in the order of the signature": (
        named,
        ((X,), {"b": np.ones(4, np.float32), "w": np.ones((8, 4), np.float32)}),
        {"in_shardings": (None, P("data"), P("model"))},
        ["f32[4@model]", "f32[8@data,4]", "f32[16,8@data]"],
    ),
    "keyword-only parameters may have none": (
        named,
        ((X,), {"w": np.ones((8, 4), np.float32)}),
        {"in_shardings": (P("data"),)},
        ["f32[8,4]", "f32[16@data,8]"],
    ),
    "one for all": (
        named,
        ((X,), {"w": np.ones((8, 4), np.float32)}),
        {"in_shardings": P("data")},
        ["f32[8@data,4]", "f32[16@data,8]"],
    ),
    "defaults that are not passed": (with_default, ((X,), {}), {"in_shardings": (P("data"), None)}, ["f32[16@data,8]"]),
    "nor have entries": (with_default, ((X,), {}), {"in_shardings": (P("data"),)}, ["f32[16@data,8]"]),
    "all entries, no default passed": (
        with_default,
        ((X,), {}),
        {"in_shardings": (P("data"), None, None)},
        ["f32[16@data,8]"],
    ),
    "any number of arguments": (
        of_many,
        ((X, X, X), {"last": X}),
        {"in_shardings": (P("data"), P("model"), P("model"), P(None, "model"))},
        ["f32[16,8@model]", "f32[16@data,8]", "f32[16@model,8]", "f32[16@model,8]"],
    ),
    "static arguments have none": (
        static_first,
        ((3, X), {"y": X, "mode": "add"}),
        {"in_shardings": (P("data"), P("model")), "static_argnums": 0, "static_argnames": "mode"},
        ["f32[16@data,8]", "f32[16@model,8]"],
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_parameter_takes_its_entry(mesh, name):
    fun, (args, kwargs), options, types = ENTRIES[name]
    run = sdy.partition(fun, mesh=mesh, **options)
    stated = {a.path: str(a.sharding) for a in run.plan(*args, **kwargs).arguments}
    assert sorted(a.type for a in run.plan(*args, **kwargs).arguments) == sorted(types), stated
    np.testing.assert_allclose(run(*args, **kwargs), fun(*args, **kwargs), rtol=1e-6)


@pytest.mark.parametrize(
    ("fun", "args", "kwargs", "specs", "words"),
    [
        (
            named,
            (X,),
            {"w": X.T},
            (None,) * 2,
            ["named has 2 entries for 1 pos", "(x) and 2 keyword-only", "(w, b)"],
        ),
        (named, (X,), {"w": X.T}, (), ["of named has 0 entries"]),
        (with_default, (X, 2.0), {}, (None,), ["of with_default has 1 entry for 2 positional arguments (x, scale)"]),
        (with_default, (X,), {"scale": 2.0}, (None,), ["1 entry for 2 positional"]),
        (of_many, (X, X), {"last": X}, (None,), ["of of_many has 1 entry for 2 positional arguments (x, args[1])"]),
        (of_many, (X, X), {"last": X}, (None,) * 4, ["4 entries for 2 positional", "1 keyword-only ones (last)"]),
        (lambda *xs: xs[0], (X,), {}, (None, None), ["of <lambda> has 2 entries for 1 positional arguments (args[0])"]),
    ],
)
def test_too_many_and_too_few_entries(mesh, fun, args, kwargs, specs, words):
    with pytest.raises(sdy.ShardingError) as caught:
        sdy.partition(fun, mesh=mesh, in_shardings=specs)(*args, **kwargs)
    assert all(word in str(caught.value) for word in words), str(caught.value)


OTHER_MESH = NamedSharding(AbstractMesh((4,), ("z",)), P("z"))

# in_shardings, and what the message says.
WRONG_SHARDINGS = {
    "unknown axis": (({"w1": P("tensor"), "w2": None}, None), ["params['w1']", "'tensor'", "data, model"]),
    "too many entries": ((None, P(None, None, "data")), ["`x`", "3 entries", "rank 2", "at most one per dimension"]),
    "axis twice": ((None, P("data", "data")), ["`x`", "'data' twice"]),
    "bad text": ((None, "[{data}]"), ["in_shardings for `x`", "data"]),
    "text with an unknown axis": ((None, '[{"tensor"}, {}]'), ["`x`", "tensor", "data"]),
    "text of another rank": ((None, '[{"data"}]'), ["`x`", "rank 2"]),
    "another mesh": ((None, OTHER_MESH), ["`x`", '"z"=4', '"data"=2', "use that mesh, or a PartitionSpec"]),
    "short tuple": ((None,), ["of f has 1 entry", "2 positional", "(params, x)", "one entry per argument"]),
    "long tuple": ((None, None, P()), ["of f has 3 entries", "2 positional", "(params, x)", "one entry per argument"]),
    "wrong keys": (({"w1": None, "w3": None}, None), ["`params`", "['w3']", "['w2']", "same structure"]),
    "list for a dict": (([None, None], None), ["`params`", "a list of 2", "the argument is a dict"]),
    "container for an array": (({"w1": [P()], "w2": None}, None), ["params['w1']", "list", "single array"]),
    "not a sharding": ((None, 3), ["`x`", "int", "PartitionSpec"]),
    "no parameter": ({"w1": P()}, ["in_shardings has an entry for 'w1'", "tuple"]),
}


@pytest.mark.parametrize("name", WRONG_SHARDINGS)
@pytest.mark.parametrize("use", ["__call__", "plan", "lower"])
def test_wrong_in_shardings(mesh, name, use):
    specs, words = WRONG_SHARDINGS[name]
    with pytest.raises(sdy.SdyError) as caught:
        getattr(sdy.partition(f, mesh=mesh, in_shardings=specs), use)(PARAMS, X)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value} does not say {missing}"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({"y": P("tensor"), "z": None}, ["out_shardings for `result['y']`", "'tensor'", "data, model"]),
        ({"y": None}, ["out_shardings", "`result`", "['z']"]),
        ({"y": P(None, None, "data"), "z": None}, ["result['y']", "rank 2"]),
    ],
)
def test_wrong_out_shardings(mesh, specs, words):
    g = sdy.partition(lambda x: {"y": x, "z": x}, mesh=mesh, out_shardings=specs)
    with pytest.raises(sdy.SdyError) as caught:
        g(X)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("use", ["__call__", "plan", "lower", "trace"])
@pytest.mark.parametrize("wrong", ["adam", object(), np.array(["a"])], ids=["string", "object", "numpy strings"])
def test_arguments_that_are_no_arrays(mesh, use, wrong):
    run = sdy.partition(f, mesh=mesh)
    with pytest.raises(sdy.SdyError, match=r"`params\['w1'\]` is an? .*expected an array"):
        getattr(run, use)({**PARAMS, "w1": wrong}, X)


def test_a_result_that_is_no_array_is_named(mesh):
    f = sdy.partition(lambda x: {"loss": x, "name": ["adam"]}, mesh=mesh)
    with pytest.raises(sdy.SdyError, match=r"`result\['name'\]\[0\]` is a str \('adam'\); .* returns arrays"):
        f(np.ones(8))


@pytest.mark.parametrize("use", ["__call__", "plan", "lower"])
def test_static_arguments_must_be_hashable(mesh, use):
    run = sdy.partition(lambda x, n: x, mesh=mesh, static_argnames="n")
    with pytest.raises(sdy.SdyError, match="static argument `n` is a list, which cannot be hashed"):
        getattr(run, use)(X, n=[1])


def test_a_sharding_for_a_static_argument(mesh):
    run = sdy.partition(lambda x, n: x * n, mesh=mesh, static_argnums=1, in_shardings=(P("data"), None))
    with pytest.raises(sdy.SdyError, match=r"2 entries.*1 positional arguments \(x\).*not static"):
        run(X, 3)


def test_errors_of_the_function_itself_pass_through(mesh):
    def broken(x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        sdy.partition(broken, mesh=mesh)(X)
    with pytest.raises(TypeError, match="missing 1 required positional"):
        sdy.partition(f, mesh=mesh)(PARAMS)


def test_no_mesh_at_all():
    with pytest.raises(sdy.SdyError, match=r"needs a mesh: pass mesh=jax.make_mesh\(shape, names\).*jax.set_mesh"):
        sdy.partition(f)(PARAMS, X)


@pytest.mark.parametrize("given", ["data", {"data": 8}, (2, 4)])
def test_a_mesh_that_is_none(given):
    with pytest.raises(sdy.SdyError, match=r"has no devices.*pass mesh=jax.make_mesh"):
        sdy.partition(f, mesh=given)


def test_wrong_options(mesh):
    with pytest.raises(sdy.SdyError, match="on_unknown='raise'; expected 'warn', 'error' or 'ignore'"):
        sdy.partition(f, mesh=mesh, on_unknown="raise")
    with pytest.raises(sdy.SdyError, match="partition got an int; expected a function"):
        sdy.partition(3, mesh=mesh)


def test_unsplittable_ops_are_errors_where_that_is_asked(mesh):
    svd = sdy.partition(
        lambda x: jnp.linalg.svd(x, compute_uv=False), mesh=mesh, in_shardings=P("data"), on_unknown="error"
    )
    for use in (svd, svd.plan, svd.lower):
        with pytest.raises(sdy.UnsupportedError, match=r"test_arguments\.py:\d+.*lapack_sgesdd_ffi"):
            use(X)
