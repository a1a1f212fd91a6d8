"""What collectives of numbers have to do with one another, on random meshes, shapes and axes: equal, bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from sdy_jax.ir.device_orders import block_indices
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size, merge_neighbours, sort_and_merge
from sdy_jax.ir.shardings import REDUCTION_KINDS, TensorSharding
from sdy_jax.lowering.ops.collectives import movement, reductions
from sdy_jax.runtime.meshes import RefinedMesh

MESHES = {
    "p=2 q=4": (Mesh.of(p=2, q=4), ("p", "q:1:2", "q:2:2")),
    "p=2 q=2 r=2": (Mesh.of(p=2, q=2, r=2), ("p", "q", "r")),
    "p=3 q=2": (Mesh.of(p=3, q=2), ("p", "q")),
    "p=8": (Mesh.of(p=8), ("p:1:2", "p:2:2", "p:4:2")),
}


def part(text):
    name, *digits = text.split(":")
    return AxisRef.sub(name, *map(int, digits)) if digits else AxisRef(name)


@dataclass(frozen=True)
class Case:
    """A tensor on a mesh: `kept` and `given` axes split its dimensions, the kept ones major; `free` axes do not."""

    mesh: Mesh
    refined: RefinedMesh
    shape: tuple[int, ...]
    kept: tuple[tuple[AxisRef, ...], ...]
    given: tuple[tuple[AxisRef, ...], ...]
    free: tuple[AxisRef, ...]

    def sharding(self, *lists, unreduced=()):
        """Split along the first of the lists, then the second, in each dimension."""
        joined = [merge_neighbours(sum(axes, ()), self.mesh) for axes in zip(*lists, strict=True)]
        return TensorSharding.closed("mesh", joined, sort_and_merge(unreduced, self.mesh))

    def lists(self, lists):
        return tuple(merge_neighbours(axes, self.mesh) for axes in lists)

    def flat(self, lists):
        return sort_and_merge([axis for axes in lists for axis in axes], self.mesh)

    def blocks(self, array, target):
        """What each device holds, stacked."""
        index = [block_indices(axes, self.mesh) for axes in target.axes]
        local = target.local_shape(array.shape, self.mesh)
        cuts = (
            tuple(slice(i[device] * n, (i[device] + 1) * n) for i, n in zip(index, local, strict=True))
            for device in range(self.mesh.size)
        )
        return np.stack([array[cut] for cut in cuts])

    def run(self, function, *stacked):
        """`function` of each device's part of the stacked arrays."""
        mesh = self.refined.to_jax(np.array(jax.devices()[: self.mesh.size]).reshape([a.size for a in self.mesh.axes]))
        spec = jax.sharding.PartitionSpec(self.refined.axis_names)

        def local(*xs):
            return jax.tree.map(lambda y: y[None], function(*(x[0] for x in xs)))

        mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        arguments = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in stacked]
        return jax.tree.map(np.asarray, jax.jit(mapped)(*arguments))


def random_case(name, seed):
    rng = random.Random(f"{name} {seed}")
    mesh, texts = MESHES[name]
    parts = [part(text) for text in texts]
    rng.shuffle(parts)
    homes = [rng.choice(["free", *range(3), *range(3)]) for _ in parts]
    free = tuple(a for a, home in zip(parts, homes, strict=True) if home == "free")
    dims = [tuple(a for a, home in zip(parts, homes, strict=True) if home == d) for d in range(3)]
    cuts = [rng.randint(0, len(axes)) for axes in dims]
    kept = tuple(axes[:cut] for axes, cut in zip(dims, cuts, strict=True))
    given = tuple(axes[cut:] for axes, cut in zip(dims, cuts, strict=True))
    # Each dimension can be split along all axes at once.
    shape = tuple(mesh.size * rng.randint(1, 2) for _ in dims)
    return Case(mesh, RefinedMesh.of(mesh, parts), shape, kept, given, free)


CASES = [(name, seed) for name in MESHES for seed in range(4)]


def numbers(shape, seed):
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(np.int32)


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_what_is_moved_there_and_back_or_by_another_way_is_the_same(name, seed):
    case = random_case(name, seed)
    given, refined = case.lists(case.given), case.refined
    source = next((dim for dim, axes in enumerate(given) if axes), 0)
    target = (source + 1 + seed % 2) % 3
    moved, only = given[source], [given[d] if d == source else () for d in range(3)]
    there = [moved if d == target else () for d in range(3)]

    def program(split, whole):
        gathered = movement.all_gather(split, given, refined)
        by_one = movement.all_to_all(split, [(moved, source, target)], refined) if moved else split
        by_two = movement.all_slice(movement.all_gather(split, only, refined), there, refined)
        terms = reductions.sharded_to_unreduced(split, given, "sum", refined)
        lone = reductions.replicated_to_unreduced(whole, case.free, "sum", refined)
        return [
            (movement.all_slice(gathered, given, refined), split),
            (movement.all_gather(movement.all_slice(whole, given, refined), given, refined), whole),
            (by_one, by_two),
            (gathered, whole),
            (reductions.all_reduce(terms, case.flat(given), "sum", refined), gathered),
            (reductions.all_reduce(lone, case.free, "sum", refined), whole),
        ]

    x = numbers(case.shape, seed)
    split, whole = case.sharding(case.kept, case.given), case.sharding(case.kept, ((),) * 3)
    for number, (one, other) in enumerate(case.run(program, case.blocks(x, split), case.blocks(x, whole))):
        np.testing.assert_array_equal(one, other, err_msg=f"identity {number}")


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_what_is_scattered_is_a_slice_of_what_is_reduced_everywhere(name, seed):
    case = random_case(name, seed)
    given, flat = case.lists(case.given), case.flat(case.given)

    def program(x, small):
        values = [(kind, small if kind == "product" else x) for kind in REDUCTION_KINDS]
        scattered = [reductions.reduce_scatter(v, given, kind, case.refined) for kind, v in values]
        return scattered, [
            movement.all_slice(reductions.all_reduce(v, flat, kind, case.refined), given, case.refined)
            for kind, v in values
        ]

    # Any terms: every device has its own.
    shape = (case.mesh.size, *case.sharding(case.kept, ((),) * 3).local_shape(case.shape, case.mesh))
    scattered, sliced = case.run(program, numbers(shape, seed), numbers(shape, seed + 1) % 5)
    for kind, one, other in zip(REDUCTION_KINDS, scattered, sliced, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=kind)


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_a_permutation_after_another_is_one_permutation(name, seed):
    case, rng = random_case(name, seed), random.Random(seed)
    parts = [axis for lists in (case.kept, case.given) for axes in lists for axis in axes] + [*case.free]

    def shuffled():
        """As many shards of every dimension, made of other axes of the same sizes."""
        left = {size: rng.sample(of, len(of)) for size, of in by_size.items()}
        dims = zip(case.kept, case.given, strict=True)
        taken = [tuple(left[axis.size(case.mesh)].pop() for axes in dim for axis in axes) for dim in dims]
        return case.sharding(taken)

    by_size = {axis.size(case.mesh): [a for a in parts if a.size(case.mesh) == axis.size(case.mesh)] for axis in parts}
    first, second, third = shuffled(), shuffled(), shuffled()

    def program(x):
        middle = movement.collective_permute(x, first, second, case.refined)
        return movement.collective_permute(middle, second, third, case.refined), movement.collective_permute(
            x, first, third, case.refined
        )

    x = numbers(case.shape, seed)
    by_two, by_one = case.run(program, case.blocks(x, first))
    np.testing.assert_array_equal(by_two, by_one)
    np.testing.assert_array_equal(by_one, case.blocks(x, third))


def test_the_cases_split_along_several_axes_and_along_none():
    cases = [random_case(*case) for case in CASES]
    assert any(not any(case.given) for case in cases) or any(not case.free for case in cases)
    assert sum(axes_size(case.flat(case.given), case.mesh) > 2 for case in cases) > 4
    assert any(len(axes) > 1 for case in cases for axes in case.given)
    assert any(case.free for case in cases) and any(any(case.kept) for case in cases)
