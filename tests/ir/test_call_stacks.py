"""Locations as whole calls, and functions that run as if called from there."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir

from sdy_jax.ir.locations import CallFrame, call_stack, called_through, callers, inside_of
from sdy_jax.ir.operations import locate_bodies, named
from sdy_jax.ir.text.modules import new_context

PRODUCT = CallFrame("model.py", "Dense.__call__", 7, 15, 9, 4)
STEP = CallFrame("train.py", "step.<locals>.<lambda>", 20, 4, 20, 30)


@pytest.fixture
def context():
    with new_context() as found:
        yield found


def stack(text):
    (op,) = ir.Module.parse(f"module {{ func.func private @f() {text} }}").body.operations
    return call_stack(op.location)


def test_scopes_primitive_and_frames(context):
    found = stack(
        'loc("jit(step)/transpose(jvp(mlp))/dot_general"(callsite("Dense.__call__"("model.py":7:15 to 9:4)'
        ' at "step.<locals>.<lambda>"("train.py":20:4 to :30))))'
    )
    assert found.scopes == ("transpose(jvp(mlp))",) and found.primitive == "dot_general"
    assert found.frames == (PRODUCT, STEP)


def test_a_callee_is_inside_of_its_call(context):
    found = stack('loc(callsite("mul"("norm"("a.py":1:2)) at "jit(f)/layer/jit(norm)"("f"("b.py":3:4))))')
    assert (found.scopes, found.primitive) == (("layer", "jit(norm)"), "mul")
    assert [(frame.file, frame.line) for frame in found.frames] == [("a.py", 1), ("b.py", 3)]


def test_locations_of_one_frame_and_of_none(context):
    assert stack('loc("jit(f)/gt"("a.py":8:25))') == ((), "gt", (CallFrame("a.py", "", 8, 25, 8, 25),))
    assert stack('loc("dot:"("jit(f)/dot"("g"("a.py":8:25))))').primitive == "dot"
    assert stack("loc(unknown)") == ((), "", ())
    assert stack('loc("mine/product")').scopes == ("mine", "product")


def test_names_with_escapes(context):
    assert stack(r'loc("jit(f)/w[\22a\22]/mul")').scopes == ('w["a"]',)
    assert stack(r'loc("jit(f)/\C3\A9tage/mul")').scopes == ("étage",)
    assert stack(r'loc("c:\\AB\\f.py":1:2)').frames[0].file == r"c:\AB\f.py"


def test_functions_are_called_as_if_from_frames():
    def here():
        frame, found = sys._getframe().f_back, []
        while frame.f_code.co_filename in ("model.py", "train.py"):
            found.append((frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno))
            frame = frame.f_back
        return found

    assert called_through((PRODUCT, STEP), here) == [frame[:3] for frame in (PRODUCT, STEP)]
    assert called_through((), here) == []


def test_jax_says_the_lines_of_frames():
    lowered = jax.jit(lambda x: called_through((PRODUCT, STEP), lambda: x + 1)).lower(jnp.ones(3))
    assert (
        'callsite("Dense.__call__"("model.py":7:15 to 9:4) at callsite("step.<locals>.<lambda>"("train.py":20:4 to :30)'
        in _written(lowered)
    )


def _written(lowered):
    (add,) = named(lowered.compiler_ir("stablehlo").operation, "stablehlo.add")
    return str(add.location)


def test_frames_around_the_caller_are_left_out():
    frames = (PRODUCT, STEP, *(CallFrame(file, function, 1) for file, function in callers()))
    assert inside_of(frames, callers()) == (PRODUCT, STEP)
    assert inside_of(frames[:5], callers()) == (PRODUCT, STEP)  # jax gives the innermost ones of many
    assert inside_of((PRODUCT, STEP), callers()) == (PRODUCT, STEP)


def test_bodies_of_manual_computations_have_the_scope_around(context):
    module = ir.Module.parse(
        """
        sdy.mesh @mesh = <["x"=2]>
        func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
          %0 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
              manual_axes={"x"} (%b: tensor<2xf32>) {
            %1 = stablehlo.negate %b : tensor<2xf32> loc("mine/neg"("g"("a.py":1:2)))
            sdy.return %1 : tensor<2xf32>
          } : (tensor<4xf32>) -> tensor<4xf32> loc("jit(f)/around/shard_map"("f"("b.py":3:4)))
          return %0 : tensor<4xf32>
        }"""
    )
    locate_bodies(module.operation)
    (negate,) = named(module.operation, "stablehlo.negate")
    assert call_stack(negate.location).scopes == ("around", "shard_map", "mine")
