"""Mistakes inside of functions: constraints, computations, ops of one's own, pipelines, and the shard dialect."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from mistakes import FOUR, MESH, Mistake, X, partitioned, planned

STAGES = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
WEIGHTS, BATCH = jnp.ones((8, 8, 8)), jnp.ones((32, 8))
RULE = "([i, j])->([i, j]) {i=8, j=8}"


def layer(w, x):
    return jnp.tanh(x @ w)


def constrained(spec, x=None):
    """A plan of a function that constrains its argument, or `x`."""
    return planned(lambda own: sdy.sharding_constraint(own if x is None else x, spec))


def strict(axis, **options):
    def product(x):
        with sdy.strict(axis):
            return x @ x

    return planned(product, **options)


def manual(body, ins, outs, axes, x=X):
    """A plan of a function that is manual on some axes."""
    computed = sdy.manual_computation(body, in_shardings=ins, out_shardings=outs, manual_axes=axes)
    return planned(lambda x: computed(x), x)


def own(fun, rule, *more, **options):
    """A plan with an op of one's own."""
    op = sdy.custom_op(fun, rule, **options)
    return planned(lambda x: op(x, *more))


def piped(fun=layer, weights=WEIGHTS, x=BATCH, **options):
    return sdy.pipeline(fun, weights, x, **({"mesh": STAGES} | options))


def mapped(body, spec=P("data", "model")):
    """What jit makes of a function of blocks."""
    return jax.jit(jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)).lower(X)


def grouped_twice(x):
    return sdy.sharding_group(x, 1), sdy.sharding_group(x.sum(0), 1)


CONSTRAINTS = {
    "an unknown axis": Mistake(lambda: constrained(P("rows")), "`x`: P('rows',)", "its axes are: data, model"),
    "too many dimensions": Mistake(lambda: constrained(P(None, None, "data")), "`x`", "at most one per dimension"),
    "an axis twice": Mistake(lambda: constrained(P("data", "data")), "`x`", "an axis splits a value once"),
    "the name of an axis": Mistake(lambda: constrained("data"), "sharding_constraint for `x`", "write P('data')"),
    "auto as text": Mistake(lambda: constrained("auto"), "sharding_constraint for `x`", "sdy_jax.AUTO"),
    "AUTO": Mistake(lambda: constrained(sdy.AUTO), "sharding_constraint for `x` is AUTO", "state it"),
    "a number": Mistake(lambda: constrained(3), "an int for `x`", "expected None, a PartitionSpec"),
    "no specification": Mistake(
        lambda: planned(lambda x: sdy.sharding_constraint(x)), "'sharding'", "its parameters are (x, sharding)"
    ),
    "the arguments in another order": Mistake(
        lambda: planned(lambda x: sdy.sharding_constraint(P("data"), x)), "an array for `x`", "expected None, a Part"
    ),
    "another tree": Mistake(
        lambda: planned(lambda x: sdy.sharding_constraint({"a": x}, {"b": P()})), "['b']", "give the same structure"
    ),
    "text for an array": Mistake(lambda: constrained(P(), "text"), "`x` is a str", "expected an array"),
    "other devices": Mistake(
        lambda: constrained(NamedSharding(FOUR, P("rows"))), "for `x`", "use that mesh, or a PartitionSpec"
    ),
    "jax's, of an unknown axis": Mistake(
        lambda: planned(lambda x: jax.lax.with_sharding_constraint(x, P("rows"))),
        "rows of P('rows',)",
        "('data', 'model')",
        ValueError,
    ),
    "a move to an unknown axis": Mistake(
        lambda: planned(lambda x: sdy.reshard(x, P("rows"))), "reshard for `x`", "its axes are: data, model"
    ),
    "arrays alike of other shapes": Mistake(
        lambda: planned(lambda x: sdy.shard_alike(x, x.sum())), "`y` shape ()", "have one shape"
    ),
    "one array alike": Mistake(
        lambda: planned(lambda x: sdy.shard_alike(x)), "shard_alike() missing", "its parameters are (x, y)"
    ),
    "a group by name": Mistake(
        lambda: planned(lambda x: sdy.sharding_group(x, "a")), "group_id='a'", "expected an integer"
    ),
    "a group of other shapes": Mistake(lambda: planned(grouped_twice), "`x` of shape (8,)", "give it another group_id"),
    "a barrier to the side": Mistake(
        lambda: planned(lambda x: sdy.propagation_barrier(x, "sideways")), "'sideways'", "NONE, FORWARD, BACKWARD"
    ),
    "the sharding of text": Mistake(
        lambda: planned(lambda x: sdy.show_sharding("x")), "`x` is a str", "expected an array"
    ),
    "strict along no axis": Mistake(lambda: strict("rows"), "'rows'", "expected one of 'data', 'model'"),
    "strict where bytes move": Mistake(
        lambda: strict("model", in_shardings=P(None, "model")), "functions.py:", "write sdy.reshard(x, P())"
    ),
    "a gather along no axis": Mistake(
        lambda: planned(lambda x: sdy.all_gather(x, [["rows"], []])), "`x`", 'are: "data"=2, "model"=4'
    ),
    "a gather of what is whole": Mistake(
        lambda: planned(lambda x: sdy.all_gather(sdy.sharding_constraint(x, P("data")), [[], ["model"]])),
        "`x` at",
        "take the minor end of what splits a dimension",
    ),
    "a gather by name": Mistake(
        lambda: planned(lambda x: sdy.all_gather(x, "data")), "got 'data'", 'such as [["a"], []]'
    ),
    "an average": Mistake(
        lambda: planned(lambda x: sdy.all_reduce(x, ("data",), reduction="avg")), "'avg'", "one of sum, max, min"
    ),
}

COMPUTATIONS = {
    "shard_map's specs": Mistake(
        lambda: sdy.manual_computation(layer, in_specs=P(), out_specs=P()), "'in_specs'", "write in_shardings="
    ),
    "no manual axes": Mistake(
        lambda: sdy.manual_computation(layer, in_shardings=P(), out_shardings=P()),
        "'manual_axes'",
        "its parameters are",
    ),
    "no function": Mistake(
        lambda: sdy.manual_computation(X, in_shardings=P(), out_shardings=P(), manual_axes="data"),
        "manual_computation got an array",
        "expected a function",
    ),
    "an unknown axis": Mistake(
        lambda: manual(layer, P("rows"), P("rows"), {"rows"}), "manual_axes names 'rows'", "are: data, model"
    ),
    "no mesh": Mistake(
        lambda: sdy.manual_computation(jnp.sin, in_shardings=P(), out_shardings=P(), manual_axes="data")(X),
        "manual_axes names 'data'",
        "pass mesh, or call it under jax.set_mesh",
    ),
    "sizes that do not divide": Mistake(
        lambda: manual(jnp.sin, P("model"), P("model"), "model", jnp.ones((6, 4))),
        "`x`: dimension 0",
        "blocks of one size",
    ),
    "a number that is split": Mistake(
        lambda: manual(jnp.sum, P("data"), P("data"), "data"), "out_shardings for `result`", "at most one per dimension"
    ),
    "too many arguments": Mistake(
        lambda: manual(lambda x: x, (P("data"), P()), P("data"), "data"),
        "2 entries for 1",
        "give one entry per argument",
    ),
    "too many results": Mistake(
        lambda: manual(lambda x: x, P("data"), (P("data"), P()), "data"),
        "a tuple of 2 for `result`",
        "give one sharding",
    ),
    "a constraint along a manual axis": Mistake(
        lambda: manual(lambda x: sdy.sharding_constraint(x, P("data")), P("data"), P("data"), "data"),
        "`x`",
        "name the other axes only",
    ),
    "a named one along no axis": Mistake(
        lambda: planned(lambda x: sdy.named_computation(jnp.sin, name="f", in_shardings=P("rows"))(x)),
        "f, in_shardings for `x`",
        "its axes are: data, model",
    ),
    "a named one with two arguments": Mistake(
        lambda: planned(lambda x: sdy.named_computation(lambda x: x, in_shardings=(P(), P()))(x)),
        "2 entries for 1",
        "give one entry per argument",
    ),
    "a name in place of a function": Mistake(
        lambda: sdy.named_computation(3), "named_computation got an int", "expected a function or a name"
    ),
}

OWN_OPS = {
    "sizes of another array": Mistake(
        lambda: own(lambda x: x * 2, "([i, j])->([i, j]) {i=4, j=8}"), "operand 0, dim 0", "write i=8"
    ),
    "sizes of the result": Mistake(
        lambda: own(lambda x: x[:4], RULE), "result 0, dim 0: its size is 4", "other factors for other sizes"
    ),
    "a rank": Mistake(lambda: own(jnp.sin, "([i])->([i]) {i=8}"), "operand 0", "one entry per dimension"),
    "a number of operands": Mistake(
        lambda: own(lambda x, y: x * y, RULE, X), "1 operand mappings for 2", "a mapping per operand and result"
    ),
    "no sizes": Mistake(
        lambda: own(jnp.sin, "([i, j])->([i, j])"), "operand 0, dimension 0: unknown factor i", "gives sizes for"
    ),
    "a factor of a reduction": Mistake(
        lambda: own(jnp.sin, RULE.replace("}", "} reduction={i}")), "reduction factor i", "occurs in operands only"
    ),
    "a rule of einsum": Mistake(lambda: sdy.custom_op(jnp.sin, "i j -> i j"), "custom_op of `sin`", "as SDY writes it"),
    "a number for a rule": Mistake(lambda: sdy.custom_op(jnp.sin, 3), "custom_op of `sin` got an int", "its text"),
    "no rule": Mistake(lambda: sdy.custom_op(jnp.sin), "'rule'", "its parameters are (fun, rule"),
    "no function": Mistake(lambda: sdy.custom_op("f", RULE), "custom_op got a str", "expected a function"),
    "a mean": Mistake(lambda: sdy.custom_op(jnp.sin, RULE, reduction="mean"), "'mean'", "one of sum, max, min"),
    "padding in words": Mistake(lambda: sdy.custom_op(jnp.sin, RULE, padding="zero"), "'zero'", "a number, such as 0"),
    "a misspelt option": Mistake(
        lambda: sdy.custom_op(jnp.sin, RULE, pading=0), "custom_op has no option 'pading'", "did you mean padding=?"
    ),
    "a traced array": Mistake(
        lambda: planned(lambda x: sdy.custom_op(lambda y: y * x, RULE)(x)),
        "closes over a traced",
        "make it an argument",
    ),
    "blocks of another shape": Mistake(
        lambda: partitioned(
            lambda x: sdy.custom_op(lambda x: jnp.ones((8, 8)) * x[0, 0], RULE)(x), in_shardings=P("data")
        )(X),
        "functions.py:",
        "expected (4, 8) by its rule",
    ),
    "a rule for two ops": Mistake(
        lambda: planned(lambda x: sdy.with_sharding_rule(lambda x: jnp.sin(x) + x, RULE)(x)),
        "stablehlo.sine, stablehlo.add",
        "a function of that op alone",
    ),
    "a rule of other sizes": Mistake(
        lambda: planned(sdy.with_sharding_rule(jnp.sin, RULE.replace("i=8", "i=4"))), "operand 0, dim 0", "write i=8"
    ),
    "a reference of other results": Mistake(
        lambda: planned(sdy.partition_like(jnp.sin, lambda x: x.sum(0))), "`result`", "they have the same shapes"
    ),
    "a reference of other arguments": Mistake(
        lambda: planned(sdy.partition_like(jnp.sin, layer)), "the reference `layer`", "missing 1 required"
    ),
    "no kernel": Mistake(lambda: sdy.partition_like(3, layer), "an int as kernel", "expected a function"),
    "no reference": Mistake(lambda: sdy.partition_like(layer), "'reference'", "its parameters are (kernel, reference"),
}

PIPELINES = {
    "an axis": Mistake(lambda: piped(axis="stages"), "axis is 'stages'", "did you mean 'stage'?"),
    "no mesh": Mistake(lambda: sdy.pipeline(layer, WEIGHTS, BATCH), "there is no mesh", "pass mesh="),
    "microbatches": Mistake(lambda: piped(microbatches=5), "the batch of 32 in `x`", "microbatches=4 or 8"),
    "microbatches in words": Mistake(lambda: piped(microbatches="8"), "microbatches is '8'", "a positive integer"),
    "a choice where nothing is planned": Mistake(lambda: piped(microbatches=[4, 8]), "[4, 8]", "sdy.partition around"),
    "a schedule": Mistake(lambda: piped(schedule="1f1f"), "schedule is '1f1f'", "did you mean '1f1b'?"),
    "rounds": Mistake(lambda: piped(rounds=3), "rounds is 3", "schedule='interleaved'"),
    "activations of another shape": Mistake(
        lambda: piped(lambda w, x: x[:, :4]), "`x` as f32[4,8] and returns it as f32[4,4]", "have one type"
    ),
    "stacks of other lengths": Mistake(
        lambda: piped(weights={"a": WEIGHTS, "b": jnp.ones((4, 8))}), "`weights['b']`", "which are the number of layers"
    ),
    "a loss that is an array": Mistake(
        lambda: piped(loss=lambda x: x.sum(0)), "loss returns f32[8]", "expected one floating-point number"
    ),
    "targets of another batch": Mistake(
        lambda: piped(loss=lambda x, t: (x - t).sum(), targets=jnp.ones((16, 8))), "`targets`", "which are the batch"
    ),
    "not as many functions as layers": Mistake(
        lambda: piped([layer] * 3), "layer has 3 functions", "weights are of 8 layers"
    ),
    "auxiliary results that are none": Mistake(lambda: piped(has_aux=True), "has_aux=True", "returns a tuple"),
    "the arguments in another order": Mistake(
        lambda: piped(WEIGHTS, layer), "`weights` is a function", "expected an array"
    ),
    "a misspelt option": Mistake(
        lambda: piped(microbatch=8), "pipeline has no option 'microbatch'", "did you mean microbatches=?"
    ),
    "a table of no schedule": Mistake(
        lambda: sdy.pipeline_schedule("gpip", 4, 8), "schedule is 'gpip'", "did you mean 'gpipe'?"
    ),
    "a table without stages": Mistake(
        lambda: sdy.pipeline_schedule("gpipe", 0, 8), "stages is 0", "a positive integer"
    ),
    "layers to pack": Mistake(lambda: sdy.pack_layers(3), "pack_layers got an int", "for each layer, in a list"),
}

SHARD_DIALECT = {
    "an axis": Mistake(
        lambda: mapped(lambda x: sdy.shard.all_gather(x, grid_axes="rows", gather_axis=0)), "'rows'", "are data, model"
    ),
    "a dimension": Mistake(
        lambda: mapped(lambda x: sdy.shard.all_gather(x, grid_axes="model", gather_axis=5)), "gather_axis = 5", "0..1"
    ),
    "a reduction": Mistake(
        lambda: mapped(lambda x: sdy.shard.all_reduce(x, grid_axes="model", reduction="avg")),
        "'avg'",
        "one of sum, max",
    ),
    "an option": Mistake(
        lambda: mapped(lambda x: sdy.shard.all_gather(x, grid_axes="model", axis=0)),
        "'axis'",
        "did you mean gather_axis=?",
    ),
    "a shift along another axis": Mistake(
        lambda: mapped(lambda x: sdy.shard.shift(x, grid_axes="model", shift_axis="data", offset=1)),
        "shift_axis = 'data'",
        "grid_axes = ['model']",
    ),
    "outside of a manual region": Mistake(
        lambda: sdy.shard.all_gather(X, grid_axes="model", gather_axis=0), "grid axis 'model'", "inside jax.shard_map"
    ),
    "a sharding along no axis": Mistake(
        lambda: planned(lambda x: sdy.shard.shard(x, sdy.shard.Sharding([["rows"], []]))), "'rows'", "are data, model"
    ),
    "the sharding of what is on no mesh": Mistake(
        lambda: sdy.shard.get_sharding(X), "float32[8,8]", "put it on a mesh by jax.device_put"
    ),
    "a move without a source": Mistake(
        lambda: planned(lambda x: sdy.shard.reshard(x, "model")), "'target'", "parameters are (x, source, target"
    ),
    "a number for a program": Mistake(lambda: sdy.shard.run_local(3), "run_local got an int", "a program's text"),
}
