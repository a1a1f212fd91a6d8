"""Propagation gives the shardings that the specification says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jax.extend.mlir import ir
from sharding_dump import dump, parse

from sdy_jax.ir.graph import Graph
from sdy_jax.shardy.passes.pipelines import run_pipeline
from sdy_jax.shardy.propagation import propagate
from sdy_jax.shardy.propagation.engine import Engine, Event
from sdy_jax.shardy.propagation.explanations import History

_FILE = Path(__file__).parent / "propagation_programs.txt"


def _programs() -> list[tuple[str, str, str, str]]:
    found = []
    for block in _FILE.read_text().split("\n## ")[1:]:
        head, body = block.split("\n", 1)
        title, passes = head.split(" | ")
        program, expected = body.split("\n=>\n")
        found.append((title, passes, program, _normal(re.sub(r"   rule <.*", "", expected))))
    return found


def _normal(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def _ours(text: str, passes: str) -> str:
    module = parse(text)
    with module.context, ir.Location.unknown(module.context):
        run_pipeline(
            module.operation,
            re.sub(r"(user-priority-propagate)(?!\{)", r"\1{compat=shardy}", passes),
        )
        module.operation.verify()
    return dump(module)


@pytest.mark.parametrize(("title", "passes", "program", "expected"), _programs(), ids=lambda v: str(v).split(".")[0])
def test_a_program_of_the_specification_gets_its_shardings(
    title: str, passes: str, program: str, expected: str
) -> None:
    options = "{compat=shardy}" if passes == "sdy-propagation-pipeline" else ""
    assert _normal(_ours(program, passes + options)) == expected, title


def test_a_recorder_learns_which_axis_came_from_where() -> None:
    module = parse("""
      func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {?}]>}) -> tensor<8x8xf32> {
        %0 = stablehlo.tanh %x : tensor<8x8xf32>
        return %0 : tensor<8x8xf32>
      }""")
    events: list[Event] = []
    with module.context, ir.Location.unknown(module.context):
        graph = Graph(module.operation)
        engine = propagate(Engine(graph, recorder=events))
    first = History(engine, events).steps[0]
    assert first.op.name == "stablehlo.tanh" and first.level == 0
    assert [engine.value_ids.values[p] for p in first.tensors] == [graph.arguments[0], graph.outputs[0]]
    assert [(str(s.axes[0]), s.source, s.target, s.dim) for s in first.spreads] == [('"a"', 0, 1, 0)]
    assert str(graph.outputs[0].sharding) == '@mesh, [{"a", ?}, {?}]'
