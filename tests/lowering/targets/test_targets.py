"""Targets: a made-up accelerator as one family, plans for machines that are not at hand, and what families say."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy
from sdy_jax.calls.options import Options
from sdy_jax.lowering.ops.collectives.movement import not_before
from sdy_jax.lowering.targets.family import (
    GIB,
    Arrays,
    Chip,
    Collectives,
    Compiler,
    Family,
    Fusion,
    Links,
    Machine,
    Network,
    Order,
)
from sdy_jax.lowering.targets.rates import Copies, Tiles
from sdy_jax.lowering.targets.target import (
    CPU,
    FAMILIES,
    Target,
    device_memory,
    family_of_platform,
    forms_for,
    machine_name,
    register,
)
from sdy_jax.lowering.targets.torus import Torus
from sdy_jax.lowering.targets.tpu import TPU
from sdy_jax.runtime.meshes import Forms

KIB = 1024

ABACUS = Family(
    "abacus",
    {
        "abacus 3": Machine(
            r"abacus (mk )?3( .*)?",
            Chip(flops=1e14, memory=1e12, capacity=2 * GIB, launch=1e-6, product_launch=2e-6, allocated=0.5),
            Links(1e11, latency=1e-6, start=1e-9, network=Network(1e9, 1e-5), torus=Torus(1), joins_hosts=True),
        )
    },
    Compiler(
        Fusion(into_products=True),
        Order(runs_late=True),
        Collectives(
            starts=frozenset({"all_gather"}),
            combines=frozenset({"all_gather"}),
            buckets=frozenset({"all_gather"}),
            merges=True,
        ),
    ),
    Arrays(Tiles(rows=2, lanes=32), rounded=1, copies=lambda memory, launch: Copies(3 * memory)),
    Forms(at_once=True),
)
"""An accelerator that nobody has built: the whole of what a new one takes."""


@pytest.fixture
def abacus(monkeypatch):
    """It is registered meanwhile."""
    monkeypatch.setattr("sdy_jax.lowering.targets.target.FAMILIES", FAMILIES.copy())
    return register(ABACUS)


def mesh_of(kind, platform):
    """What a target reads of a mesh of two devices, in two processes."""
    unknown = {"memory_stats": lambda: None}
    devices = [SimpleNamespace(device_kind=kind, platform=platform, process_index=n, **unknown) for n in range(2)]
    return SimpleNamespace(devices=np.array(devices), axis_names=("x",))


def test_a_new_accelerator_is_one_family(abacus):
    mesh = mesh_of("Abacus Mk 3", "abacus")
    assert Options().target(mesh) == Target(abacus, memory=GIB)
    assert forms_for(mesh) == Forms(at_once=True)
    assert machine_name("abacus 3") == "abacus 3" and device_memory("Abacus 3 6GB") == 3 * GIB
    costs = sdy.CostModel.of_mesh(mesh)
    assert costs == sdy.CostModel.of_machine("abacus 3", ("x",))
    assert costs.torus == ("x",) and costs.rounds == 1 / 4 and costs.combines == ("all_gather",)
    assert costs.copies == Copies(3e-12) and costs.unit == "seconds"
    assert sdy.CostModel.of_platform("abacus").rounds == 1 / 4
    assert Options().policy(mesh).combine.kinds == {"all_gather"}


def test_a_form_is_taken_by_all_whose_compiler_takes_it_best(monkeypatch):
    """The families are asked when a program is traced; which of them it is for, when it is lowered."""
    x = jnp.ones(4)
    (known,) = branches_of(lambda y: not_before(y, y, otherwise=jnp.add), x)
    monkeypatch.setattr("sdy_jax.lowering.targets.target.FAMILIES", FAMILIES.copy())
    register(Family("slate", forms=Forms(barriers_last=True)))
    (now,) = branches_of(lambda y: not_before(y, y, otherwise=jnp.add), x)
    assert known == (("tpu",), None) and now == (("tpu", "slate"), None)


def branches_of(f, x):
    equations = jax.make_jaxpr(f)(x).eqns
    return [each.params["branches_platforms"] for each in equations if "branches_platforms" in each.params]


def test_one_that_is_described_is_known_by_its_kind(abacus):
    mesh = AbstractMesh((2,), ("x",), abstract_device=AbstractDevice("Abacus 3", 1, "abacus"))
    assert Options().target(mesh) == Target(abacus, memory=GIB)
    assert sdy.CostModel.of_mesh(mesh) == sdy.CostModel.of_machine("abacus 3", ("x",))


def test_without_it_nothing_is_known_of_it():
    assert Options().target(mesh_of("Abacus Mk 3", "abacus")) == Target()
    with pytest.raises(sdy.SdyError, match="no machine is called 'abacus 3'"):
        sdy.CostModel.of_machine("abacus 3", ["x"])


def test_a_name_is_registered_once(abacus):
    with pytest.raises(sdy.SdyError, match="the platform 'abacus' is registered already"):
        register(abacus)
    with pytest.raises(sdy.SdyError, match="the machine 'abacus 3' of 'other' is registered already"):
        register(Family("other", abacus.machines))


def layers(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def drawn():
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((48, 48)) / 7).astype(np.float32) for _ in range(3)], rng.standard_normal(
        (64, 48)
    ).astype(np.float32)


def test_programs_are_planned_for_it_on_cpu_devices(abacus):
    weights, x = drawn()
    costs = sdy.CostModel.of_machine("abacus 3", LINE.axis_names)
    run = sdy.partition(
        layers, mesh=LINE, in_shardings=(P("x"), P("x")), out_shardings=P("x"), costs=costs, combine="1MiB"
    )
    np.testing.assert_allclose(run(weights, x), layers(weights, x), rtol=2e-4, atol=2e-4)
    plan = run.plan(weights, x)
    assert plan.target == Target(abacus, memory=GIB)
    assert plan.memory.available == GIB
    # rows of 48 elements take two tiles of 32 lanes
    assert plan.memory.arguments == 4 * 64 * (3 * 48 / 8 + 64 / 8) and plan.memory.results == 4 * 64 * 64 / 8
    (bucket,) = [record for record in plan.collectives if record.members]
    assert bucket.kind == "all_gather" and len(bucket.members) == 3 and "sdy_jax.packed" not in plan.mlir()


TPUS = AbstractMesh((8,), ("x",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
GPUS = AbstractMesh((8,), ("x",), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", 1, "gpu"))


@pytest.mark.parametrize(("machine", "devices"), [("tpu v5e", TPUS), ("h100", GPUS)])
def test_costs_of_a_machine_plan_for_it_on_virtual_devices(machine, devices):
    """By its memory, order and fusion, too, as on the machine itself."""

    def step(weights, x):
        return jax.grad(lambda weights: jnp.sum(layers(weights, x) ** 2))(weights)

    weights, x = drawn()
    costs, split = sdy.CostModel.of_machine(machine, ["x"]), {"in_shardings": P("x"), "out_shardings": P("x")}
    here = sdy.partition(step, mesh=LINE, costs=costs, **split)
    plan, there = here.plan(weights, x), sdy.partition(step, mesh=devices, **split).plan(weights, x)
    assert plan.target == there.target and plan.target != Options().target(LINE)
    assert plan.mlir() == there.mlir() and plan.memory == there.memory and plan.time == there.time
    wanted = jax.jit(step)(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), here(weights, x), wanted)


def test_the_memory_of_devices_that_are_there_counts():
    costs = sdy.CostModel.of_machine("tpu v5p", ["x"])
    assert Options(costs=costs).target(TPUS) == Target(TPU, memory=15.75 * GIB)
    assert Options(costs=costs).target(LINE) == Target(TPU, memory=95.73 * GIB)


def test_costs_that_are_of_no_machine_leave_the_target_to_the_mesh():
    for costs in (sdy.CostModel(), sdy.CostModel.of_platform("tpu"), sdy.CostModel(bandwidth={"x": 1e9})):
        assert Options(costs=costs).target(PLANE) == Target(CPU)


def test_forms_are_those_of_the_devices_on_which_a_program_runs():
    assert forms_for(LINE) == CPU.forms
    assert forms_for(mesh_of("TPU v5 lite", "tpu")) == TPU.forms
    assert forms_for(TPUS) == Forms()


def test_bytes_of_arrays_by_their_role():
    dense, tiled = Arrays(), TPU.arrays
    assert [dense.bytes((20, 64), 4, is_rounded=rounded) for rounded in (False, True)] == [5 * KIB] * 2
    assert [tiled.bytes((20, 64), 4, is_rounded=rounded) for rounded in (False, True)] == [12 * KIB, 6 * KIB]
    assert Tiles(rows=2, lanes=32).elements((3, 33)) == 4 * 64


def test_a_platform_without_a_family_is_unknown():
    assert family_of_platform("abacus").name == "unknown"
