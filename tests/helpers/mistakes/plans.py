"""Mistakes in what is asked of plans, and around them: files, pins, `verify`, `install`, tests, passes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from mistakes import MESH, PARAMS, SPECS, Mistake, X, mlp, partitioned, planned
from sdy_jax import PartitionWarning

STATED = {"in_shardings": (P("data"), SPECS)}
EMPTY = "func.func @main() { return }"


STEP = partitioned(in_shardings=(P("data"), SPECS))


@functools.cache
def plan():
    return STEP.plan(X, PARAMS)


@functools.cache
def folder():
    return Path(tempfile.mkdtemp())


def file(name, text):
    """The path of a file with a text."""
    path = folder() / name
    path.write_text(text)
    return path


@functools.cache
def saved():
    plan().save(folder() / "step.plan.json")
    return folder() / "step.plan.json"


def begun():
    """A saved plan of which the second half is not there."""
    text = saved().read_text()
    return sdy.load_plan(file("half.json", text[: len(text) // 2]))


QUESTIONS = {
    "why of nothing": Mistake(lambda: plan().why("h"), "'h'", "ask for an argument or result as the plan names it"),
    "why of a misspelt path": Mistake(
        lambda: plan().why("params['dwn']"), "params['dwn']", "did you mean params['down']"
    ),
    "why of a number": Mistake(lambda: plan().why(3), "3 is no name", "a string, such as 'params'"),
    "why not along no axis": Mistake(lambda: plan().why_not("x", "rows"), "'rows'", "The mesh is data=2, model=4"),
    "why not of nothing": Mistake(lambda: plan().why_not("y", "data"), "'y'", "as the plan names it"),
    "why not of a dimension": Mistake(lambda: plan().why_not("x", "data", 7), "no dim 7", "count from 0"),
    "why not along what": Mistake(lambda: plan().why_not("x"), "why_not() missing", "(value, axis, dim=None)"),
    "a table": Mistake(lambda: plan().table("collective"), "'collective'", "the tables are 'collectives'"),
    "an option of a table": Mistake(
        lambda: plan().table("values", sort=1), "table has no option 'sort'", "it has name"
    ),
    "a stage": Mistake(lambda: plan().mlir("partition"), "'partition'", "did you mean 'partitioned'?"),
    "a picture of nothing": Mistake(lambda: plan().draw("y"), "'y'", "the plan prints the names"),
    "a difference from a number": Mistake(lambda: plan().diff(3), "an int", "sdy.load_plan(path) reads one"),
    "a difference from a file": Mistake(lambda: plan().diff("old.json"), "a str", "sdy.load_plan(path) reads one"),
    "a page beside a file": Mistake(
        lambda: plan().to_html(folder() / "p.html", against="old.json"), "a str", "sdy.load_plan(path) reads one"
    ),
    "a count": Mistake(
        lambda: plan().assert_collectives(all_reduce=7), "mlp on mesh data=2, model=4", "expected 7", AssertionError
    ),
    "a kind": Mistake(lambda: plan().assert_collectives(allreduce=1), "'allreduce'", "did you mean all_reduce?"),
    "a folder to save to": Mistake(lambda: plan().save("/no/a.json"), "/no/a.json", "a directory that is there"),
    "a folder for a page": Mistake(lambda: plan().to_html("/no/a.html"), "/no/a.html", "a directory that is there"),
    "a folder for Python": Mistake(lambda: plan().to_python("/no/a.py"), "/no/a.py", "a directory that is there"),
    "a run without arguments": Mistake(lambda: plan().analyze(), "'x' and 'params'", "its parameters are (x, params)"),
    "a run of other sizes": Mistake(
        lambda: plan().analyze(jnp.ones((4, 8)), PARAMS),
        "`x` is f32[4@data,8] here",
        "like those that the plan was made",
    ),
    "a run of types": Mistake(
        lambda: plan().analyze(jax.ShapeDtypeStruct((8, 8), "float32"), PARAMS), "`x`", "with an array"
    ),
    "a misspelt attribute": Mistake(
        lambda: plan().collective, "'collective'", "Did you mean: 'collectives'?", AttributeError
    ),
    "a function to show": Mistake(lambda: sdy.show(partitioned()), "a PartitionedFunction", "sdy.show(mlp.plan(...))"),
    "an array to show": Mistake(lambda: sdy.show(X), "show got an array", "expected a plan"),
}

FILES = {
    "no plan": Mistake(lambda: sdy.load_plan("no.plan.json"), "no.plan.json", "name a plan's file"),
    "a plan in words": Mistake(
        lambda: sdy.load_plan(file("a", "words")), "/a is no plan", "that plan.save(path) wrote"
    ),
    "other JSON": Mistake(lambda: sdy.load_plan(file("b", '{"a": 1}')), "/b is no plan", "that plan.save(path) wrote"),
    "half of a plan": Mistake(begun, "half.json is no plan", "that plan.save(path) wrote"),
    "a folder": Mistake(lambda: sdy.load_plan(folder()), "Is a directory", "name a plan's file"),
    "no pin": Mistake(lambda: planned(plan="no.plan.json"), "no.plan.json", "name a plan's file"),
    "a pin in words": Mistake(lambda: planned(plan=file("c", "{")), "/c is no plan", "that plan.save(path) wrote"),
    "a model in words": Mistake(lambda: planned(like=file("d", "{")), "/d is no plan", "that plan.save(path) wrote"),
    "a pin of other shardings": Mistake(
        lambda: planned(plan=saved()),
        "in_shardings of x: P('data') -> nothing",
        "save it in its place: plan.save(path)",
    ),
    "a pin on another mesh": Mistake(
        lambda: planned(mesh=sdy.Mesh.of(x=4), plan=saved()), "step.plan.json", "pin a plan on this mesh"
    ),
    "a pin of other sizes": Mistake(
        lambda: planned(mlp, jnp.ones((16, 8)), PARAMS, plan=saved(), **STATED),
        "argument x: f32[8,8] -> f32[16,8]",
        "save it in its place",
    ),
    "a reviewed plan that is none": Mistake(
        lambda: sdy.testing.assert_plan(plan(), file("e", "old")), "/e is no plan", "that plan.save(path) wrote"
    ),
    "a reviewed plan that is not there": Mistake(
        lambda: sdy.testing.assert_plan(plan(), folder() / "none"), "none", "pytest --sdy-update-plans", AssertionError
    ),
    "a number to review": Mistake(lambda: sdy.testing.assert_plan(3, "x"), "assert_plan got an int", "expected a plan"),
    "a number to compare": Mistake(lambda: sdy.testing.assert_same(3), "an int", "expected a function"),
}

OTHERS = {
    "verify of a plain function": Mistake(lambda: sdy.verify(mlp, X, PARAMS), "mlp is a plain", "mlp, ..., mesh=mesh"),
    "verify without arguments": Mistake(lambda: sdy.verify(mlp, mesh=MESH), "'x' and 'params'", "its parameters are"),
    "verify of a number": Mistake(lambda: sdy.verify(3, X), "verify got an int", "expected a function"),
    "verify for no machine": Mistake(
        lambda: sdy.verify(partitioned(), X, PARAMS, targets=["abacus"]), "'abacus'", "expected some of cpu, gpu, tpu"
    ),
    "verify along no axis": Mistake(
        lambda: sdy.verify(partitioned(), X, PARAMS, meshes=[{"rows": 3}]), "'rows'", "mesh has data, model"
    ),
    "verify on a second mesh": Mistake(
        lambda: sdy.verify(partitioned(), X, PARAMS, mesh=MESH), "with its own mesh", "leave out mesh="
    ),
    "an option of verify": Mistake(
        lambda: sdy.verify(mlp, X, PARAMS, mesh=MESH, options={"layout": "local"}), "'layout'", "did you mean layouts=?"
    ),
    "a module that is not there": Mistake(
        lambda: sdy.install("trainerr").uninstall(), "no module 'trainerr'", "imported as that later", PartitionWarning
    ),
    "a number in place of jit": Mistake(lambda: sdy.install(3), "install got 3", "install('trainer')"),
    "an option in place of jit": Mistake(lambda: sdy.install(layout="local"), "'layout'", "did you mean layouts=?"),
    "a pass": Mistake(lambda: sdy.passes.run(EMPTY, "propagate"), "'propagate'", "did you mean sdy-"),
    "an option of a pass": Mistake(
        lambda: sdy.passes.run(EMPTY, "propagation-pipeline{foo=1}"), "column 1", "its options are"
    ),
    "a module for passes": Mistake(lambda: sdy.passes.run("func.func @main( {", ""), "<text>:1:17", "expected"),
    "a misspelt name": Mistake(lambda: sdy.partion, "'partion'", "Did you mean: 'partition'?", AttributeError),
}
