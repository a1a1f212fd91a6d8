"""The collectives of a reshard: each makes what it says, and they are those of jaxlib's pass."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from sdy_oracle import Oracle
from sharding_dump import parse

from sdy_jax.ir.collectives import sharding_after
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.operations import module_meshes, pre_order
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import sharding_of
from sdy_jax.shardy.passes.reshard_steps import reshard_steps

PASS = "func.func(sdy-reshard-to-collectives)"
SMALL = Mesh.of(a=2, b=2, c=4)
SIX = Mesh.of(a=2, b=2, c=2, d=2, e=2, f=2)
THREES = Mesh.of(a=2, b=3, c=4)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as running:
        yield running


def drawn(rng: random.Random, rank: int, mesh: Mesh) -> TensorSharding:
    free, dims = rng.sample(mesh.axis_names, len(mesh.axes)), []
    for _ in range(rank):
        axes: list[AxisRef] = []
        while free and rng.random() < 0.55:
            axes.append(AxisRef(free.pop()))
        dims.append(tuple(axes))
    return TensorSharding.closed("mesh", tuple(dims))


def with_parts(rng: random.Random, sharding: TensorSharding, mesh: Mesh) -> TensorSharding:
    """The same, of some axes only a part."""

    def part(axis: AxisRef) -> AxisRef:
        size = axis.size(mesh)
        if size in (2, 3) or rng.random() < 0.5:
            return axis
        return AxisRef.sub(axis.name, *rng.choice(((1, 2), (size // 2, 2))))

    return TensorSharding.closed("mesh", tuple(tuple(map(part, axes)) for axes in sharding.axes))


def pairs(seed: int, rank: int, mesh: Mesh, count: int, parts: bool = False) -> Iterator[tuple[TensorSharding, ...]]:
    rng = random.Random(f"{seed} {rank} {mesh}")
    for _ in range(count):
        found = [drawn(rng, rank, mesh) for _ in range(2)]
        yield tuple(with_parts(rng, sharding, mesh) if parts else sharding for sharding in found)


def shape_of(rank: int, mesh: Mesh) -> tuple[int, ...]:
    return (mesh.size,) * rank


@pytest.mark.parametrize("mesh", [SMALL, SIX, THREES], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_step_makes_the_sharding_that_it_states(rank: int, mesh: Mesh) -> None:
    found = 0
    for source, target in (*pairs(0, rank, mesh, 200), *pairs(1, rank, mesh, 200, parts=True)):
        steps, now = reshard_steps(shape_of(rank, mesh), source, target, mesh), source
        for collective, stated in steps or ():
            if collective.kind == "collective_permute":
                assert stated.shard_counts(mesh) == now.shard_counts(mesh)
            else:
                assert sharding_after(collective, now, mesh).axes == stated.axes, (source, target)
            now = stated
        assert steps is None or now.axes == target.axes
        found += steps is not None
    assert found > 0.8 * 400


def module_of(source: TensorSharding, target: TensorSharding, mesh: Mesh) -> str:
    type_ = f"tensor<{'x'.join([str(mesh.size)] * source.rank)}xf32>"
    return f"""sdy.mesh @mesh = {mesh}
    func.func @main(%x: {type_} {{sdy.sharding = #sdy.sharding<{source}>}}) -> {type_} {{
      %0 = sdy.reshard %x <{target}> : {type_}
      return %0 : {type_}
    }}"""


def agreeing(mesh: Mesh, rank: int, count: int, oracle: Oracle) -> tuple[int, int]:
    """How many reshards jaxlib does in the same steps, of how many that it does. With axes of size 3 it makes permutes
    between different numbers of shards.
    """
    same, all_ = 0, 0
    for source, target in pairs(2, rank, mesh, count):
        text = oracle.run(module_of(source, target, mesh), PASS)
        if text is None or source == target:
            continue
        module = parse(text)
        assert module_meshes(module.operation)["mesh"] == mesh
        theirs = [
            (op.name.removeprefix("sdy."), sharding_of(op.results[0]))
            for op in pre_order(module.operation)
            if re.match(r"sdy\.(all|coll)", op.name)
        ]
        steps = reshard_steps(shape_of(rank, mesh), source, target, mesh)
        all_ += 1
        same += theirs == [(collective.kind, stated) for collective, stated in steps or ()]
    return same, all_


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_steps_are_those_of_jaxlib(rank: int, oracle: Oracle) -> None:
    same, count = agreeing(SMALL, rank, 60, oracle)
    assert same == count > 30


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rate"), [(SMALL, 0.999), (SIX, 0.98)], ids=str)
def test_many_steps_are_those_of_jaxlib(mesh: Mesh, rate: float, oracle: Oracle) -> None:
    found = [agreeing(mesh, rank, 1000, oracle) for rank in (1, 2, 3)]
    assert sum(same for same, _ in found) >= rate * sum(count for _, count in found)


A, B, C = AxisRef("a"), AxisRef("b"), AxisRef("c")


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((6, 8), ((C,), ()), ((), (C,))),
        ((8, 8), ((A, AxisRef.sub("c", 1, 2)), ()), ((A,), (AxisRef.sub("c", 2, 2),))),
    ],
    ids=["a size that does not divide", "parts that nest"],
)
def test_blocks_that_do_not_divide_have_no_steps(
    shape: tuple[int, ...], source: tuple[tuple[AxisRef, ...], ...], target: tuple[tuple[AxisRef, ...], ...]
) -> None:
    ends = TensorSharding.closed("mesh", source), TensorSharding.closed("mesh", target)
    assert (reshard_steps(shape, *ends, SMALL) is None) == (shape == (6, 8))


def test_parts_of_an_axis_that_do_not_nest_have_no_steps() -> None:
    mesh = Mesh.of(a=12)
    source = TensorSharding.closed("mesh", ((AxisRef.sub("a", 1, 4),),))
    target = TensorSharding.closed("mesh", ((AxisRef.sub("a", 1, 6),),))
    assert reshard_steps((24,), source, target, mesh) is None


def test_what_is_unreduced_has_no_steps() -> None:
    source = TensorSharding.closed("mesh", ((), ()), (A,))
    assert reshard_steps((8, 8), source, TensorSharding.closed("mesh", ((B,), ())), SMALL) is None
