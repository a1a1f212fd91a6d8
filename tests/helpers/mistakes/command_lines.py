"""Mistakes on the command line, in a folder with these files."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PROGRAM = """\
sdy.mesh @mesh = <["data"=2, "model"=4]>
func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> tensor<8x8xf32> {
  %y = stablehlo.dot %x, %x : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %y : tensor<8x8xf32>
}
"""
CALL = """\
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %y = stablehlo.custom_call @my_kernel(%x) : (tensor<8xf32>) -> tensor<8xf32>
  return %y : tensor<8xf32>
}
"""
USER = """\
import jax.numpy as jnp

VALUE = 3

def step(x, w):
    return x @ w

def example():
    return jnp.ones((8, 8)), jnp.ones((8, 8))

def broken():
    return 1 / 0
"""

TEXTS = {
    "m.mlir": PROGRAM,
    "op.mlir": PROGRAM.replace(".dot", ".dott"),
    "axis.mlir": PROGRAM.replace('{"data"}', '{"rows"}'),
    "two.mlir": f"module {{\n{PROGRAM}}}\nmodule {{\n{PROGRAM}}}\n",
    "call.mlir": CALL,
    "user.py": USER,
    "junk.npz": "junk",
}
ARRAYS = {"shape.npz": {"arg0": np.ones((4, 8), np.float32)}, "names.npz": {"x": np.ones((8, 8), np.float32)}}

TYPES = ("--mesh", "data=2,model=4", "--args", "f32[8,8], f32[8,8]")
STEP = ("plan", "user.py:step", *TYPES)


class Line(NamedTuple):
    """A command line, what standard error names and says is right, and the exit status."""

    arguments: tuple[str, ...]
    names: str
    right: str
    status: int = 2


LINES = [
    Line(("paln", "m.mlir"), "'paln'", "did you mean 'plan'?"),
    Line(("plan",), "required: PROGRAM", "sdy-jax plan --help"),
    Line(("plan", "m.mlir", "n.mlir"), "'n.mlir'", "one argument too many"),
    Line(("plan", "m.mlir", "--tabel", "values"), "--tabel", "did you mean --table?"),
    Line(("plan", "m.mlir", "--table", "value"), "--table: 'value'", "did you mean 'values'?"),
    Line(("plan", "m.mlir", "--stage", "partition"), "--stage: 'partition'", "did you mean 'partitioned'?"),
    Line(("plan", "m.mlir", "--device", "8"), "--device", "did you mean --devices?"),
    Line(("plan", "m.mlir", "--why", "x", "--fixes"), "--fixes", "not allowed with argument --why"),
    Line(("plan", "m.mlir", "--why", "h"), "m.mlir: error: no value is called 'h'", "ask for an argument or result", 1),
    Line(("plan", "m.mlr"), "m.mlr: error: No such file or directory", "did you mean m.mlir?", 1),
    Line(("plan", "op.mlir"), "op.mlir:3:8: error:", "did you mean stablehlo.dot?", 1),
    Line(("plan", "two.mlir"), "at two.mlir:1, two.mlir:8", "--function", 1),
    Line(("plan", "junk.npz"), "junk.npz:1:1: error:", "expected MLIR", 1),
    Line(("plan", "m.mlir", "--mesh", "data"), "--mesh data", "data=2,model=4"),
    Line(("plan", "m.mlir", "--mesh", "data=two"), "'data=two'", "data=2,model=4"),
    Line(("plan", "m.mlir", "--mesh", "data=0"), "'data=0'", "data=2,model=4"),
    Line(("plan", "m.mlir", "--mesh", "data=2,data=4"), "'data=4'", "different names"),
    Line(("plan", "user.py"), "user.py is Python", "user.py:step", 1),
    Line(("plan", "usr.py:step", *TYPES), "usr.py:step: error: No such file", "did you mean user.py?", 1),
    Line(("plan", "user.py:setp", *TYPES), "has no 'setp'", "did you mean 'step'?", 1),
    Line(("plan", "no_module:step", *TYPES), "no module 'no_module'", "neither installed nor in", 1),
    Line(("plan", "user.py:VALUE", *TYPES), "user.py:VALUE is an int", "expected a function", 1),
    Line(("plan", "user.py:step", "--mesh", "data=2"), "the types of its arguments", '--args "f32[64,128], i32[]"'),
    Line((*STEP[:-1], "f32[8,8"), "--args f32[8,8", "expected f32[64,128]"),
    Line((*STEP[:-1], "flt32[8], f32[8]"), "no element type: flt32", "expected f32[64,128]"),
    Line((*STEP[:-1], "f32[8,8]"), "'w'", "its parameters are (x, w)", 1),
    Line((*STEP[:-1], "f32[8,9], f32[8,8]"), "user.py:6", "to have the same shape", 1),
    Line(("plan", "user.py:step", "--mesh", "data=2", "--args-from", "exampel"), "'exampel'", "mean 'example'?", 1),
    Line(("plan", "user.py:step", "--mesh", "data=2", "--args-from", "broken"), "user.py:12", "division by zero", 1),
    Line((*STEP, "--in-shardings", "P('data'"), "--in-shardings P('data'", "expected P('data', None)"),
    Line((*STEP, "--in-shardings", "auto"), "--in-shardings auto", "AUTO"),
    Line((*STEP, "--in-shardings", "P('rows'), None"), "in_shardings for `x`", "its axes are: data, model", 1),
    Line((*STEP, "--in-shardings", "P(), P(), P()"), "3 entries for 2", "give one entry per argument", 1),
    Line((*STEP, "--donate", "state"), "{'state'}", "its parameters are (x, w)", 1),
    Line(("plan", "m.mlir", "--budget", "wire=10MiB"), "'wire'", "did you mean 'wire_bytes'?"),
    Line(("plan", "m.mlir", "--budget", "wire_bytes=much"), "wire_bytes='much'", "such as '10MiB'"),
    Line(("plan", "m.mlir", "--budget", "10MiB"), "'10MiB'", "expected wire_bytes=10MiB"),
    Line(("plan", "m.mlir", "--budget", "wire_bytes=1"), "m.mlir:3: all_gather", "1 B are allowed", 1),
    Line(("plan", "m.mlir", "--topology", "tpu"), "--topology tpu", "as in tpu:v5e:16x16"),
    Line(("plan", "m.mlir", "--topology", "abacus:3"), "abacus", "expected one of tpu:v5e:16x16", 1),
    Line(("plan", "m.mlir", "--slices", "2"), "--slices", "by --topology"),
    Line(("plan", "m.mlir", "--slices", "two"), "--slices: 'two'", "no number of devices"),
    Line(("plan", "m.mlir", "--diff", "no.json"), "no.json", "name a plan's file", 1),
    Line(("plan", "m.mlir", "--pin", "no.json"), "no.json", "name a plan's file", 1),
    Line(("plan", "m.mlir", "--save", "/no/such/a.json"), "/no/such/a.json", "a directory that is there", 1),
    Line(("opt", "axis.mlir"), "axis.mlir:2:1: error:", '@mesh = <["data"=2, "model"=4]>', 1),
    Line(("opt", "m.mlir", "--pipelines", "x"), "--pipelines", "did you mean --pipeline?"),
    Line(("opt", "m.mlir", "--pipeline", "propagate"), "'propagate'", "did you mean sdy-", 1),
    Line(("opt", "m.mlir", "--pipeline", "propagation-pipeline{a=1"), "column 25", "expected an option name or '}'", 1),
    Line(("run", "m.mlir"), "arg0: f32[8,8]", "give --inputs FILE.npz", 1),
    Line(("run", "m.mlir", "--input", "in.npz"), "--input", "did you mean --inputs?"),
    Line(("run", "m.mlir", "--inputs", "shape.npz"), "shape.npz: error: arg0 is f32[4,8]", "takes f32[8,8]", 1),
    Line(("run", "m.mlir", "--inputs", "names.npz"), "names.npz: error: has no arg0", "it has x", 1),
    Line(("run", "m.mlir", "--inputs", "shapes.npz"), "shapes.npz: error:", "did you mean shape.npz?", 1),
    Line(("run", "m.mlir", "--inputs", "junk.npz"), "junk.npz: error:", "numpy.savez(FILE", 1),
    Line(("run", "m.mlir", "--random", "x"), "--random: 'x'", "a whole number"),
    Line(("run", "m.mlir", "--random", "0", "--outputs", "/no/such/o.npz"), "/no/such/o.npz", "no folder /no/such", 1),
    Line(("run", "m.mlir", "--random", "0", "--devices", "3"), "needs 8 devices", "say --devices 8", 1),
    Line(("run", "call.mlir", "--random", "0"), "call.mlir:2: error:", "register it before", 1),
    Line(("verify", "m.mlir", "--also", "rows=3"), "'rows'", "mesh has data, model", 1),
    Line(("verify", "m.mlir", "--target", "abacus"), "--target abacus", "expected one of cpu, gpu, tpu"),
    Line(("verify", "m.mlir", "--targets", "gpu"), "--targets", "did you mean --target?"),
    Line(("doctor", "--jsn"), "--jsn", "did you mean --json?"),
    Line(("clear", "m.mlir"), "'m.mlir'", "one argument too many"),
]
