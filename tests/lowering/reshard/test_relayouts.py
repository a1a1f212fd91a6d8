"""Dimensions that change their axes where blocks neither join to blocks nor are cut into them: strips are sent."""

import itertools
import random

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE, setting
from partitioning_oracle import ours
from relayout_programs import RELAYOUTS, TWO, XY, relaid
from reshard_cases import random_sharding
from reshard_simulator import Simulator
from stages import assert_stages_run
from uneven_blocks import PARTITIONED, assert_close, split

import sdy_jax as sdy
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard.planner import ReshardPlanner, plan_reshard
from sdy_jax.lowering.reshard.relayouts import Relaid, is_relaid, relayout, sent
from sdy_jax.plan.profile import collectives_in_hlo, totals

pytestmark = pytest.mark.usefixtures("poisoned_padding")

MESH = Mesh.of(x=2, y=4)


def held(size, shards, index):
    block = -(-size // shards)
    return set(range(min(index * block, size), min((index + 1) * block, size)))


@pytest.mark.parametrize("size", [1, 3, 5, 7, 13, 65, 100])
def test_nothing_is_sent_that_a_device_holds_and_nobody_gets_more_than_it_lacks(size):
    """In one stage: where devices pass parts on, they get these as well."""
    for sizes, have, want in itertools.product([(2, 4), (4, 2)], ORDERS, ORDERS):
        found = relayout(size, sizes, have, want)
        if len(found.stages) > 1:
            continue
        (plan,), received = found.stages, {}
        for strips in plan.rounds:
            for sender, receiver in strips.pairs:
                assert sender != receiver
                received[receiver] = received.get(receiver, 0) + strips.lengths[receiver]
        for number, place in enumerate(itertools.product(*(range(sizes[atom]) for atom in found.group))):
            had, wanted = (block_at(size, sizes, atoms, found.group, place) for atoms in (have, want))
            assert received.get(number, 0) == len(wanted - had)


ORDERS = [(0,), (1,), (0, 1), (1, 0)]


def block_at(size, sizes, atoms, group, place):
    index = 0
    for atom in atoms:
        index = index * sizes[atom] + place[group.index(atom)]
    return held(size, int(np.prod([sizes[atom] for atom in atoms])), index)


def test_one_block_that_several_want_is_parted_among_them():
    found = relayout(65, (2, 4), (0, 1), (0,))
    assert [stage.wire_elements for stage in found.stages] == [3, 27]


@pytest.mark.dear
@pytest.mark.parametrize("size", [257, 1000, 12345])
@pytest.mark.parametrize("sizes", [(2, 16), (16, 4), (4, 32)])
def test_what_many_devices_send_is_estimated_from_the_pattern_of_blocks(sizes, size):
    for have, want in itertools.product(ORDERS, ORDERS):
        if is_relaid(size, sizes, have, want):
            planned, estimated = relayout(size, sizes, have, want), sent(Relaid(size, sizes, have, want))
            assert 0.5 <= estimated.elements / planned.wire_elements <= 2.0, (have, want)


def test_what_few_devices_send_is_what_is_planned():
    found = relayout(65, (2, 4), (0, 1), (0,))
    assert sent(Relaid(65, (2, 4), (0, 1), (0,))) == (found.wire_elements, found.rounds)


def test_large_groups_are_not_planned():
    mesh = Mesh.of(x=32, y=32)
    ends = (TensorSharding.closed("m", [[AxisRef(name)]]) for name in mesh.axis_names)
    assert all(step.kind != "reshard" for step in plan_reshard((1025,), 4, *ends, mesh).steps)


def halved(x):
    made = split(jnp.abs(x[:65]), XY, mesh=PLANE)
    return split(made * made.sum(0), "x", mesh=PLANE).max(1)


@pytest.fixture
def planned():
    """A partitioned function that relays rows out, and its argument."""
    with setting(PARTITIONED, True):
        x = jnp.asarray(RNG.normal(size=(72, WIDTH)), np.float32)
        yield sdy.partition(halved, mesh=PLANE, in_shardings=P(XY), costs=sdy.CostModel(bandwidth=1e9, flop=1e-10)), x


RNG = np.random.default_rng(1)


def test_stages_print_are_read_and_mean_the_same(planned):
    partitioned, x = planned
    text = partitioned.plan(x).mlir("partitioned")
    assert text.count("sdy.reshard") == 1 and "sdy.collective_permute" not in text, text
    assert_stages_run(partitioned, x)


def test_passes_turn_it_into_collectives(planned):
    partitioned, x = planned
    text = partitioned.plan(x).mlir("propagated")
    full = "sdy-insert-explicit-reshards{enable-full-version=true}"
    reshards, collectives = ours(text, full), ours(text, f"{full},sdy-reshard-to-collectives")
    assert "sdy.reshard" in reshards
    assert "sdy.reshard" not in collectives and "sdy.all_" in collectives
    for after in (reshards, collectives):
        assert_close(sdy.partition(sdy.loads(after))(x), [partitioned(x)])


@pytest.mark.parametrize("unreduced", [(0, 0), (0.3, 0.3)])
@pytest.mark.parametrize("sizes", [{"x": 2, "y": 4}, {"x": 2, "y": 3}, {"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 4}])
def test_random_reshards_of_uneven_dimensions_arrive(sizes, unreduced):
    rng, mesh = random.Random(f"{sizes}{unreduced}"), Mesh.of(**sizes)
    kinds = set()
    for _ in range(15):
        shape = tuple(rng.choice([5, 7, 13, 16, 33]) for _ in range(rng.choice([1, 2])))
        source, target = (random_sharding(mesh, len(shape), rng, chance) for chance in unreduced)
        plan = plan_reshard(shape, 4, source, target, mesh)
        kinds |= {step.kind for step in plan.steps}
        Simulator(shape, source, mesh).run(plan).assert_is(target)
        without = ReshardPlanner(mesh, strips=False).plan(shape, 4, source, target)
        assert target.unreduced_axes or plan.cost <= without.cost + 1e-9
    assert "reshard" in kinds


WIDTH = 5


def run(function, x, spec, mesh=PLANE):
    """The plan of a function of `x`, which comes longer, in even blocks; its bytes are those of the program."""
    size = len(x)
    long = jnp.concatenate([x, jnp.zeros((-size % 8, *x.shape[1:]), x.dtype)])
    partitioned = sdy.partition(lambda long: function(long[:size]), mesh=mesh, in_shardings=P(*spec), layouts="local")
    with setting(PARTITIONED, True):
        plan, found, compiled = partitioned.plan(long), partitioned(long), partitioned.lower(long).compile()
    assert_close(found, function(x))
    assert plan.wire_bytes == pytest.approx(totals(collectives_in_hlo(compiled.as_text())).wire_bytes), plan
    return plan


@pytest.mark.parametrize("name", TWO)
def test_axes_move_between_dimensions_in_strips(name):
    shape, source, target, elements = TWO[name]
    x = jnp.asarray(np.random.default_rng(1).integers(-9, 9, shape), np.int32)
    plan = run(relaid(source, target), x, source[:1])
    sent = [c.wire_bytes for c in plan.collectives if c.kind == "collective_permute"]
    assert sent[-1] == elements * 4, plan


@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, np.int32) for name in RELAYOUTS), ("8 blocks to 2", np.float32), ("two axes", np.int8)]
)
def test_only_what_is_wanted_is_sent(name, dtype):
    size, source, target, rows = RELAYOUTS[name]
    x = jnp.asarray(np.random.default_rng(size).integers(0, 2, (size, WIDTH)), dtype)
    plan = run(relaid(source, target), x, source)
    sent = [c.wire_bytes for c in plan.collectives if c.kind == "collective_permute"]
    assert sent[-1] == rows * WIDTH * x.dtype.itemsize, plan
