"""Mistakes in what goes with whole models: rules, parameters, budgets, cost models and machines."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from mistakes import MESH, PARAMS, SPECS, Mistake, planned
from sdy_jax import Budget, CostModel, PartitionWarning

SPLIT = {"in_shardings": (P("data"), SPECS)}
NAMED = {"w": ("embed", "mlp"), "b": ("mlp",)}
MOMENTS = {"count": 0, "mu": {"w": jnp.ones((3, 4))}}


def entered():
    with sdy.rules({"mlp": "model"}):
        pass


RULES = {
    "names that no array has": Mistake(
        lambda: sdy.rules({"heads": "model"})(NAMED),
        "`tree['w']` has 'embed', 'mlp'",
        "the rules are of 'heads'",
        PartitionWarning,
    ),
    "arrays without names": Mistake(
        lambda: sdy.rules({"mlp": "model"})(PARAMS),
        "`tree['down']`, `tree['up']`",
        "box them with names",
        PartitionWarning,
    ),
    "arguments without names": Mistake(
        lambda: planned(in_shardings=(None, sdy.rules({"mlp": "model"}))),
        "`params['down']`",
        "box them with names",
        PartitionWarning,
    ),
    "an axis": Mistake(
        lambda: planned(in_shardings=(None, sdy.rules({"mlp": "modle"}))),
        "'mlp' goes with the axis 'modle'",
        "data, model",
    ),
    "a number": Mistake(lambda: sdy.rules(3), "rules got 3", "a dict of names and mesh axes"),
    "triples": Mistake(lambda: sdy.rules([("a", "b", "c")]), "('a', 'b', 'c')", "pairs of a name and mesh axes"),
    "a name twice": Mistake(lambda: sdy.rules({"a": "model"}).spec("a", "a"), "'a' twice", "give each its own"),
    "a context of nobody": Mistake(entered, "with rules(...)", "rules(...).spec"),
}

PARAMETERS = {
    "fsdp of small ones": Mistake(
        lambda: sdy.fsdp(PARAMS, mesh=MESH), "`params['down']` of shape (16, 8)", "lower min_size", PartitionWarning
    ),
    "fsdp of what does not divide": Mistake(
        lambda: sdy.fsdp({"w": jnp.ones((131, 131))}, mesh=MESH), "`params['w']`", "a multiple of 2", PartitionWarning
    ),
    "fsdp of shapes": Mistake(
        lambda: sdy.fsdp({"w": (128, 512)}, mesh=MESH), "`params['w'][0]`", "give arrays, or types", PartitionWarning
    ),
    "fsdp along no axis": Mistake(lambda: sdy.fsdp(PARAMS, "dta", mesh=MESH), "'dta'", "its axes are: data, model"),
    "fsdp without a mesh": Mistake(lambda: sdy.fsdp(PARAMS), "the size of 'data'", "pass mesh="),
    "fsdp on the name of a mesh": Mistake(lambda: sdy.fsdp(PARAMS, mesh="data"), "mesh is a str", "jax.make_mesh"),
    "fsdp along a number": Mistake(lambda: sdy.fsdp(PARAMS, 3, mesh=MESH), "axis=3", "the name of a mesh axis"),
    "fsdp from bytes on": Mistake(
        lambda: sdy.fsdp(PARAMS, mesh=MESH, min_size="1MiB"), "min_size='1MiB'", "a number of elements"
    ),
    "fsdp of other specs": Mistake(
        lambda: sdy.fsdp(PARAMS, mesh=MESH, specs={"up": P()}), "`params`: it lacks ['down']", "give the same structure"
    ),
    "an option of fsdp": Mistake(
        lambda: sdy.fsdp(PARAMS, mesh=MESH, axes="data"), "fsdp has no option 'axes'", "did you mean axis=?"
    ),
    "a pattern that no path has": Mistake(
        lambda: sdy.tensor_parallel(PARAMS, {"kernel": P("model")}), "'kernel'", "the parameters are `params['down']`"
    ),
    "no regular expression": Mistake(
        lambda: sdy.tensor_parallel(PARAMS, {"(up": P("model")}), "'(up'", "missing ), unterminated subpattern"
    ),
    "a pattern's axis": Mistake(
        lambda: sdy.tensor_parallel(PARAMS, {"up": P("rows")}, mesh=MESH), "'up': `params['up']`", "are: data, model"
    ),
    "a pattern's rank": Mistake(
        lambda: sdy.tensor_parallel(PARAMS, {"up": P(None, None, "model")}), "`params['up']`", "give at most 2"
    ),
    "a pattern that does not divide": Mistake(
        lambda: sdy.tensor_parallel({"up": jnp.ones((6, 6))}, {"up": P("model")}, mesh=MESH),
        "`params['up']` has shape (6, 6)",
        "split one that they divide",
    ),
    "a pattern for a name": Mistake(
        lambda: sdy.tensor_parallel(PARAMS, {"up": "model"}), "'up' has a str", "expected a PartitionSpec"
    ),
    "patterns in a list": Mistake(
        lambda: sdy.tensor_parallel(PARAMS, [("up", P())]), "patterns is a list", "a dict of regular expressions"
    ),
    "the arguments in another order": Mistake(
        lambda: sdy.tensor_parallel({"up": P("model")}, PARAMS), "'up' has an array", "expected a PartitionSpec"
    ),
    "a state of other parameters": Mistake(
        lambda: sdy.like(PARAMS, SPECS)(MOMENTS),
        "`state['mu']['w']`",
        "the parameters are `down`, `up`",
        PartitionWarning,
    ),
    "an argument of other parameters": Mistake(
        lambda: planned(lambda state: state, MOMENTS["mu"], in_shardings=sdy.like(PARAMS, SPECS)),
        "`state['w']`",
        "give like the tree whose structure the state has",
        PartitionWarning,
    ),
    "parameters that lie nowhere": Mistake(lambda: sdy.like(PARAMS), "`params['down']`", "like(params, specs)"),
    "specs of other parameters": Mistake(
        lambda: sdy.like(PARAMS, {"up": P()}), "`params`: it lacks ['down']", "give the same structure"
    ),
    "specs of another rank": Mistake(
        lambda: sdy.like(PARAMS, {"up": P(None, None, "model"), "down": P()}), "`params['up']`", "give at most 2"
    ),
}

BUDGETS = {
    "an option": Mistake(lambda: Budget(wire="10MiB"), "Budget has no option 'wire'", "did you mean wire_bytes=?"),
    "an amount in words": Mistake(lambda: Budget("lots"), "wire_bytes='lots'", "such as '10MiB'"),
    "less than nothing": Mistake(lambda: Budget(memory=-5), "memory=-5", "such as '10MiB'"),
    "a kind": Mistake(lambda: Budget(forbid="allgather"), "forbid: ", "did you mean all_gather?"),
    "jax's name of a kind": Mistake(
        lambda: Budget(axes={"model": "psum"}), "axes['model']", "did you mean all_reduce?"
    ),
    "axes in a tuple": Mistake(lambda: Budget(axes=("model",)), "axes=('model',)", "{'model': ('all_reduce',)}"),
    "an axis": Mistake(lambda: planned(budget=Budget(axes={"modle": ()})), "'modle'", "has 'data', 'model'"),
    "one that is broken": Mistake(
        lambda: planned(**SPLIT, budget=Budget(wire_bytes=10)), "mistakes/__init__.py:", "10 B are allowed"
    ),
    "a kind that is sent": Mistake(
        lambda: planned(**SPLIT, budget=Budget(forbid="all_reduce")), "__init__.py:", "all_reduce is forbidden"
    ),
    "memory that suffices for nothing": Mistake(
        lambda: planned(**SPLIT, budget=Budget(memory="100")), "__init__.py:", "shard them further"
    ),
    "a limit that no plan keeps": Mistake(
        lambda: planned(in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory="64B"), "memory=64 B", "split these"
    ),
}

COSTS = {
    "of a machine with other axes": Mistake(
        lambda: planned(**SPLIT, costs=CostModel.of_machine("h100", ("a", "b"))),
        "the axis 'data' of the mesh, <[\"data\"=2, \"model\"=4]>, but of 'a', 'b'",
        "CostModel.of_machine('h100', mesh)",
    ),
    "of a machine with some axes": Mistake(
        lambda: planned(**SPLIT, costs=CostModel.of_machine("h100", "data")),
        "the axis 'model'",
        "of_machine('h100', mesh)",
    ),
    "a network along no axis": Mistake(
        lambda: CostModel.of_machine("h100", MESH, {"dta": 25e9}), "bandwidth has 'dta'", "did you mean 'data'?"
    ),
    "a network along a part that there is not": Mistake(
        lambda: CostModel.of_machine("h100", MESH, {"data:(1)3": 25e9}), "'data:(1)3'", "a size that divides it"
    ),
    "bandwidth of a misspelt axis": Mistake(
        lambda: planned(**SPLIT, costs=CostModel(bandwidth={"dta": 1e9, "model": 1e9})), "'data'", "all its axes"
    ),
    "latency of a misspelt axis": Mistake(
        lambda: planned(**SPLIT, costs=CostModel({"dta": 1e-6}, bandwidth=1e9)), "no latency for the axis 'data'", "all"
    ),
    "a torus of a misspelt axis": Mistake(
        lambda: CostModel(bandwidth={"data": 1e9}, torus=("dta",)), "torus has 'dta'", "did you mean 'data'?"
    ),
    "a network of a misspelt axis": Mistake(
        lambda: CostModel(bandwidth={"data": 1e9}, network=("dta",)), "network has 'dta'", "did you mean 'data'?"
    ),
    "bandwidth of nothing": Mistake(
        lambda: CostModel(bandwidth={"data": 0}), "bandwidth['data']=0", "a positive number"
    ),
    "latency in words": Mistake(lambda: CostModel(latency="1us"), "latency='1us'", "a dict from axis name to number"),
    "operations in words": Mistake(lambda: CostModel(flop="400TF"), "flop='400TF'", "number in seconds"),
    "an option": Mistake(lambda: CostModel(bandwith=1e9), "'bandwith'", "did you mean bandwidth=?"),
    "a machine's name": Mistake(lambda: CostModel(machine="h1000"), "machine='h1000'", "did you mean 'h100'?"),
    "a misspelt machine": Mistake(lambda: CostModel.of_machine("h10", MESH), "'h10'", "did you mean 'h100'?"),
    "no machine": Mistake(lambda: CostModel.of_machine("abacus", MESH), "'abacus'", "known are tpu v4"),
    "a machine without axes": Mistake(lambda: CostModel.of_machine("h100"), "'axes'", "(name, axes, bandwidth=None)"),
    "a machine of eight": Mistake(lambda: CostModel.of_machine("h100", 8), "axes=8", "the names of its axes"),
    "of the name of a mesh": Mistake(lambda: CostModel.of_mesh("data"), "of_mesh got a str", "jax.make_mesh"),
    "of devices that are not there": Mistake(
        lambda: CostModel.calibrate(sdy.Mesh.of(data=2)), "calibrate got a Mesh", "a mesh of jax with devices"
    ),
}
