"""No module makes `sdy-jax opt` print a traceback, or die: what is wrong is said at its place."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mutated_modules import MODULES
from places import HELPERS, ROOT

from sdy_jax.cli.opt import optimize
from sdy_jax.ir.text.modules import SourceError

_PROGRAM = HELPERS / "mutated_modules.py"


def run(first: int, count: int) -> None:
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), str(first), str(count)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, (HELPERS, ROOT)))},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"seed {lines[-1] if lines else 'none'}: {done.stderr[-2000:]}"
    wrong = [line for line in lines if line.startswith("seed")]
    assert not wrong, wrong
    assert len(lines) == count


def fuzz(seed: int) -> dict[str, int]:
    run(500 * seed, 500)
    return {"text": 500}


@pytest.mark.more("random mistakes")
def test_modules_with_mistakes_give_errors():
    run(0, 300)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 1000))
def test_thousands_of_modules_with_mistakes_give_errors(first):
    run(first, 1000)


@pytest.mark.parametrize("module", MODULES)
def test_without_mistakes_they_are_right(module):
    optimize(module, "", "m.mlir")


MANUAL = """sdy.mesh @mesh = <["a"=2, "b"=2]>
func.func @main(%x: tensor<6xf32>) -> tensor<6xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[IN] out_shardings=[OUT] manual_axes={"a"}
      (%y: tensor<6xf32>) {
    EDGE
    sdy.return %e : tensor<6xf32>
  } : (tensor<6xf32>) -> tensor<6xf32>
  %1 = sdy.sharding_constraint %x <@mesh, [{"a", ?}]> : tensor<6xf32>
  %2 = stablehlo.add %0, %1 : tensor<6xf32>
  return %2 : tensor<6xf32>
}"""


def test_what_passes_cannot_do_right_is_said_of_the_given_module():
    """Modules that jaxlib's verifier takes, and whose propagation makes them wrong, in jaxlib as well."""
    negated = MANUAL.replace("EDGE", "%e = stablehlo.negate %y : tensor<6xf32>")
    unnamed = negated.replace("IN", '<@mesh, [{?}], replicated={"a"}>').replace("OUT", "<@mesh, [{?}]>")
    with pytest.raises(SourceError, match=r"m.mlir:3:8: error: \[O2i\] .* does not name the manual axis \"a\""):
        optimize(unnamed, "apply-sharding-constraints,basic-propagate", "m.mlir")
    named = MANUAL.replace("OUT", '<@mesh, [{?}], replicated={"a"}>')
    edge = named.replace("EDGE", '%e = sdy.data_flow_edge %y sharding=<@mesh, [{"b"}]> : tensor<6xf32>')
    with pytest.raises(SourceError, match=r"m.mlir:5:\d+: error: sdy.data_flow_edge has <.*>, where sdy.manual_comp"):
        optimize(edge.replace("IN", '<@mesh, [{}], replicated={"a", "b"}>'), "sink-data-flow-edges", "m.mlir")
