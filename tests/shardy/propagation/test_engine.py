"""The fixed point visits only what may have changed, and ends where it would end if it visited everything."""

from __future__ import annotations

from typing import Any

import pytest
from jax.extend.mlir import ir
from random_programs import RandomProgram
from sharding_dump import parse

from sdy_jax.ir.graph import Graph
from sdy_jax.shardy.passes.pipelines import run_pipeline
from sdy_jax.shardy.propagation import engine as engine_module
from sdy_jax.shardy.propagation.engine import Engine, run_by_user_priority

_FEATURES = ("while", "barrier", "group", "manual", "constant", "priority")
_PREPARE = "sdy-manual-axes-cleanup,sdy-constant-or-scalar-splitter,sdy-add-data-flow-edges,sdy-sharding-group-import"


class _Patient(Engine):
    """Visits everything at every level."""

    def _fixed_point(self, level: int, strategy: Any) -> None:
        self._settled = [None] * len(self._all)
        self._reached = bytearray(b"\x01") * len(self._all)
        super()._fixed_point(level, strategy)


def _prepared(seed: int) -> ir.Module:
    module = parse(RandomProgram(seed, _FEATURES, ops=25).text)
    with module.context, ir.Location.unknown(module.context):
        run_pipeline(module.operation, _PREPARE)
    return module


def _outcome(kind: type[Engine], module: ir.Module, strategy: str) -> tuple[list[Any], list[Any], list[str]]:
    """The shardings of all places, what was recorded (without the ops), and the dead ops."""
    graph, events = Graph(module.operation), []
    engine = kind(graph, strategy=strategy, recorder=events)
    run_by_user_priority(engine)
    shardings = [engine.sharding(value_id) for value_id in range(len(engine.value_ids.values))]
    return shardings, [event[1:] for event in events], [str(op.mlir.name) for op in engine.liveness.dead]


@pytest.mark.parametrize("strategy", ["aggressive", "basic-then-aggressive"])
def test_leaving_out_settled_ops_changes_neither_shardings_nor_their_order(strategy: str) -> None:
    for seed in range(40):
        module = _prepared(seed)
        assert _outcome(Engine, module, strategy) == _outcome(_Patient, module, strategy), f"seed {seed}"


def _chain(length: int) -> ir.Module:
    ops = "\n".join(f"%{i + 1} = stablehlo.tanh %{i} : tensor<8xf32>" for i in range(length))
    return parse(f"""
      func.func @main(%x: tensor<8xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{"a"}}]>}}) -> tensor<8xf32> {{
        %0 = stablehlo.negate %x : tensor<8xf32>
        {ops}
        return %{length} : tensor<8xf32>
      }}""")


def _visits(module: ir.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    count = 0
    propagate = engine_module.Engine._propagate

    def counted(self: Engine, *args: Any) -> Any:
        nonlocal count
        count += 1
        return propagate(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(engine_module.Engine, "_propagate", counted)
        engine = Engine(Graph(module.operation))
        engine.run()
        engine.run()
    return count


def test_each_op_of_a_chain_is_visited_a_few_times_in_all_levels_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (_visits(_chain(length), monkeypatch) for length in (50, 200))
    assert many <= 3 * 200 + 10
    assert many - few <= 3 * 150


def test_a_module_without_shardings_is_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    module = parse("""
      func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
        %0 = stablehlo.tanh %x : tensor<8xf32>
        return %0 : tensor<8xf32>
      }""")
    assert _visits(module, monkeypatch) == 0


def test_a_dead_chain_dies_in_one_sweep_from_its_end() -> None:
    module = parse("""
      func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
        %0 = stablehlo.tanh %x : tensor<8xf32>
        %1 = stablehlo.negate %0 : tensor<8xf32>
        %2 = stablehlo.add %1, %1 : tensor<8xf32>
        return %x : tensor<8xf32>
      }""")
    engine = Engine(Graph(module.operation), op_priorities=False)
    engine.run()
    assert [op.name for op in engine.liveness.dead] == ["stablehlo.add", "stablehlo.negate", "stablehlo.tanh"]


def test_propagating_again_changes_nothing() -> None:
    for seed in range(10):
        module = _prepared(seed)
        events: list[Any] = []
        engine = Engine(Graph(module.operation), recorder=events)
        engine.run()
        engine.run()
        steps = len(events)
        engine.run()
        assert len(events) == steps, f"seed {seed}"
