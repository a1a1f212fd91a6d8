"""Runs reshard plans on numpy blocks, one per device, by the definition of each collective.

Nothing here knows how plans are made. Axis references are expanded into prime digits `(axis, pre, size)`; every
collective is checked against the rules of the dialect (suffixes, unused axes, unreduced bookkeeping) as it is applied.
"""

import itertools
import math

import numpy as np

from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard.relayouts import change

JUNK = -(10**9)
"""What padding holds. Blocks of dimensions that do not divide are padded at the end."""


def digits(axes, mesh):
    """The prime digits of a list of axes, major first."""
    found = []
    for axis in axes:
        pre, rest = axis.pre_size, axis.size(mesh)
        prime = 2
        while rest > 1:
            while rest % prime == 0:
                found.append((axis.name, pre, prime))
                pre, rest = pre * prime, rest // prime
            prime += 1
    return found


class Simulator:
    """The blocks of all devices while a plan runs."""

    def __init__(self, shape, source: TensorSharding, mesh: Mesh, seed: int = 0, others=()):
        """`others`: by symbol, the meshes with the same axes and another order of the devices."""
        self.mesh, self.shape, self.meshes = mesh, shape, {source.mesh: mesh, **dict(others)}
        self.devices = list(itertools.product(*(range(a.size) for a in mesh.axes)))
        self.dims = [digits(axes, mesh) for axes in source.axes]
        self.unreduced = set(digits(source.unreduced_axes, mesh))
        partials: dict[tuple, np.ndarray] = {}
        rng = np.random.default_rng(seed)
        self.blocks = {}
        for device in self.devices:
            key = self.coordinates(device, sorted(self.unreduced))
            if key not in partials:
                partials[key] = rng.integers(1, 1000, shape)
            self.blocks[device] = self.block(partials[key], device, self.dims)
        self.value = sum(partials.values())

    def place(self, name):
        axis = self.mesh.positions[name]
        return axis, self.mesh.axes[axis].size

    def coordinates(self, device, axes):
        found = []
        for name, pre, size in axes:
            axis, n = self.place(name)
            found.append(device[axis] // (n // (pre * size)) % size)
        return tuple(found)

    def index(self, device, axes):
        index = 0
        for (_, _, size), c in zip(axes, self.coordinates(device, axes), strict=True):
            index = index * size + c
        return index

    def group(self, device, axes):
        """The devices that differ from this one along `axes` only, in row-major order of the list."""
        members = []
        for wanted in itertools.product(*(range(size) for *_, size in axes)):
            member = list(device)
            for (name, pre, size), have, want in zip(axes, self.coordinates(device, axes), wanted, strict=True):
                axis, n = self.place(name)
                member[axis] += (want - have) * (n // (pre * size))
            members.append(tuple(member))
        return members

    def block(self, value, device, dims):
        for d, axes in enumerate(dims):
            value = self.chunk(value, device, d, axes)
        return value

    def chunk(self, value, device, dim, axes):
        parts = math.prod(size for *_, size in axes)
        if value.shape[dim] % parts:
            assert value.shape[dim] == self.shape[dim], "only what is whole is padded"
            margins = [(0, -value.shape[n] % parts if n == dim else 0) for n in range(value.ndim)]
            value = np.pad(value, margins, constant_values=JUNK)
        length = value.shape[dim] // parts
        start = self.index(device, axes) * length
        return np.take(value, range(start, start + length), axis=dim)

    def run(self, plan):
        for step in plan.steps:
            axes = step.op.axes
            if step.kind in ("all_gather", "all_slice", "reduce_scatter", "sharded_to_unreduced"):
                axes = [digits(a, self.mesh) for a in step.op.axes]
            elif step.op.axes:
                axes = digits(step.op.axes, self.mesh)
            getattr(self, step.kind)(step, axes)
            self.trim()
            assert self.mesh == self.meshes.get(step.result.mesh, self.mesh)
            assert self.dims == [digits(a, self.mesh) for a in step.result.axes]
            assert self.unreduced == set(digits(step.result.unreduced_axes, self.mesh))
        return self

    def assert_is(self, target: TensorSharding):
        """Every device holds its block of the value (or, where unreduced, a part of the sum that gives it)."""
        assert self.dims == [digits(axes, self.mesh) for axes in target.axes]
        assert self.unreduced == set(digits(target.unreduced_axes, self.mesh))
        open_axes = sorted(self.unreduced)
        for device in self.devices:
            total = sum(self.blocks[member] for member in self.group(device, open_axes))
            wanted = self.block(self.value, device, self.dims)
            assert total.shape == wanted.shape
            np.testing.assert_array_equal(np.where(wanted == JUNK, JUNK, total), wanted)

    def drop(self, dim, axes):
        if axes:
            assert self.dims[dim][-len(axes) :] == axes, f"{axes} is no suffix of {self.dims[dim]}"
            self.dims[dim] = self.dims[dim][: -len(axes)]

    def trim(self):
        """Takes the padding off dimensions that are whole."""
        whole = tuple(slice(None if axes else n) for axes, n in zip(self.dims, self.shape, strict=True))
        old = self.blocks
        self.each(lambda p: old[p][whole])

    def append(self, dim, axes):
        used = {a for d in self.dims for a in d} | self.unreduced
        assert used.isdisjoint(axes), f"{axes} are in use"
        self.dims[dim] = self.dims[dim] + axes

    def each(self, function):
        self.blocks = {device: function(device) for device in self.devices}

    def all_gather(self, step, axes):
        assert any(axes)
        for d, gathered in enumerate(axes):
            self.drop(d, gathered)
            old = self.blocks
            self.each(lambda p, d=d, g=gathered, old=old: np.concatenate([old[q] for q in self.group(p, g)], d))

    def all_slice(self, step, axes):
        assert any(axes)
        for d, sliced in enumerate(axes):
            self.append(d, sliced)
            old = self.blocks
            self.each(lambda p, d=d, s=sliced, old=old: self.chunk(old[p], p, d, s))

    def all_to_all(self, step, axes):
        assert step.op.params
        dims = [d for _, src, tgt in step.op.params for d in (src, tgt)]
        assert len(set(dims)) == len(dims)
        assert [src for _, src, _ in step.op.params] == sorted(src for _, src, _ in step.op.params)
        for moved, src, tgt in step.op.params:
            moved = digits(moved, self.mesh)
            assert moved
            self.drop(src, moved)
            self.append(tgt, moved)
            old = self.blocks
            self.each(
                lambda p, m=moved, i=src, j=tgt, old=old: np.concatenate(
                    [self.chunk(old[q], p, j, m) for q in self.group(p, m)], i
                )
            )

    def reshard(self, step, axes):
        """In strips, along one dimension; parts of another one may be cut before, or joined after it."""
        after = [digits(a, self.mesh) for a in step.result.axes]
        atoms = list(dict.fromkeys(atom for axes in (*self.dims, *after) for atom in axes))
        ends = ([tuple(map(atoms.index, axes)) for axes in dims] for dims in (self.dims, after))
        done = change(self.shape, tuple(size for *_, size in atoms), *ends)
        assert {atoms[i] for i in done.relayout.group} == set(axes)
        parts = {p: [np.moveaxis(block, done.dim, 0)] for p, block in self.blocks.items()}
        if done.other is not None and done.is_cut:
            parts = {p: self.parts(block, done, after[done.other]) for p, block in self.blocks.items()}
        for plan in done.relayout.stages:
            self.stage(plan, parts, [atoms[i] for i in done.relayout.group])
            parts = {p: [block] for p, block in self.blocks.items()}
        self.each(lambda p: np.moveaxis(parts[p][0], 0, done.dim))
        if done.other is not None and not done.is_cut:
            self.each(lambda p, old=self.blocks: np.concatenate(np.split(old[p], done.chunks, done.dim), done.other))
        self.dims = after
        wanted = self.block(self.value, self.devices[0], self.dims).shape  # without the padding of joined parts
        self.each(lambda p, old=self.blocks: old[p][tuple(slice(n) for n in wanted)])

    def parts(self, block, done, axes):
        length = -(-self.shape[done.other] // math.prod(size for *_, size in axes))
        missing = [(0, max(length * done.chunks - n, 0) if d == done.other else 0) for d, n in enumerate(block.shape)]
        block = np.pad(block, missing, constant_values=JUNK)
        parts = np.split(np.take(block, range(length * done.chunks), done.other), done.chunks, done.other)
        return [np.moveaxis(part, done.dim, 0) for part in parts]

    def stage(self, plan, old, axes):
        self.each(lambda p: np.full((plan.length, *old[p][0].shape[1:]), JUNK))
        for p, strips in itertools.product(self.devices, (*plan.copies, *plan.rounds)):
            group, me = self.group(p, axes), self.index(p, axes)
            for sender in (u for u, t in strips.pairs if t == me):
                start, length, offset = strips.starts[me], strips.lengths[me], strips.offsets[sender]
                given = old[group[sender]][strips.operands[sender]]
                self.blocks[p][start : start + length] = given[offset : offset + length]

    def collective_permute(self, step, axes):
        after = [digits(a, self.mesh) for a in step.result.axes]
        mesh = self.meshes.get(step.result.mesh, self.mesh)
        assert after != self.dims or mesh != self.mesh
        assert not (self.unreduced and mesh != self.mesh)
        open_axes, owners = sorted(self.unreduced), {}
        for p in self.devices:
            key = (self.coordinates(p, open_axes), tuple(self.index(p, a) for a in self.dims))
            owners.setdefault(key, p)
        old = self.blocks
        sources = {
            p: owners[self.coordinates(p, open_axes), tuple(self.index(p, a) for a in after)] for p in self.devices
        }
        for before, a in zip(self.dims, after, strict=True):
            assert math.prod(s for *_, s in before) == math.prod(s for *_, s in a)
        self.each(lambda p: old[sources[p]])
        if not step.wire_bytes:
            self.assert_nothing_moves(old, self.mesh, mesh)
        self.dims, self.mesh = after, mesh

    def assert_nothing_moves(self, old, before, after):
        ids = [mesh.device_ids or range(mesh.size) for mesh in (before, after)]
        was = dict(zip(ids[0], self.devices, strict=True))
        for number, device in zip(ids[1], self.devices, strict=True):
            np.testing.assert_array_equal(old[was[number]], self.blocks[device])

    def all_reduce(self, step, axes):
        assert axes
        assert self.unreduced.issuperset(axes)
        self.unreduced -= set(axes)
        old = self.blocks
        self.each(lambda p: sum(old[q] for q in self.group(p, axes)))

    def reduce_scatter(self, step, axes):
        self.all_reduce(step, [a for dim in axes for a in dim])
        self.all_slice(step, axes)

    def replicated_to_unreduced(self, step, axes):
        assert axes
        assert ({a for d in self.dims for a in d} | self.unreduced).isdisjoint(axes)
        self.unreduced |= set(axes)
        old = self.blocks
        self.each(lambda p: old[p] if not any(self.coordinates(p, axes)) else old[p] * 0)

    def sharded_to_unreduced(self, step, axes):
        assert any(axes)
        for d, dropped in enumerate(axes):
            self.drop(d, dropped)
            old = self.blocks
            self.each(
                lambda p, d=d, g=dropped, old=old: np.concatenate([old[q] * (q == p) for q in self.group(p, g)], d)
            )
        self.unreduced |= {a for dim in axes for a in dim}
