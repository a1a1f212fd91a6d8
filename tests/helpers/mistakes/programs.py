"""Mistakes in programs that are loaded: files of other kinds, damaged ones, and MLIR text."""

from __future__ import annotations

import functools
import io
import os
import tempfile

import jax
import jax.numpy as jnp
from jax import export

import sdy_jax as sdy
from mistakes import MESH, PARAMS, Mistake, X

DECLARED = 'sdy.mesh @mesh = <["data"=2, "model"=4]>\n'
TENSOR = "tensor<8x8xf32>"


def text(body, mesh=DECLARED, main="main"):
    """A program of one argument, `%x`, and a body that makes `%y`, on line 3."""
    return f"{mesh}func.func @{main}(%x: {TENSOR}) -> {TENSOR} {{\n  {body}\n  return %y : {TENSOR}\n}}"


TANH = text(f"%y = stablehlo.tanh %x : {TENSOR}")
CALL = text(f"%y = stablehlo.custom_call @my_kernel(%x) : ({TENSOR}) -> {TENSOR}")


def loaded(body, mesh=DECLARED):
    return sdy.loads(text(body, mesh))


def constrained(sharding, mesh=DECLARED):
    return loaded(f"%y = sdy.sharding_constraint %x <{sharding}> : {TENSOR}", mesh)


def planned(*args, program=TANH, **options):
    return sdy.partition(sdy.loads(program), **options).plan(*args)


@functools.cache
def exported(platform="cpu"):
    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    return bytes(export.export(jax.jit(jnp.tanh), platforms=[platform])(shape).serialize())


@functools.cache
def bytecode():
    opened = io.BytesIO()
    sdy.loads(TANH).module.write_bytecode(opened)
    return opened.getvalue()


def begun(data):
    """The first half of a file, loaded."""
    return sdy.load(data[: len(data) // 2])


FILES = {
    "noise": Mistake(lambda: sdy.load(b"\0\1\2 noise \xff"), "byte 0xff at offset", "expected MLIR text"),
    "words": Mistake(lambda: sdy.load(b"hello world"), "<bytes>:1:1", "expected MLIR: `module {`"),
    "nothing": Mistake(lambda: sdy.load(b""), "<bytes>: error: this is empty", "expected MLIR text"),
    "nothing in text": Mistake(lambda: sdy.loads(""), "<text>: error: this is empty", "the text of a program"),
    "no file": Mistake(lambda: sdy.load("no.mlir"), "no.mlir: error: No such file", f"in {os.getcwd()}"),
    "a folder": Mistake(lambda: sdy.load(tempfile.gettempdir()), tempfile.gettempdir(), "Is a directory"),
    "Python": Mistake(lambda: sdy.load(__file__), "programs.py", "partition a function of it"),
    "a saved plan": Mistake(lambda: sdy.load(b'{"kind": 1}'), "<bytes>", "which load_plan reads"),
    "arrays": Mistake(lambda: sdy.load(b"PK\3\4" + bytes(50)), "a zip archive", "expected MLIR text"),
    "HLO": Mistake(lambda: sdy.load(b"HloModule f\n"), "the text of an HLO module", "lowered.as_text()"),
    "an array": Mistake(lambda: sdy.load(X), "load got an array", "expected a path, or the bytes"),
    "bytes for text": Mistake(lambda: sdy.loads(b"module {}"), "loads got a bytes", "are read by load"),
    "a path for text": Mistake(lambda: sdy.loads("model.mlir"), "'model.mlir'", "sdy_jax.load('model.mlir')"),
    "text for a path": Mistake(lambda: sdy.load(TANH), "the text of a program", "sdy_jax.loads(text)"),
    "half of an export": Mistake(lambda: begun(exported()), "this jax.export file", "copy it or export it again"),
    "the beginning of an export": Mistake(lambda: sdy.load(exported()[:20]), "<bytes>", "a jax.export file, whole"),
    "half of bytecode": Mistake(lambda: begun(bytecode()), "this MLIR bytecode", "copy it or export it again"),
    "an export for others": Mistake(
        lambda: sdy.partition(sdy.load(exported("tpu")), mesh=MESH)(X), "for tpu", "any_platform=True"
    ),
}

TEXT = {
    "two modules": Mistake(
        lambda: sdy.loads(f"module {{\n{TANH}\n}}\nmodule {{\n{TANH}\n}}"), "at <text>:1, <text>:8", "give one of them"
    ),
    "no function": Mistake(lambda: sdy.loads("module {}"), "no function", "name a function @main"),
    "two functions": Mistake(
        lambda: sdy.loads(
            text("%y = stablehlo.tanh %x : " + TENSOR, main="f") + text("%y = stablehlo.tanh %x : " + TENSOR, "", "g")
        ),
        "@f, @g",
        "name a function @main",
    ),
    "a colon": Mistake(lambda: loaded(f"%y = stablehlo.tanh %x {TENSOR}"), "<text>:3:25", "expected ':'"),
    "a value": Mistake(lambda: loaded(f"%y = stablehlo.tanh %z : {TENSOR}"), "<text>:3:23", "use of undeclared"),
    "an op": Mistake(
        lambda: loaded(f"%y = stablehlo.tanhh %x : {TENSOR}"), "<text>:3:8", "did you mean stablehlo.tanh?"
    ),
    "a type": Mistake(
        lambda: loaded("%y = stablehlo.tanh %x : tensor<4xf32>"), "<text>:3:23", "expects different type"
    ),
    "another dialect": Mistake(lambda: loaded(f"%y = tosa.tanh %x : {TENSOR}"), "<text>:3:8", "lower it to StableHLO"),
    "another dialect's type": Mistake(
        lambda: sdy.loads("func.func @main(%x: !torch.int) { return }"),
        "dialect `torch`",
        "to StableHLO by that dialect",
    ),
    "a mesh": Mistake(lambda: constrained('@m, [{"data"}, {}]'), "<text>:3:8", 'has @mesh = <["data"=2, "model"=4]>'),
    "no mesh": Mistake(lambda: constrained('@mesh, [{"data"}, {}]', ""), "<text>:2:8", "the text has no sdy.mesh"),
    "an axis": Mistake(lambda: constrained('@mesh, [{"rows"}, {}]'), "<text>:3:8", '@mesh = <["data"=2, "model"=4]>'),
    "an axis twice": Mistake(lambda: constrained('@mesh, [{"data"}, {"data"}]'), "<text>:3:8", "occurs once"),
    "a rank": Mistake(lambda: constrained('@mesh, [{"data"}]'), "<text>:3:8", "one entry per dimension"),
    "a part of an axis": Mistake(
        lambda: constrained('@mesh, [{"model":(1)3}, {}]'), "<text>:3:8", "divides the size of its axis"
    ),
    "an argument's axis": Mistake(
        lambda: sdy.loads(
            TANH.replace(f": {TENSOR})", f': {TENSOR} {{sdy.sharding = #sdy.sharding<@mesh, [{{"r"}}, {{}}]>}})', 1)
        ),
        "<text>:2:1: error: [A1] func.func, argument 0",
        '@mesh = <["data"=2',
    ),
    "a mesh of nothing": Mistake(lambda: sdy.loads(TANH.replace("=2", "=0")), "<text>:1:20", "at least one device"),
    "a name twice": Mistake(
        lambda: sdy.loads(TANH.replace("model", "data")), "<text>:1:18", "names of a mesh are unique"
    ),
    "devices": Mistake(
        lambda: sdy.loads(TANH.replace("4]", "4], device_ids=[0, 0, 1, 2, 3, 4, 5, 6]")),
        "<text>:1:",
        "a permutation of 0, 1, 2",
    ),
    "a gather": Mistake(
        lambda: sdy.loads(
            TANH.replace(
                "{\n", f'{{\n  %z = sdy.sharding_constraint %x <@mesh, [{{"data"}}, {{}}]> : {TENSOR}\n', 1
            ).replace("stablehlo.tanh %x :", 'sdy.all_gather [{"model"}, {}] %z out_sharding=<@mesh, [{}, {}]> :')
        ),
        "<text>:4:8",
        "take the minor end",
    ),
    "a rule": Mistake(
        lambda: sdy.loads(
            CALL.replace("(%x) :", "(%x) {sdy.sharding_rule = #sdy.op_sharding_rule<([i])->([i]) {i=8}>} :")
        ),
        "<text>:3:8",
        "one entry per dimension",
    ),
    "an axis of the mesh dialect": Mistake(
        lambda: loaded(
            f"%y = mesh.all_reduce %x on @g mesh_axes = [5] : {TENSOR} -> {TENSOR}", "mesh.mesh @g(shape = 8)\n"
        ),
        "<text>:3:8",
        "@g has axes 0..0",
    ),
    "a size of the mesh dialect": Mistake(
        lambda: loaded(
            f"%y = mesh.all_gather %x on @g mesh_axes = [0] gather_axis = 0 : {TENSOR} -> {TENSOR}",
            "mesh.mesh @g(shape = 2)\n",
        ),
        "<text>:3:8",
        "dimension 0 is 8, expected 16",
    ),
    "a bracket of the shard dialect": Mistake(
        lambda: loaded(f"%y = shard.all_reduce %x on @g grid_axes = [0 : {TENSOR}", "shard.grid @g(shape = 8)\n"),
        "<text>:3:",
        "expected `,` or `]`",
    ),
}

RUNS = {
    "a custom call of nobody": Mistake(
        lambda: sdy.partition(sdy.loads(CALL), on_unknown="ignore")(X),
        "<text>:3: stablehlo.custom_call @my_kernel",
        "jax.ffi.register_ffi_target('my_kernel'",
    ),
    "an op that XLA has not": Mistake(
        lambda: sdy.partition(loaded(f"%y = math.tanh %x : {TENSOR}"), on_unknown="ignore")(X),
        "<text>:3: math.tanh",
        "lower it to StableHLO",
    ),
    "no mesh": Mistake(lambda: planned(X, program=TANH.removeprefix(DECLARED)), "partition needs a mesh", "pass mesh="),
    "another mesh": Mistake(lambda: planned(X, mesh=sdy.Mesh.of(x=8)), '<["x"=8]>', "load it with shardings=False"),
    "another shape": Mistake(lambda: planned(jnp.ones((4, 8))), "`arg0` is f32[4,8]", "the program takes f32[8,8]"),
    "another type": Mistake(lambda: planned(X.astype("int32")), "`arg0` is i32[8,8]", "the program takes f32[8,8]"),
    "too many arguments": Mistake(
        lambda: planned(X, PARAMS["up"]), "args[1]: f32[8,16]", "main() takes arg0: f32[8,8]"
    ),
    "no arguments": Mistake(lambda: planned(), "it got none", "main() takes arg0: f32[8,8]"),
    "a keyword": Mistake(lambda: sdy.partition(sdy.loads(TANH)).plan(x=X), "x: f32[8,8]", "takes arg0"),
}
