"""Mistakes in `partition`: its options, meshes, specifications, and calls of what it returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from mistakes import FOUR, MESH, PARAMS, SPECS, Mistake, X, mlp, partitioned, planned


async def awaited(x):
    return x


def yielding(x):
    yield x


def donated_twice():
    step = partitioned(lambda state: state + 1, donate_argnums=0, in_shardings=P("data"))
    state = jax.device_put(X, NamedSharding(MESH, P("data"))) + 0
    step(state)
    return step(state)


def on_other_devices():
    with jax.set_mesh(FOUR):
        return partitioned()(X, PARAMS)


OPTIONS = {
    "a decorator that is called with the arguments": Mistake(
        lambda: sdy.partition(mesh=MESH)(X, PARAMS), "it got 2 arguments", "write partition(fun, mesh=mesh)(x)"
    ),
    "a decorator that is called with nothing": Mistake(
        lambda: sdy.partition(mesh=MESH)(), "it got 0 arguments", "@partition(mesh=mesh) above the function"
    ),
    "what the function returns": Mistake(
        lambda: sdy.partition(mlp(X, PARAMS), mesh=MESH), "partition got an array", "partition(fun, mesh=mesh)(x)"
    ),
    "a module": Mistake(lambda: sdy.partition(jnp, mesh=MESH), "partition got a module", "expected a function"),
    "a coroutine": Mistake(lambda: partitioned(awaited), "awaited", "expected one that returns arrays"),
    "a generator": Mistake(lambda: partitioned(yielding), "yielding", "expected one that returns arrays"),
    "a mesh by position": Mistake(lambda: sdy.partition(mlp, MESH), "a mesh as well", "partition(fun, mesh=mesh)"),
    "a mesh for the function": Mistake(lambda: sdy.partition(MESH), "a mesh in place of", "@partition(mesh=mesh)"),
    "device_mesh": Mistake(lambda: sdy.partition(mlp, device_mesh=MESH), "'device_mesh'", "write mesh="),
    "devices": Mistake(lambda: sdy.partition(mlp, devices=jax.devices()), "'devices'", "write mesh="),
    "shard_map's in_specs": Mistake(lambda: partitioned(in_specs=P()), "'in_specs'", "write in_shardings="),
    "shard_map's check_vma": Mistake(lambda: partitioned(check_vma=False), "'check_vma'", "leave it out"),
    "pjit's resources": Mistake(lambda: partitioned(out_axis_resources=P()), "'out_axis_resources'", "out_shardings="),
    "a misspelt option": Mistake(lambda: partitioned(in_sharding=P()), "'in_sharding'", "did you mean in_shardings=?"),
    "half of an option": Mistake(lambda: partitioned(memory_limit="1GiB"), "'memory_limit'", "did you mean memory=?"),
    "uneven": Mistake(lambda: partitioned(uneven="padding"), "uneven='padding'", "'pad', 'replicate' or 'error'"),
    "layouts": Mistake(lambda: partitioned(layouts="globl"), "layouts='globl'", "'propagated' or 'global'"),
    "constraints": Mistake(lambda: partitioned(constraints="off"), "constraints='off'", "'kept' or 'hints'"),
    "hints without a search": Mistake(
        lambda: partitioned(constraints="hints", layouts="local"), "constraints='hints'", "needs layouts='global'"
    ),
    "on_unknown": Mistake(lambda: partitioned(on_unknown="raise"), "on_unknown='raise'", "'warn', 'error' or 'ignore'"),
    "on_change": Mistake(lambda: partitioned(on_change="warn"), "on_change='warn'", "'error' or 'replan'"),
    "memory in words": Mistake(lambda: partitioned(memory="lots"), "memory='lots'", "such as '16GiB'"),
    "memory below nothing": Mistake(lambda: partitioned(memory=-1), "memory=-1", "such as '16GiB'"),
    "memory without a search": Mistake(
        lambda: partitioned(memory="1GiB", layouts="local"), "memory=", "needs layouts='global'"
    ),
    "effort": Mistake(lambda: partitioned(effort="high"), "effort='high'", "1 or more"),
    "recompute": Mistake(lambda: partitioned(recompute="yes"), "recompute='yes'", "True or False"),
    "combine": Mistake(lambda: partitioned(combine="some"), "combine='some'", "such as '4MiB'"),
    "a machine for its costs": Mistake(lambda: partitioned(costs="h100"), "costs is a str", "of_machine('h100', mesh)"),
    "rates for costs": Mistake(lambda: partitioned(costs={"data": 1e9}), "costs is a dict", "expected a CostModel"),
    "a number for a budget": Mistake(lambda: partitioned(budget=1000), "budget is an int", "Budget(wire_bytes="),
    "strict without axes": Mistake(lambda: partitioned(strict=True), "strict=True", "the name of a mesh axis"),
    "strict along no axis": Mistake(lambda: planned(strict="modle"), "'modle'", "expected one of 'data', 'model'"),
    "a number for a plan": Mistake(lambda: partitioned(plan=3), "plan is an int", "the path of its file"),
    "a pin and a model": Mistake(lambda: partitioned(plan="a", like="b"), "plan= says all", "give one of them"),
    "a static position": Mistake(lambda: partitioned(static_argnums=7), "(7,)", "its parameters are (x, params)"),
    "a static name": Mistake(lambda: partitioned(static_argnames="flag"), "{'flag'}", "its parameters are (x, params)"),
    "a donated position": Mistake(lambda: partitioned(donate_argnums=5), "(5,)", "its parameters are (x, params)"),
    "a donated name": Mistake(
        lambda: partitioned(donate_argnames="state"), "{'state'}", "its parameters are (x, params)"
    ),
    "donated and static": Mistake(
        lambda: partitioned(static_argnums=1, donate_argnums=1), "{'params'}", "cannot intersect"
    ),
    "compiler options in a list": Mistake(
        lambda: partitioned(compiler_options=["a"]), "compiler_options is a list", "expected a dict"
    ),
}

MESHES = {
    "a number": Mistake(lambda: sdy.partition(mlp, mesh=8), "the int 8", "mesh=jax.make_mesh(shape, names)"),
    "a shape": Mistake(lambda: sdy.partition(mlp, mesh=(2, 4)), "(2, 4)", "jax.make_mesh((2, 4), ('data', 'model'))"),
    "sizes as text": Mistake(lambda: sdy.partition(mlp, mesh="data=8"), "data=8", "jax.make_mesh((8,), ('data',))"),
    "sizes in a dict": Mistake(lambda: sdy.partition(mlp, mesh={"data": 8}), "'data': 8", "jax.make_mesh((8,),"),
    "devices": Mistake(lambda: sdy.partition(mlp, mesh=jax.devices()), "a list of 8 devices", "jax.sharding.Mesh("),
    "an array of devices": Mistake(
        lambda: sdy.partition(mlp, mesh=np.array(jax.devices())), "a ndarray of 8 devices", "with a name for each"
    ),
    "none": Mistake(lambda: sdy.partition(mlp)(X, PARAMS), "needs a mesh", "pass mesh=jax.make_mesh(shape, names)"),
    "an empty list": Mistake(lambda: sdy.partition(mlp, mesh=[]), "mesh=[]", "give one"),
    "a size of nothing": Mistake(lambda: sdy.Mesh.of(data=0), "data=0", "1 or more"),
    "a size in words": Mistake(lambda: sdy.Mesh.of(data="2"), "data='2'", "a number of devices"),
    "several of other sizes": Mistake(
        lambda: partitioned(mesh=[sdy.Mesh.of(data=8), sdy.Mesh.of(data=4)], in_shardings=sdy.AUTO),
        'mesh[1], <["data"=4]>',
        "meshes of the same devices",
    ),
    "several and nothing to choose": Mistake(
        lambda: partitioned(mesh=[sdy.Mesh.of(data=8), sdy.Mesh.of(data=2, model=4)]), "2 meshes", "in_shardings=AUTO"
    ),
    "no devices to run on": Mistake(
        lambda: partitioned(mesh=sdy.Mesh.of(data=16))(X, PARAMS), '<["data"=16]>', "partition it on a mesh of devices"
    ),
    "another one around": Mistake(on_other_devices, '<["rows"=4]>', "state one of them only"),
}

SPECIFICATIONS = {
    "auto as text": Mistake(lambda: planned(in_shardings="auto"), "in_shardings for `x`", "sdy_jax.AUTO"),
    "auto for an argument": Mistake(lambda: planned(in_shardings=(None, "AUTO")), "for `params['down']`", "AUTO"),
    "auto for results": Mistake(lambda: planned(out_shardings="auto"), "out_shardings for `result`", "sdy_jax.AUTO"),
    "auto for a dimension": Mistake(
        lambda: planned(in_shardings=(P(sdy.AUTO), None)), "in_shardings for `x`", "write P.UNCONSTRAINED"
    ),
    "the name of an axis": Mistake(lambda: planned(in_shardings=("data", None)), "for `x`", "write P('data')"),
    "a spec in quotes": Mistake(lambda: planned(in_shardings=("P('data')", None)), "`x`", "without the quotes"),
    "names in a tuple": Mistake(lambda: planned(in_shardings=(("data", None), None)), "`x`", "write P('data', None)"),
    "a number": Mistake(lambda: planned(in_shardings=(3, None)), "an int for `x`", "expected None, a PartitionSpec"),
    "true": Mistake(lambda: planned(in_shardings=True), "in_shardings is a bool", "one entry per argument (x, params)"),
    "a mesh": Mistake(lambda: planned(in_shardings=MESH), "in_shardings is a Mesh", "pass it as mesh="),
    "an axis that there is not": Mistake(
        lambda: planned(in_shardings=(P("batch"), None)),
        "in_shardings for `x`: P('batch',)",
        "its axes are: data, model",
    ),
    "an axis of results": Mistake(lambda: planned(out_shardings=P("rows")), "`result`", "its axes are: data, model"),
    "an axis twice": Mistake(
        lambda: planned(in_shardings=(P("data", "data"), None)), "`x`", "an axis splits a value once"
    ),
    "too many dimensions": Mistake(
        lambda: planned(in_shardings=(P("data", None, "model"), None)), "`x`", "give at most one per dimension"
    ),
    "a number that is split": Mistake(
        lambda: planned(lambda x: x.sum(), out_shardings=P("data")), "`result`", "give at most one per dimension"
    ),
    "too few entries": Mistake(
        lambda: planned(in_shardings=(P("data"),)), "1 entry for 2 positional arguments (x, params)", "give one entry"
    ),
    "too many entries": Mistake(
        lambda: planned(in_shardings=(P("data"), None, None)), "3 entries for 2 positional", "give one entry"
    ),
    "a key too few": Mistake(
        lambda: planned(in_shardings=(None, {"up": P()})), "`params`: it lacks ['down']", "give the same structure"
    ),
    "a key too many": Mistake(
        lambda: planned(in_shardings=(None, {**SPECS, "bias": P()})), "['bias']", "give the same structure"
    ),
    "an unknown parameter": Mistake(lambda: planned(in_shardings={"y": P()}), "'y'", "(x, params)"),
    "a tuple for one result": Mistake(
        lambda: planned(out_shardings=(P(), P())), "a tuple of 2 for `result`", "give one sharding"
    ),
    "other devices": Mistake(
        lambda: planned(in_shardings=(NamedSharding(FOUR, P("rows")), None)), "`x`", "use that mesh, or a PartitionSpec"
    ),
    "text that breaks off": Mistake(lambda: planned(in_shardings=('[{"data"', None)), "`x`: column 9", "expected `,`"),
    "text of another rank": Mistake(
        lambda: planned(in_shardings=('[{"data"}]', None)), "in_shardings for `x`", "one entry per dimension"
    ),
    "text with another axis": Mistake(
        lambda: planned(in_shardings=('[{"rows"}, {}]', None)), "`x`, dimension 0", 'the mesh are: "data"=2, "model"=4'
    ),
    "text with a wrong part": Mistake(
        lambda: planned(in_shardings=('[{"model":(1)3}, {}]', None)), "`x`, dimension 0", "divides the size of its axis"
    ),
    "sizes that do not divide": Mistake(
        lambda: planned(mlp, jnp.ones((6, 8)), PARAMS, in_shardings=(P("model"), None), uneven="error"),
        "dim 0 of `x`",
        "pad it to 8",
    ),
}

CALLS = {
    "too few arguments": Mistake(lambda: partitioned()(X), "'params'", "its parameters are (x, params)"),
    "too many arguments": Mistake(
        lambda: partitioned()(X, PARAMS, 3), "3 were given", "its parameters are (x, params)"
    ),
    "no arguments for a plan": Mistake(lambda: partitioned().plan(), "'x' and 'params'", "its parameters are"),
    "a misspelt keyword": Mistake(lambda: partitioned()(X, param=PARAMS), "'param'", "did you mean 'params'?"),
    "text": Mistake(lambda: partitioned()("x", PARAMS), "`x` is a str", "expected an array or a number"),
    "a type as text": Mistake(
        lambda: partitioned().plan("f32[8, 8]", PARAMS), "`x` is a str", "give jax.ShapeDtypeStruct((8, 8), 'float32')"
    ),
    "an object": Mistake(lambda: partitioned()(object(), PARAMS), "`x` is an object", "static_argnums"),
    "an array of text": Mistake(lambda: partitioned()(np.array(["a"]), PARAMS), "`x`", "of a dtype that jax has"),
    "a static list": Mistake(
        lambda: partitioned(lambda x, cfg: x, static_argnums=1)(X, [1]), "`cfg` is a list", "a tuple for a list"
    ),
    "a type where values are needed": Mistake(
        lambda: partitioned()(jax.ShapeDtypeStruct((8, 8), "float32"), PARAMS), "`x`", "ask for its plan()"
    ),
    "a shape for an array": Mistake(
        lambda: partitioned().plan((8, 8), PARAMS), "argument 0 is (8, 8)", "jax.ShapeDtypeStruct((8, 8)", TypeError
    ),
    "a list for an array": Mistake(
        lambda: partitioned()([[1.0, 2.0]], PARAMS), "argument 0 is a list", "give jax.numpy.array", TypeError
    ),
    "a list with a spec": Mistake(
        lambda: planned(jnp.stack, [1.5, 2.5], in_shardings=P("data")), "[0]`", "give jax.numpy.array"
    ),
    "an array that was donated": Mistake(donated_twice, "`state`", "pass what that function returned"),
    "a branch on a value": Mistake(
        lambda: planned(lambda x: x if x.sum() > 0 else -x),
        "the argument x",
        "See https://docs.jax.dev",
        jax.errors.TracerBoolConversionError,
    ),
    "shapes that do not fit": Mistake(
        lambda: partitioned().plan(jnp.ones((8, 9)), PARAMS), "(9,) and (8,)", "to have the same shape", TypeError
    ),
    "text as a result": Mistake(lambda: planned(lambda x: "done"), "`result` is a str", "returns arrays and numbers"),
    "a function as a result": Mistake(
        lambda: planned(lambda x: {"x": x, "f": mlp}), "`result['f']`", "return its arrays only"
    ),
    "an unknown compiler option": Mistake(
        lambda: partitioned(compiler_options={"xla_nothing": 1})(X, PARAMS),
        "'xla_nothing'",
        "No such compile option",
        jax.errors.JaxRuntimeError,
    ),
    "a misspelt method": Mistake(lambda: partitioned().plam, "'plam'", "Did you mean: 'plan'?", AttributeError),
}
