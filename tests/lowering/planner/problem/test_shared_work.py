"""Calls that state their work: each device performs its share of it, none is repeated that can be shared out."""

from __future__ import annotations

import pytest
from partitioned_text import partition_report
from sharding_dump import parse

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.parsers import parse_sharding
from sdy_jax.lowering.planner.problem.op_problem import Kinds, work_done
from sdy_jax.lowering.planner.setting import Policy
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import Target, family_of_platform
from sdy_jax.shardy.rules import RuleBook
from sdy_jax.shardy.rules.op_attributes import operations_of

COSTS = CostModel.of_machine("tpu v5e", ["x"])
RULE = "#sdy.op_sharding_rule<([i, j])->([i, j]) {i=64, j=1024} need_replication={j}, custom>"
WORK = '{basis = "", bytes = 8000000, efficiency = 5.0e-1 : f64, flops = 6400000000}'


def module_of(target: str, rule: str = RULE, layout: str = '[{"x"}, {}]', work: str = WORK):
    tensor, stated = "tensor<64x1024xf32>", f"sdy.sharding_rule = {rule}, " if rule else ""
    return parse(f"""
    sdy.mesh @mesh = <["x"=8]>
    func.func @main(%x: {tensor} {{sdy.sharding = #sdy.sharding<@mesh, {layout}>}}) -> {tensor} {{
      %a = stablehlo.custom_call @{target}(%x) {{{stated}sdy_jax.work = {work}}} : ({tensor}) -> {tensor}
      return %a : {tensor}
    }}""")


def reported(module, layouts="local"):
    return partition_report(module, Policy(layouts=layouts), COSTS, Target(family_of_platform("tpu")))


@pytest.mark.parametrize("target", ["kernel", "lapack_sgetrf_ffi"])
def test_a_device_performs_its_share_at_the_stated_efficiency(target: str) -> None:
    op = Graph(module_of(target).operation).main.blocks[0].ops[0]
    kind = Kinds(RuleBook()).of(op)
    assert kind is not None and kind.multiplies
    shardings = (parse_sharding('<@mesh, [{"x"}, {}]>'),) * 2
    for mesh, shards in ((Mesh.of(x=8), 8), (Mesh.of(x=1), 1), (Mesh.of(x=48), 32)):
        assert work_done(kind, shardings, mesh)[:2] == pytest.approx((6.4e9 / 2 / 0.5 / shards, 8e6 / shards))
    assert operations_of(op) == 6.4e9  # as people count


@pytest.mark.parametrize("layouts", ["local", "global"])
def test_the_time_of_a_kernel_is_that_of_its_share(layouts: str) -> None:
    found = reported(module_of("kernel"), layouts)
    assert not found.collectives and not found.notes
    assert found.work == pytest.approx(COSTS.work_time(6.4e9 / 8, 1e6) + COSTS.product_launch)


@pytest.mark.parametrize("layouts", ["local", "global"])
def test_what_a_kernel_reads_is_what_it_says_and_not_its_operands(layouts: str) -> None:
    """Some several times over, and little of others: a pool of pages."""
    for moved in (8e4, 8e9):
        stated = f'{{basis = "", bytes = {moved:.0f}, efficiency = 1.0 : f64, flops = 80}}'
        found = reported(module_of("kernel", work=stated), layouts)
        assert found.work == pytest.approx(COSTS.work_time(5, moved / 8) + COSTS.product_launch)


@pytest.mark.parametrize("layouts", ["local", "global"])
def test_the_work_of_a_kernel_is_not_repeated(layouts: str) -> None:
    """Its operand is split along the dimension that it needs whole; rather than gather it, the other one is split."""
    found = reported(module_of("kernel", layout='[{}, {"x"}]'), layouts)
    assert {record.kind for record in found.collectives} == {"all_to_all"}
    assert found.work < COSTS.work_time(6.4e9 / 4, 2e6)


def test_a_kernel_without_a_rule_is_whole_and_still_has_its_price() -> None:
    found = reported(module_of("kernel", rule=""))
    (note,) = found.notes
    assert "kernel: cannot be split along dim 0" in str(note)
    assert found.work == pytest.approx(COSTS.work_time(6.4e9, 8e6) + COSTS.product_launch)
