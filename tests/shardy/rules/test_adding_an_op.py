"""The steps of ARCHITECTURE.md for a new op, followed for ops that no dialect has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from partitioned_text import partition_module, run_partitioned
from places import ROOT

from sdy_jax.ir.graph import Op
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.registry import EMITTERS, LocalOp, emitter
from sdy_jax.shardy.rules.registry import NEED_REPLICATION, RULES, RuleBuilder, rule, shape_of

TEXT = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
func.func @main(%x: tensor<8x4xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{"b"}}, {{?}}]>}}) -> tensor<8x4xf32> {{
  %0 = "fictitious.{op}"(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}}"""


def parsed(op: str) -> ir.Module:
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    return ir.Module.parse(TEXT.format(op=op), context)


def split_of_result(module: ir.Module) -> str:
    return str(module.body.operations[1].attributes["res_attrs"])


X = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.fixture
def mirror() -> Iterator[None]:
    """The two modules that an op which moves data takes: here one that turns its rows around."""

    @rule("fictitious.mirror")
    def _rule(op: Op, conservative: bool) -> OpShardingRule:
        return RuleBuilder.of(op).pointwise(shape_of(op), (1,), NEED_REPLICATION).build()

    @emitter("fictitious.mirror")
    def _emit(local: LocalOp, x: jax.Array) -> jax.Array:
        return x[:, ::-1]

    yield
    for registry in (RULES, EMITTERS):
        del registry["fictitious.mirror"]


def test_an_op_that_moves_data(mirror: None) -> None:
    module = partition_module(parsed("mirror"))
    assert '{"b"}' in split_of_result(module)
    assert "sdy.all_gather" not in str(module)
    np.testing.assert_array_equal(run_partitioned(module, [X])[0], X[:, ::-1])


ONE_LINE = '    "fictitious.twice": Elementwise(lambda x: 2 * x, NUMBERS),\n'

CHILD = f"""
import sys
from importlib.machinery import PathFinder, SourceFileLoader

class Loader(SourceFileLoader):
    def get_code(self, name):
        head = "ELEMENTWISE: Mapping[str, Elementwise] = {{\\n"
        source = self.get_source(name)
        assert head in source
        return compile(source.replace(head, head + {ONE_LINE!r}), self.path, "exec")

class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name != "sdy_jax.shardy.rules.elementwise":
            return None
        spec = PathFinder.find_spec(name, path)
        spec.loader = Loader(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder)
sys.path[:0] = ["tests", "tests/shardy/rules"]
import conftest
from test_adding_an_op import X, parsed, partition_module, run_partitioned, split_of_result
module = partition_module(parsed("twice"))
assert '{{"b"}}' in split_of_result(module), module
assert "sdy.all_gather" not in str(module), module
assert (run_partitioned(module, [X])[0] == 2 * X).all()
print("right")
"""


@pytest.mark.more("an op that is not there, in a process of its own")
def test_an_element_wise_op_is_one_line_in_the_table() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr
