"""Trees of specifications by names, likeness, size and path: what they say, what they refuse, and that they run."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.errors import ShardingError


def assert_close(ours: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, expected)


BY_NAME = sdy.rules({"batch": "data", "embed": None, "mlp": "model"})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    """As `flax.linen.LogicallyPartitioned`, and without `rules` as `flax.linen.Partitioned`."""

    value: Any
    names: Any = dataclasses.field(metadata={"static": True})
    rules: Any = dataclasses.field(default=None, metadata={"static": True})

    def unbox(self) -> Any:
        return self.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class AxesBox:
    value: Any
    names: Any = dataclasses.field(metadata={"static": True})

    def unbox(self) -> Any:
        return self.value


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Variable:
    """As `flax.nnx.Param`."""

    value: Any
    metadata: Any

    def get_metadata(self) -> dict[str, Any]:
        return dict(self.metadata)

    def set_metadata(self, **metadata: Any) -> None: ...

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("value"), self.value)], tuple(self.metadata.items())

    @classmethod
    def tree_unflatten(cls, metadata: Any, values: Any) -> Variable:
        return cls(*values, dict(metadata))


def boxed() -> dict[str, Any]:
    return {
        "up": {"kernel": Box(jnp.ones((16, 32)), ("embed", "mlp")), "bias": Box(jnp.zeros(32), ("mlp",))},
        "down": {"kernel": Box(jnp.ones((32, 16)) / 32, ("mlp", "embed"))},
        "scale": jnp.ones(16),
    }


def model(params: dict[str, Any], x: jax.Array) -> jax.Array:
    plain = jax.tree.map(lambda n: getattr(n, "value", n), params, is_leaf=lambda n: isinstance(n, Box))
    h = jax.nn.gelu(x @ plain["up"]["kernel"] + plain["up"]["bias"])
    return (h @ plain["down"]["kernel"]) * plain["scale"]


X = jnp.arange(8 * 16, dtype=jnp.float32).reshape(8, 16) / 64


# --- rules -----------------------------------------------------------------------------------------------------------


def test_rules_give_a_tree_that_can_be_pasted() -> None:
    text = (
        "{'down': {'kernel': P('model', None)}, 'scale': P(), 'up': {'bias': P('model',), 'kernel': P(None, 'model')}}"
    )
    assert repr(BY_NAME(boxed())) == text
    assert eval(text) == BY_NAME(boxed()) == BY_NAME(jax.eval_shape(boxed))


def test_rules_map_trees_of_names_and_of_specs_made_of_names() -> None:
    names = {"x": ("batch", None), "layers": [("embed", "mlp"), P("mlp")], "step": ()}
    assert BY_NAME(names) == {"x": P("data", None), "layers": [P(None, "model"), P("model")], "step": P()}


@pytest.mark.parametrize(
    ("names", "spec"),
    [
        (("batch", "heads"), P("data", "model")),
        (("mlp", "heads"), P("data", "model")),  # heads come first, so that mlp takes its second rule
        (("mlp", "batch"), P("model", "data")),
        (("batch", "mlp", "heads"), P("data", None, "model")),
        (("vocab", "heads"), P(None, "model")),  # one of its two axes is taken
        (("vocab", None), P(("data", "model"), None)),
        (("open", "else"), P(P.UNCONSTRAINED, None)),
        ((P.UNCONSTRAINED, "mlp"), P(P.UNCONSTRAINED, "model")),
    ],
)
def test_the_first_rule_whose_axes_are_free_holds(names: Any, spec: P) -> None:
    given = [
        ["heads", "model"],
        ("batch", "data"),
        ("mlp", "model"),
        ("mlp", ["data"]),
        ("vocab", ["data", "model"]),
        ("open", P.UNCONSTRAINED),
    ]
    expected = P(*(axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes for axes in spec))
    found = sdy.rules(given).spec(*names)
    assert P(*(axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes for axes in found)) == expected


def test_rules_take_the_same_decisions_as_flax() -> None:
    linen = pytest.importorskip("flax.linen")
    rng = np.random.default_rng(0)
    names, axes = np.array(["a", "b", "c", "d", "e"]), np.array(["x", "y", "z"])
    for _ in range(300):
        targets = [None, *axes, tuple(rng.permutation(axes)[:2].tolist())]
        pairs = [(str(rng.choice(names)), targets[rng.integers(5)]) for _ in range(rng.integers(9))]
        array = tuple(rng.permutation([*names, None])[: rng.integers(5)].tolist())
        assert sdy.rules(pairs).spec(*array) == linen.logical_to_mesh_axes(array, pairs), (pairs, array)


def test_names_without_a_rule_are_axes_where_the_library_says_so() -> None:
    tree = {
        "logical": Box(jnp.ones((4, 4)), ("model", "mlp")),
        "linen": AxesBox(jnp.ones((4, 4)), ("data", "mlp")),
        "nnx": Variable(jnp.ones((4, 4)), {"out_sharding": ("embed", "data")}),
        "older nnx": Variable(jnp.ones((4, 4)), {"sharding_names": (("data", "model"), None)}),
        "none": Variable(jnp.ones((4, 4)), {}),
        "fewer": Box(jnp.ones((4, 4)), ("mlp",)),
    }
    assert BY_NAME(tree) == {
        "logical": P(None, "model"),
        "linen": P("data", "model"),
        "nnx": P(None, "data"),
        "older nnx": P(("data", "model"), None),
        "none": P(),
        "fewer": P("model"),
    }


def test_rules_of_a_box_come_first() -> None:
    assert BY_NAME(Box(jnp.ones((4, 4)), ("embed", "mlp"), (("mlp", "data"),))) == P(None, "data")


def test_rules_stand_for_specifications_of_arguments_and_results(mesh: Any) -> None:
    step = sdy.partition(model, mesh=mesh, in_shardings=(BY_NAME, BY_NAME.spec("batch")))
    found = {a.path: a.type for a in step.plan(boxed(), X).arguments}
    assert found["params['up']['kernel'].value"] == "f32[16,32@model]"
    assert found["params['down']['kernel'].value"] == "f32[32@model,16]"
    assert found["x"] == "f32[8@data,16]"
    assert_close(step(boxed(), X), model(boxed(), X))

    init = sdy.partition(boxed, mesh=mesh, out_shardings=BY_NAME)
    assert init()["up"]["kernel"].value.sharding.spec == P(None, "model")
    assert init()["down"]["kernel"].names == ("mlp", "embed")


def test_rules_leave_arguments_without_names_to_propagation(mesh: Any) -> None:
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    types = {a.path: a.type for a in sdy.partition(model, mesh=mesh, in_shardings=BY_NAME).plan(boxed(), x).arguments}
    assert types["x"] == "f32[8@data,16]"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: BY_NAME.spec("mlp", "mlp"), "has the name 'mlp' twice in ('mlp', 'mlp'); give each its own, or None"),
        (lambda: BY_NAME({"w": Box(jnp.ones(4), ("embed", "mlp"))}), "`tree['w']` has the names ('embed', 'mlp') and"),
        (lambda: sdy.rules({"mlp": 3}), "'mlp' goes with 3; expected a mesh axis, a tuple of them, None or"),
        (lambda: sdy.rules({"mlp": ("x", "x")}), "an axis splits a value once"),
        (lambda: sdy.rules(["mlp"]), "rules got 'mlp'; expected a dict of names and mesh axes, or pairs"),
        (lambda: sdy.rules({3: "model"}), "3 is an int; expected the name of a dimension"),
    ],
)
def test_wrong_rules_and_names_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ShardingError) as error:
        wrong()
    assert message in str(error.value)


@pytest.mark.parametrize("where", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize("name", ["mlp", "nobody"])
def test_an_axis_that_the_mesh_lacks_is_reported_with_its_rule(mesh: Any, where: str, name: str) -> None:
    rules = sdy.rules([("embed", ("data", "model")), (name, ("model", "tensor"))])
    step = sdy.partition(model, mesh=mesh, **{where: {"params": rules} if where == "in_shardings" else rules})
    text = rf"rules in {where}: '{name}' goes with the axis 'tensor', which the mesh lacks; its axes are: data, model"
    with pytest.raises(ShardingError, match=text):
        step(boxed(), X)
    with pytest.raises(ShardingError, match=text):
        sdy.partition(lambda params, x: step(params, x), mesh=mesh)(boxed(), X)


def test_a_bare_tuple_of_names_is_refused_with_what_would_do(mesh: Any) -> None:
    step = sdy.partition(lambda params: params["w"] * 2, mesh=mesh, in_shardings=({"w": ("batch", None)},))
    with pytest.raises(ShardingError) as error:
        step({"w": X})
    assert "a tuple of 2 for `params['w']`" in str(error.value)
    assert "P('batch', None) if these are mesh axes, and sdy_jax.rules(...).spec('batch', None)" in str(error.value)


# --- like ------------------------------------------------------------------------------------------------------------


PARAMS = {"up": {"kernel": jnp.ones((16, 32)), "bias": jnp.zeros(32)}, "down": {"kernel": jnp.ones((32, 16))}}
SPECS = {"up": {"kernel": P("data", "model"), "bias": P("model")}, "down": {"kernel": P("model", "data")}}


def labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3, momentum=0.9, nesterov=True)),
        optax.chain(optax.masked(optax.lion(1e-3), {"up": {"kernel": True, "bias": False}, "down": True})),
        optax.multi_transform({"matrix": optax.adam(1e-3), "vector": optax.rmsprop(1e-2, momentum=0.9)}, labels),
        optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        optax.contrib.schedule_free_adamw(1e-3),
        optax.apply_if_finite(optax.adam(1e-3), 3),
    ],
    ids=["adamw", "chain", "masked", "multi_transform", "multi_steps", "hyperparams", "schedule_free", "if_finite"],
)
def test_state_lies_as_its_parameters(optimizer: Any) -> None:
    state = jax.eval_shape(optimizer.init, PARAMS)
    found = sdy.like(PARAMS, SPECS)(state)
    by_shape = {p.shape: spec for p, spec in zip(jax.tree.leaves(PARAMS), jax.tree.leaves(SPECS), strict=True)}
    assert found == jax.tree.map(lambda x: by_shape.get(x.shape, P()), state)


def test_factored_moments_keep_the_axes_of_the_dimensions_that_they_have() -> None:
    params = {"wide": jnp.ones((16, 32)), "square": jnp.ones((16, 16)), "stack": jnp.ones((4, 16, 32))}
    specs = {"wide": P("data", "model"), "square": P("data", "model"), "stack": P(None, "data", "model")}
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    state = sdy.like(params, specs)(jax.eval_shape(optimizer.init, params))
    assert state.v_row == {"wide": P("data"), "square": P(), "stack": P(None, "data")}  # which one of two is not clear
    assert state.v_col == {"wide": P("model"), "square": P(), "stack": P(None, "model")}
    assert state.v == {"wide": P(), "square": P(), "stack": P()}
    assert state.count == P()


def test_history_keeps_the_axes_behind_its_own_dimension() -> None:
    state = sdy.like(PARAMS, SPECS)(jax.eval_shape(optax.scale_by_lbfgs(memory_size=3).init, PARAMS))
    assert state.diff_params_memory["up"] == {"kernel": P(None, "data", "model"), "bias": P(None, "model")}
    assert state.weights_memory == P()


def test_the_longest_path_wins_and_dimensions_of_size_one_are_whole() -> None:
    of = sdy.like({"w": jnp.ones((8, 4)), "a": {"w": jnp.ones((8, 4))}}, {"w": P("data"), "a": {"w": P(None, "model")}})
    state = {"mu": {"w": jnp.ones((8, 4)), "a": {"w": jnp.ones((8, 4))}}, "rms": {"w": jnp.ones((8, 1))}, "name": None}
    assert of(state) == {"mu": {"w": P("data"), "a": {"w": P(None, "model")}}, "rms": {"w": P("data")}, "name": None}


def test_a_training_step_takes_and_gives_state_as_its_parameters_lie(mesh: Any) -> None:
    optimizer = optax.adamw(1e-2)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ p["up"]["kernel"] + p["up"]["bias"]) @ p["down"]["kernel"] - x) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), PARAMS, SPECS)
    state = sdy.like(params)  # as the arrays lie
    run = sdy.partition(step, mesh=mesh, in_shardings=(SPECS, state, P("data")), out_shardings=(SPECS, state))
    ours = run(params, optimizer.init(params), X)
    assert_close(ours, jax.jit(step)(PARAMS, optimizer.init(PARAMS), X))
    assert ours[1][0].mu["down"]["kernel"].sharding.spec == P("model", "data")
    assert ours[1][0].count.sharding.spec == P()


def test_boxes_and_plain_state_match() -> None:
    specs = BY_NAME(boxed())
    assert sdy.like(boxed(), BY_NAME)({"mu": boxed()})["mu"]["up"] == specs["up"]
    plain = jax.tree.map(lambda n: getattr(n, "value", n), boxed(), is_leaf=lambda n: isinstance(n, Box))
    assert sdy.like(boxed(), specs)({"mu": plain}) == {"mu": specs}


def test_like_needs_to_know_how_parameters_lie() -> None:
    with pytest.raises(ShardingError, match=r"`params\['down'\]\['kernel'\]` does not lie on a mesh; to fix: say how"):
        sdy.like(PARAMS)
    with pytest.raises(ShardingError, match=r"`params\['w'\]` has shape \(4,\), and P\('a', 'b'\) 2 entries"):
        sdy.like({"w": jnp.ones(4)}, P("a", "b"))


# --- fsdp ------------------------------------------------------------------------------------------------------------


def sizes(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def test_fsdp_splits_the_largest_dimension_that_the_axis_divides(mesh: Any) -> None:
    params = sizes(w=(128, 512), tall=(512, 128), odd=(127, 300), none=(129, 513), same=(256, 256), bias=(512,), n=())
    assert sdy.fsdp(params, "model", mesh=mesh) == {
        "w": P(None, "model"),
        "tall": P("model"),
        "odd": P(None, "model"),
        "none": P(),
        "same": P("model"),
        "bias": P(),  # below the threshold
        "n": P(),
    }
    assert sdy.fsdp(params, ("data", "model"), mesh=mesh)["tall"] == P(("data", "model"))
    assert sdy.fsdp(params, "model", mesh=mesh, min_size=512)["bias"] == P("model")


def test_fsdp_adds_to_specifications(mesh: Any) -> None:
    params = sizes(w=(128, 512), v=(511, 512), both=(128, 512), open=(128, 512), prime=(127, 512), four=(127, 516))
    specs = {
        "w": P(None, "model"),
        "v": P("model"),
        "both": P("data", "model"),
        "open": P(P.UNCONSTRAINED, "model"),
        "prime": P(None, "model"),
        "four": P(None, "model"),
    }
    assert sdy.fsdp(params, "data", mesh=mesh, specs=specs) == {
        "w": P("data", "model"),
        "v": P("model", "data"),
        "both": P("data", "model"),
        "open": P(P.UNCONSTRAINED, ("model", "data")),
        "prime": P(None, ("model", "data")),  # what is split already is split further
        "four": P(None, "model"),  # 516 elements are not divided by both
    }


def test_fsdp_knows_the_mesh_around_and_that_of_arrays(mesh: Any) -> None:
    params = {"w": jnp.ones((128, 512))}
    with jax.set_mesh(mesh):
        assert sdy.fsdp(params) == {"w": P(None, "data")}
    assert sdy.fsdp(jax.device_put(params, NamedSharding(mesh, P()))) == {"w": P(None, "data")}
    assert sdy.fsdp(params, mesh=mesh.abstract_mesh) == {"w": P(None, "data")}
    assert sdy.fsdp(params, mesh=sdy.Mesh.of(data=2, model=4)) == {"w": P(None, "data")}
    with pytest.raises(ShardingError, match="the size of 'data' is not known; to fix: pass mesh="):
        sdy.fsdp(params)
    with pytest.raises(ShardingError, match="has 'data' twice; an axis splits a value once"):
        sdy.fsdp(params, ("data", "data"), mesh=mesh)
    with pytest.raises(ShardingError, match="names the axis 'rows', which the mesh lacks; its axes are: data, model"):
        sdy.fsdp(params, "rows", mesh=mesh)


# --- tensor_parallel -------------------------------------------------------------------------------------------------


def test_tensor_parallel_takes_the_first_expression_that_is_found(mesh: Any) -> None:
    params = {"layers": [sizes(qkv=(16, 64), out=(64, 16), bias=(16,))] * 2, "embed": sizes(table=(40, 16))}
    specs = sdy.tensor_parallel(
        params,
        {r"layers/1/out": P(), r"qkv": P(None, "model"), r"\['layers'\]\[\d\]\['out'\]$": P("model"), "^params": P()},
        mesh=mesh,
    )
    assert specs == {
        "layers": [
            {"qkv": P(None, "model"), "out": P("model"), "bias": P()},
            {"qkv": P(None, "model"), "out": P(), "bias": P()},
        ],
        "embed": {"table": P()},
    }


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            {"kernal": P("model")},
            "'kernal' is found in no path; the parameters are `params['down']['kernel']`, `params",
        ),
        ({"bias": P(None, "model")}, "`params['up']['bias']` has shape (32,), and P(None, 'model') 2 entries; give at"),
        ({"bias": P("tensor")}, "names the axis 'tensor', which the mesh lacks; its axes are: data, model"),
        ({"kernel": P("model", "model")}, "uses the axis 'model' twice; an axis splits a value once"),
        ({"odd": P("model")}, "splits dimension 0, of 6, among 4 devices; split one that they divide, or pad it"),
        ({"(": P()}, "'(' is no regular expression"),
        ({"bias": "model"}, "'bias' has a str; expected a PartitionSpec"),
    ],
)
def test_wrong_patterns_are_refused(mesh: Any, patterns: Any, message: str) -> None:
    with pytest.raises(ShardingError) as error:
        sdy.tensor_parallel({**PARAMS, "odd": jnp.ones(6)}, patterns, mesh=mesh)
    assert message in str(error.value)


def test_the_trees_compose_and_run_where_specifications_are_taken(mesh: Any) -> None:
    specs = sdy.tensor_parallel(boxed(), {"up/kernel": P(None, "model"), "down/kernel": P("model")}, mesh=mesh)
    specs = sdy.fsdp(boxed(), mesh=mesh, specs=specs, min_size=64)
    assert specs["up"] == {"kernel": P("data", "model"), "bias": P()}
    run = sdy.partition(model, mesh=mesh, in_shardings=(specs, BY_NAME.spec("batch")))
    assert_close(run(boxed(), X), model(boxed(), X))


# --- the libraries themselves, where they are installed --------------------------------------------------------------


def test_flax_linen_by_names_at_the_border_and_inside(mesh: Any) -> None:
    linen = pytest.importorskip("flax.linen")

    class Mlp(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            named = linen.with_logical_partitioning
            kernel = linen.initializers.lecun_normal()
            x = linen.Dense(32, kernel_init=named(kernel, ("embed", "mlp")))(x)
            x = linen.with_logical_constraint(jax.nn.gelu(x), ("batch", "mlp"))
            return linen.Dense(16, kernel_init=named(kernel, ("mlp", "embed")))(x)

    net, rng = Mlp(), jax.random.key(0)
    init = sdy.partition(net.init, mesh=mesh, out_shardings=BY_NAME)
    variables = init(rng, X)
    assert variables["params"]["Dense_0"]["kernel"].value.sharding.spec == P(None, "model")
    types = jax.eval_shape(net.init, rng, X)
    assert BY_NAME(types) == linen.logical_to_mesh(linen.get_partition_spec(types), BY_NAME.pairs)

    bare, apply = (sdy.partition(net.apply, mesh=mesh, in_shardings=(BY_NAME, P())) for _ in range(2))
    assert '{"data"}, {"model"}' not in bare.plan(variables, X).mlir("propagated")
    with BY_NAME:
        assert '{"data"}, {"model"}' in apply.plan(variables, X).mlir("propagated")
        ours = apply(variables, X)
    assert_close(ours, net.apply(linen.unbox(net.init(rng, X)), X))


def test_flax_nnx_by_metadata(mesh: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")

    def made() -> Any:
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False)
        model = nnx.Linear(16, 32, kernel_init=kernel, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    graph, types = nnx.split(nnx.eval_shape(made))
    specs = BY_NAME(types)
    assert specs[0]["kernel"] == specs[1]["opt_state"][0]["mu"]["kernel"] == P(None, "model")
    assert specs[0]["bias"] == specs[1]["step"] == P()
    init = sdy.partition(lambda: nnx.split(made())[1], mesh=mesh, out_shardings=BY_NAME)
    assert init()[0]["kernel"].get_value().sharding.spec == P(None, "model")
    run = sdy.partition(lambda state, x: nnx.merge(graph, state)[0](x), mesh=mesh, in_shardings=(specs, P("data")))
    assert_close(run(init(), X), made()[0](X))


def test_haliax_by_axes_at_the_border_and_inside(mesh: Any) -> None:
    hax = pytest.importorskip("haliax")
    batch, embed, mlp = hax.make_axes(batch=8, embed=16, mlp=32)
    x, w = hax.named(X, (batch, embed)), hax.ones((embed, mlp))
    assert BY_NAME({"w": w, "x": x}) == {"w": P(None, "model"), "x": P("data", None)}

    def product(x: Any, w: Any) -> Any:
        return hax.dot(hax.shard(x), w, axis=embed)

    bare, run = (sdy.partition(product, mesh=mesh, in_shardings=P(), out_shardings=BY_NAME) for _ in range(2))
    assert 'sdy.sharding_constraint %arg0 <@mesh, [{"data"}' not in bare.plan(x, w).mlir("imported")
    with BY_NAME:
        assert 'sdy.sharding_constraint %arg0 <@mesh, [{"data"}' in run.plan(x, w).mlir("imported")
        ours = run(x, w)
    assert ours.array.sharding.spec == P("data", "model")
    assert_close(ours.array, X @ w.array)


def test_penzai_by_names(mesh: Any) -> None:
    pz = pytest.importorskip("penzai.pz")
    x, w = pz.nx.wrap(X).tag("batch", "embed"), pz.nx.wrap(jnp.ones((16, 32))).tag("embed", "mlp")
    assert BY_NAME((x, w.untag("embed"))) == (P("data", None), P(None, "model"))
    ours = sdy.partition(lambda x: x * 2, mesh=mesh, in_shardings=BY_NAME)(x)
    assert ours.unwrap("batch", "embed").sharding.spec == P("data")


def test_rules_as_a_context_need_a_library_that_has_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("flax", "haliax"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    with pytest.raises(ShardingError, match="none of flax, haliax is imported"), BY_NAME:
        pass
