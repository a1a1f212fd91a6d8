"""A plan that is pinned is the plan that runs, by its own costs, or nothing does."""

import copy
import hashlib
import importlib.util
import json
import pickle
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from kept_plans import noted_searches, same
from plan_edits import MLP

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.ir.parsers import parse_axis_lists
from sdy_jax.plan.digests import costs_from, recorded_costs
from sdy_jax.plan.pinning import pinned as pinned_plans
from sdy_jax.plan.record import files

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
V5E = sdy.CostModel.of_machine("tpu v5e", MESH.axis_names)
RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.array(RNG.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


W = [{"up": array(32, 64), "down": array(64, 32)} for _ in range(2)]
X = array(16, 32)
SPEC = {"up": P("data", "model"), "down": P("model", "data")}
SPECS = ([SPEC, SPEC], P("data"))


def forward(w, x):
    for layer in w:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return x


def step(w, x):
    grads = jax.grad(lambda w: jnp.mean(forward(w, x) ** 2))(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads)


def looped(w, x):
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *w)

    def loss(layers):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None), x, layers)
        return jnp.mean(h**2)

    return jax.grad(loss)(layers)


def gathering(w, x):
    """Gathers, a sort, a reduction along what is split, and a conditional."""
    rows = jnp.argsort(x.sum(1))
    h = jnp.take(x, rows, axis=0) @ w[0]["up"]
    return jax.lax.cond(h.sum() > 0, jnp.sort, lambda h: h * 2, jnp.cumsum(h, 0)), jax.nn.softmax(h, 0)


def of(fun, **options):
    return sdy.partition(fun, **{"mesh": MESH, "in_shardings": SPECS, "on_unknown": "ignore", **options})


@pytest.fixture
def file(tmp_path):
    return tmp_path / "step.plan.json"


@pytest.fixture
def searches(monkeypatch):
    """How often something was planned by a search."""
    return noted_searches(monkeypatch)


@pytest.mark.dear
@pytest.mark.parametrize("fun", [forward, step, looped, gathering])
@pytest.mark.parametrize("costs", [None, V5E], ids=["bytes", "v5e"])
@pytest.mark.parametrize("layouts", ["global", "local", "propagated"])
def test_what_is_pinned_runs_under_other_costs(file, searches, fun, costs, layouts):
    plan = of(fun, costs=costs, layouts=layouts).plan(W, X)
    plan.save(file)
    other = V5E if costs is None else None
    pinned = of(fun, plan=file, costs=other)
    assert pinned.plan(W, X).mlir() == plan.mlir()
    assert searches == [fun.__name__]
    assert not pinned.plan(W, X).diff(sdy.load_plan(file))
    assert pinned.plan(W, X).record(choices=True).choices == sdy.load_plan(file).choices
    same(pinned(W, X), jax.jit(fun)(W, X))


def test_the_costs_of_a_machine_and_of_bytes_differ():
    """Else the test before this one would show nothing."""
    assert of(step, costs=V5E).plan(W, X).fingerprint() != of(step).plan(W, X).fingerprint()


def test_a_plan_is_pinned_as_well_as_its_file(file):
    plan = of(step, costs=V5E).plan(W, X)
    plan.save(file)
    for given in (plan, plan.record(choices=True), sdy.load_plan(file), file, str(file)):
        assert of(step, plan=given).plan(W, X).mlir() == plan.mlir()


LINE = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def deep(w, x):
    def value(w):
        h = x
        for _ in range(6):
            h = checkpoint_name(jnp.tanh(h @ w["up"]) @ w["down"], "h")
        return h.sum()

    return jax.grad(value)(w)


def layers_of_tokens(x, w):
    flat = x.reshape(-1, x.shape[-1])
    return jax.lax.scan(lambda h, up: (h + jnp.tanh(h @ up) @ up.T, None), flat, w)[0].reshape(x.shape)


@pytest.mark.parametrize("share", [None, 0.97])
def test_an_order_of_merged_dimensions_is_that_of_the_file(file, searches, share):
    given = {"mesh": MESH, "in_shardings": (P("data", "model"), P()), "out_shardings": P("data", "model")}
    arguments = array(4, 512, 32), array(3, 32, 64)
    if share is not None:
        given["memory"] = share * of(layers_of_tokens, **given).plan(*arguments).memory.peak
    plan = of(layers_of_tokens, **given).plan(*arguments)
    plan.save(file)
    searches.clear()
    given.pop("memory", None)
    pinned = of(layers_of_tokens, **given, plan=file)
    found = pinned.plan(*arguments)
    assert "ordered" in plan.stages or plan.blocked
    assert found.mlir() == plan.mlir() and not found.diff(plan) and not searches
    assert found.record(choices=True).choices == sdy.load_plan(file).choices
    same(pinned(*arguments), jax.jit(layers_of_tokens)(*arguments))


REWRITTEN = {
    "in parts": (attention, [array(2048, 16) for _ in range(3)], (P("x"), None, None), 0.25),
    "in parts where another form fits": (deep, [W[0], array(1024, 32)], (None, P("x")), 0.95),
    "computed again": (deep, [W[0], array(1024, 32)], (None, P("x")), 0.7),
}


@pytest.mark.parametrize("how", REWRITTEN)
@pytest.mark.parametrize("costs", [None, sdy.CostModel.of_machine("tpu v5e", ["x"])], ids=["bytes", "v5e"])
def test_what_is_rewritten_for_memory_is_rewritten_as_it_was(file, searches, how, costs):
    fun, arguments, specs, share = REWRITTEN[how]
    given = {"mesh": LINE, "in_shardings": specs}
    limit = share * of(fun, **given, costs=costs).plan(*arguments).memory.peak
    plan = of(fun, **given, costs=costs, memory=limit).plan(*arguments)
    assert plan.blocked or plan.recomputed
    plan.save(file)
    searches.clear()
    pinned = of(fun, **given, plan=file)
    found = pinned.plan(*arguments)
    assert found.mlir() == plan.mlir() and not found.diff(plan) and not searches
    assert (found.recomputed is None) == (plan.recomputed is None) and len(found.blocked) == len(plan.blocked)
    assert found.record().recomputed == plan.record().recomputed and found.record().blocked == plan.record().blocked
    assert found.record(choices=True).choices == sdy.load_plan(file).choices
    same(pinned(*arguments), jax.jit(fun)(*arguments))


def test_less_memory_than_the_plan_takes_is_refused(file):
    of(step).plan(W, X).save(file)
    with pytest.raises(sdy.PinnedPlanError, match=r"holds .* on each device, and memory= allows 1.0 KiB"):
        of(step, plan=file, memory=1024).plan(W, X)


def signed(w, x):
    """Another optimizer without state."""
    grads = jax.grad(lambda w: jnp.mean(forward(w, x) ** 2))(w)
    return jax.tree.map(lambda a, b: a - 0.1 * jnp.sign(b), w, grads)


def test_an_optimizer_that_sends_the_same_runs(file):
    plan = of(step).plan(W, X)
    plan.save(file)
    pinned = of(signed, plan=file)
    assert pinned.plan(W, X).fingerprint() == plan.fingerprint()
    same(pinned(W, X), signed(W, X))


def test_an_optimizer_with_state_is_said(file):
    def with_momentum(w, x, m):
        grads = jax.grad(lambda w: jnp.mean(forward(w, x) ** 2))(w)
        m = jax.tree.map(lambda a, b: 0.9 * a + b, m, grads)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, m), m

    of(step).plan(W, X).save(file)
    given = {"in_shardings": (*SPECS, SPECS[0]), "plan": file}
    with pytest.raises(sdy.PinnedPlanError, match=r"argument m\[0\]\['down'\]"):
        of(with_momentum, **given).plan(W, X, W)
    pinned = of(with_momentum, **given, on_change="replan")
    with pytest.warns(sdy.PartitionWarning, match="was made anew"):
        same(pinned(W, X, W), with_momentum(W, X, W))


def test_layouts_of_the_border_are_those_of_the_file(file, searches):
    automatic = {"in_shardings": sdy.AUTO, "out_shardings": sdy.AUTO}
    plan = of(step, **automatic, memory="32KiB").plan(W, X)
    plan.save(file)
    pinned = of(step, **automatic, plan=file)
    found = pinned.plan(W, X)
    assert found.mlir() == plan.mlir() and found.input_specs == plan.input_specs and searches == ["step"]
    assert "automatic layouts" in str(found)
    same(pinned(W, X), step(W, X))


def test_of_several_meshes_the_one_of_the_file_is_taken(file, searches):
    meshes = [
        jax.make_mesh(sizes, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        for sizes in ((2, 4), (4, 2))
    ]
    plan = of(step, mesh=meshes[1], in_shardings=sdy.AUTO).plan(W, X)
    plan.save(file)
    searches.clear()
    pinned = of(step, mesh=meshes, in_shardings=sdy.AUTO, plan=file)
    assert pinned.plan(W, X).mlir() == plan.mlir() and not searches
    same(pinned(W, X), step(W, X))


def test_derivatives_have_plans_of_their_own(file):
    of(forward).plan(W, X).save(file)
    pinned = of(forward, plan=file)
    found = jax.grad(lambda w: jnp.mean(pinned(w, X) ** 2))(W)
    same(found, jax.grad(lambda w: jnp.mean(forward(w, X) ** 2))(W))


def test_copies_and_pickles_keep_the_pin(file):
    of(step, costs=V5E).plan(W, X).save(file)
    pinned = of(step, plan=file)
    for other in (copy.copy(pinned), pickle.loads(pickle.dumps(of(step, plan=str(file))))):
        assert other.plan(W, X).mlir() == pinned.plan(W, X).mlir()


# Edits.


def stepped(text, folder, **options):
    """The plan of the text's `step(params, x)`."""
    path = folder / "model.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("model", path)
    module = importlib.util.module_from_spec(spec)
    exec(compile(text, path, "exec"), vars(module))
    function = sdy.partition(module.step, mesh=MESH, in_shardings=module.IN_SHARDINGS, **options)
    width = getattr(module, "WIDTH", 32)
    w = {"up": array(16, width), "down": array(width, 16)}
    arguments = {"first": w, "second": w, "out": w}, array(8, 16)
    plan = function.plan(*arguments)
    same(function(*arguments), module.step(*arguments))
    return plan


FITTING = {
    "nothing": lambda text: text,
    "a comment": lambda text: (
        "# a model\n" + text.replace("        hidden = jnp", "        # then\n        hidden = jnp")
    ),
    "a variable": lambda text: text.replace("hidden", "inner"),
    "a function": lambda text: text.replace("layer(", "block("),
    "a scope": lambda text: text.replace('"first")', '"begin")'),
    "an argument's name": lambda text: text.replace("params", "weights"),
    "a constant": lambda text: text.replace("x + hidden", "0.5 * x + hidden").replace("0.5 *", "0.25 *"),
    "another op of one element": lambda text: text.replace("jnp.tanh", "jnp.sin"),
}


@pytest.mark.parametrize("edit", FITTING)
def test_edits_that_change_nothing_of_the_plan_do_not_matter(file, tmp_path, searches, edit):
    text = MLP.replace("x + hidden", "0.5 * x + hidden") if edit == "a constant" else MLP
    plan = stepped(text, tmp_path, costs=V5E)
    plan.save(file)
    found = stepped(FITTING[edit](text), tmp_path, plan=file)
    assert found.fingerprint() == plan.fingerprint()
    assert len(searches) == 1 or edit == "another op of one element"


OTHER = {
    "another layer": (
        lambda text: text.replace("    return x\n", '    return layer(x, params["out"], "third")\n'),
        ["model.py:17: ", "2 dot_general", "all_reduce", "on the wire"],
    ),
    "another width": (lambda text: text + "\nWIDTH = 64\n", ["argument params['first']['up']", "of memory"]),
    "another layout": (
        lambda text: text.replace('P("data"))', 'P("model"))'),
        ["in_shardings", "argument x", "collectives"],
    ),
    "another result": (
        lambda text: text.replace("    return x\n\n\nSPECS", "    return x.sum(0)\n\n\nSPECS"),
        ["model.py:17", "result  f32[8@data,16] -> f32[16]", "all_reduce"],
    ),
}


@pytest.mark.parametrize("edit", OTHER)
def test_other_plans_are_refused_and_said(file, tmp_path, edit):
    change, said = OTHER[edit]
    stepped(MLP, tmp_path, costs=V5E).save(file)
    with pytest.raises(sdy.PinnedPlanError, match=r"step.plan.json is not the plan of step any more:\n") as raised:
        stepped(change(MLP), tmp_path, plan=file)
    assert [text for text in said if text not in str(raised.value)] == []
    assert raised.value.diff.collectives or raised.value.diff.border


@pytest.mark.parametrize("edit", OTHER)
def test_other_plans_are_made_anew_where_that_is_asked_for(file, tmp_path, edit):
    change, said = OTHER[edit]
    stepped(MLP, tmp_path, costs=V5E).save(file)
    with pytest.warns(sdy.PartitionWarning, match="is not the plan of step any more, and was made anew:") as warned:
        plan = stepped(change(MLP), tmp_path, plan=file, on_change="replan")
    assert all(any(text in str(each.message) for each in warned) for text in said)
    assert plan.costs == V5E


def test_another_mesh_is_refused(file):
    of(step).plan(W, X).save(file)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(sdy.PinnedPlanError, match="a plan on the mesh data=2, model=4, and step is partitioned on"):
        of(step, mesh=mesh, plan=file).plan(W, X)


def test_what_is_said_of_values_has_to_be_the_same(file):
    of(step).plan(W, X).save(file)
    with pytest.raises(sdy.PinnedPlanError, match="was made with uneven='pad', and the function says uneven='error'"):
        of(step, plan=file, uneven="error").plan(W, X)


# Files.


def rewritten(file, change, is_signed):
    """Changes a file's JSON; with the digest of what it is then, where `is_signed`."""
    whole = json.loads(file.read_text())
    change(whole)
    if is_signed:
        said = json.dumps([whole["tables"], whole["plan"]], sort_keys=True)
        whole["digest"] = hashlib.sha256(said.encode()).hexdigest()
    file.write_text(json.dumps(whole))


def split_otherwise(whole):
    whole["tables"]["layouts"][1]["axes"] = '[{"model"}, {}]'


def other_ops(whole):
    layouts = whole["plan"]["choices"]["layouts"]
    layouts["ops"] = layouts["ops"][::-1]


def no_unreduced(whole):
    for layout in whole["tables"]["layouts"]:
        layout.pop("unreduced", None)


def foreign_axes(whole):
    whole["tables"]["layouts"][0]["axes"] = '[{"nowhere"}, {}]'


def other_costs(whole):
    whole["plan"]["choices"]["costs"]["flop"] = 12.0


def other_collectives(whole):
    whole["plan"]["collectives"] = whole["plan"]["collectives"][:-1]


CHANGES = [split_otherwise, other_ops, no_unreduced, foreign_axes, other_costs, other_collectives]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_was_edited_is_refused(file, change):
    of(step).plan(W, X).save(file)
    rewritten(file, change, is_signed=False)
    with pytest.raises(sdy.PinnedPlanError, match=r"step.plan.json was edited, or damaged"):
        of(step, plan=file).plan(W, X)


@pytest.mark.parametrize("change", [split_otherwise, other_ops, no_unreduced, foreign_axes])
def test_a_file_that_was_edited_and_signed_does_not_run_wrong(file, change):
    """It is refused for what it says, or another plan comes of it than it says."""
    of(step).plan(W, X).save(file)
    rewritten(file, change, is_signed=True)
    with pytest.raises(sdy.SdyError), warnings.catch_warnings():
        warnings.simplefilter("error")
        of(step, plan=file).plan(W, X)


@pytest.mark.more("all layouts, one by one")
def test_every_layout_that_a_file_could_say_runs_right_or_not_at_all(file, monkeypatch):
    """Even if a file is signed, and says the digest of what comes of it: then only what is checked of each op, and the
    verifier, stand between it and a wrong number."""
    fun, costs = gathering, sdy.CostModel(bandwidth=1e9, flop=1e-10)
    of(fun, costs=costs).plan(W, X).save(file)
    whole, wanted = json.loads(file.read_text()), fun(W, X)
    dims = ["{}", '{"data"}', '{"model"}']
    pairs = [(a, b) for a in dims for b in dims if a != b or a == "{}"]
    refused = ran = 0
    for number, layout in enumerate(whole["tables"]["layouts"]):
        rank = len(parse_axis_lists(layout["axes"]))
        for axes in [(a,) for a in dims] if rank == 1 else pairs if rank == 2 else []:
            other = copy.deepcopy(whole)
            other["tables"]["layouts"][number]["axes"] = f"[{', '.join(axes)}]"
            found = replace(files.plan_from_json(json.dumps(other)), is_edited=False)
            monkeypatch.setattr(pinned_plans, "digest_of", lambda _, said=found.choices.partitioned: said)
            try:
                same(of(fun, plan=found, costs=costs)(W, X), wanted)
                ran += 1
            except sdy.SdyError:
                refused += 1
    assert ran and refused


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"kind": "sdy_jax plan", "format": 99}', "\x80binary"])
def test_foreign_files_are_refused(file, text):
    file.write_text(text, encoding="latin-1")
    with pytest.raises(sdy.SdyError, match=r"step.plan.json"):
        of(step, plan=file).plan(W, X)


def test_truncated_files_are_refused(file):
    of(step).plan(W, X).save(file)
    text = file.read_text()
    for end in (10, len(text) // 2, len(text) - 3):
        file.write_text(text[:end])
        with pytest.raises(sdy.SdyError, match=r"step.plan.json"):
            of(step, plan=file).plan(W, X)


def test_a_plan_without_choices_is_refused():
    record = of(step).plan(W, X).record()
    with pytest.raises(sdy.PinnedPlanError, match="the plan that plan= gives says no choices"):
        of(step, plan=record).plan(W, X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": 3}, "plan is an int; expected a plan, or the path of its file"),
        ({"plan": "a", "on_change": "maybe"}, "on_change='maybe'; expected 'error' or 'replan'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(sdy.SdyError, match=message):
        of(step, **options)


def test_a_missing_file_is_said():
    with pytest.raises(sdy.SdyError, match=r"nowhere.json cannot be read: No such file"):
        of(step, plan="nowhere.json").plan(W, X)


def test_what_was_reviewed_is_what_is_pinned(file, monkeypatch):
    plan = of(step, costs=V5E).plan(W, X)
    monkeypatch.setenv("SDY_JAX_UPDATE_PLANS", "1")
    sdy.testing.assert_plan(plan, file)
    monkeypatch.delenv("SDY_JAX_UPDATE_PLANS")
    pinned = of(step, plan=file).plan(W, X)
    assert pinned.mlir() == plan.mlir()
    sdy.testing.assert_plan(pinned, file)
    with pytest.raises(AssertionError, match="the plan is not the one reviewed"):
        sdy.testing.assert_plan(of(step).plan(W, X), file)


# The command line.


def test_the_command_line_saves_and_pins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("import jax.numpy as jnp\ndef f(x, w):\n    return jnp.tanh(x @ w)\n")
    given = ["--mesh", "x=8", "--in-shardings", "P('x'), P(None, 'x')"]
    command = ["m.py:f", *given, "--args", "f32[64,128], f32[128,64]"]
    assert main(["plan", *command, "--save", "f.json"]) == 0
    assert main(["plan", *command, "--pin", "f.json", "--diff", "f.json"]) == 0
    assert "no differences" in capsys.readouterr().out
    (tmp_path / "m.py").write_text("import jax.numpy as jnp\ndef f(x, w):\n    return jnp.tanh(x @ w) @ w.T\n")
    assert main(["plan", *command, "--pin", "f.json"]) == 1
    said = capsys.readouterr().err
    assert "f.json is not the plan of f any more" in said and "m.py:3" in said


@pytest.mark.parametrize("machine", ["2 x mi300x x8", "2 x h100 x8", "2 x v5e x8", ""])
def test_files_have_all_that_a_cost_model_says(machine):
    mesh = sdy.Mesh.of(data=16)
    costs = sdy.CostModel.of_machine(machine, mesh) if machine else sdy.CostModel()
    assert costs_from(recorded_costs(costs)) == costs
