"""Propagation gives the shardings that jaxlib's own passes give: fixed programs, and random ones."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest
from jax.extend.mlir import ir
from random_programs import RandomProgram
from sharding_dump import dump, parse, run_oracle

from sdy_jax.graph import Graph
from sdy_jax.passes.registry import run
from sdy_jax.propagation import Step, propagate

_FILE = Path(__file__).parent / "propagation_programs.txt"
_BEFORE = (
    "sdy-lift-inlined-meshes,sdy-remove-size-one-axes,sdy-constant-or-scalar-splitter,sdy-manual-axes-cleanup,"
    "sdy-add-data-flow-edges,sdy-apply-sharding-constraints,sdy-sharding-group-import"
)
_AFTER = (
    "func.func(sdy-constant-or-scalar-merger),func.func(sdy-sink-data-flow-edges),sdy-remove-sharding-groups,"
    "func.func(sdy-sharding-constraint-to-reshard),sdy-update-non-divisible-input-output-shardings,"
    "sdy-remove-sub-axes-in-input-output-shardings,sdy-close-shardings"
)
PIPELINE = f"{_BEFORE},sdy-user-priority-propagate,{_AFTER}"
STRUCTURE = ("while", "barrier", "group", "manual")
CASES = [
    ("sdy-basic-propagate", ()),
    ("sdy-aggressive-propagate", ()),
    ("sdy-basic-propagate{conservative-propagation=true}", ()),
    ("sdy-aggressive-propagate{conservative-propagation=true}", ()),
    ("sdy-aggressive-propagate{propagation-strategy=basic-then-aggressive}", ()),
    ("sdy-op-priority-propagate", ()),
    ("sdy-user-priority-propagate", ("priority",)),
    ("sdy-add-data-flow-edges,sdy-aggressive-propagate", ("while", "barrier")),
    ("sdy-manual-axes-cleanup,sdy-add-data-flow-edges,sdy-op-priority-propagate", ("while", "barrier", "manual")),
    ("sdy-sharding-group-import,sdy-op-priority-propagate", ("group",)),
    (PIPELINE, ("constant",)),
    (PIPELINE, (*STRUCTURE, "constant", "priority")),
]


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
        run(
            module.operation,
            re.sub(r"(user-priority-propagate|add-data-flow-edges)(?!\{)", r"\1{compat=shardy}", passes),
        )
        module.operation.verify()
    return dump(module)


def _theirs(text: str, passes: str) -> str:
    module = parse(text)
    run_oracle(module, passes)
    return dump(module)


@pytest.mark.parametrize(("title", "passes", "program", "expected"), _programs(), ids=lambda v: str(v).split(".")[0])
def test_a_program_of_the_specification_gets_its_shardings(
    title: str, passes: str, program: str, expected: str
) -> None:
    options = "{compat=shardy}" if passes == "sdy-propagation-pipeline" else ""
    assert _normal(_ours(program, passes + options)) == expected, title


# Since jax 0.11 the oracle's rule of reshapes that regroup dimensions differs from the one that we follow.
_RESHAPES = ("aligned",) if jax.__version_info__ >= (0, 11) else ()


def _check(seed: int) -> None:
    passes, features = CASES[seed % len(CASES)]
    text = RandomProgram(seed, features + _RESHAPES).text
    assert _ours(text, passes) == _theirs(text, passes), f"seed {seed}, passes {passes}\n{text}"


@pytest.mark.parametrize("first", range(0, 120, len(CASES)))
def test_random_programs_get_the_shardings_of_the_oracle(first: int) -> None:
    for seed in range(first, first + len(CASES)):
        _check(seed)


@pytest.mark.slow
def test_many_random_programs_get_the_shardings_of_the_oracle() -> None:
    for seed in range(1000, 4000):
        _check(seed)


class _Steps(list[Step]):
    step = list.append


def test_a_recorder_learns_which_axis_came_from_where() -> None:
    module = parse("""
      func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {?}]>}) -> tensor<8x8xf32> {
        %0 = stablehlo.tanh %x : tensor<8x8xf32>
        return %0 : tensor<8x8xf32>
      }""")
    steps = _Steps()
    with module.context, ir.Location.unknown(module.context):
        graph = Graph(module.operation)
        propagate(graph, recorder=steps)
    first = steps[0]
    assert first.op.name == "stablehlo.tanh"
    assert [(str(s.axes[0]), s.source, s.target) for s in first.spreads] == [
        ('"a"', graph.arguments[0], graph.outputs[0])
    ]
    assert str(graph.outputs[0].sharding) == '@mesh, [{"a", ?}, {?}]'
