"""The collectives that Shardy makes of a reshard: slices, then a permute, then all-to-alls, then a gather."""

from __future__ import annotations

import math
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sdy_jax.ir.collectives import Params, SdyCollective
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, axes_size, can_merge, merge_neighbours
from sdy_jax.ir.shardings import TensorSharding

Atoms = list[AxisRef]
Step = tuple[SdyCollective, TensorSharding]


def reshard_steps(
    shape: Sequence[int], source: TensorSharding, target: TensorSharding, mesh: Mesh
) -> list[Step] | None:
    """The collectives from one closed sharding to another on the same mesh, each with the sharding that it makes.

    Args:
      shape: of the value.
      source, target: its shardings; neither is unreduced.
      mesh: that of both.

    Returns:
      Nothing where the steps would not be blocks of the value: a size does not divide, or no step leads on.
    """
    if source.unreduced_axes or target.unreduced_axes:
        return None
    steps = list(_Reshard.of(shape, source, target, mesh).steps())
    counts = [source.shard_counts(mesh), *(sharding.shard_counts(mesh) for _, sharding in steps)]
    if any(size % count for of_step in counts for size, count in zip(shape, of_step, strict=True)):
        return None
    is_sound = all(
        collective.kind != "collective_permute" or before == after
        for (collective, _), before, after in zip(steps, counts[:-1], counts[1:], strict=True)
    )
    return steps if is_sound and (not steps or steps[-1][1].axes == target.axes) else None


@dataclass
class _Reshard:
    shape: Sequence[int]
    mesh: Mesh
    mesh_name: str | Mesh
    now: list[Atoms]
    then: list[Atoms]
    expected: dict[int, Atoms] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, shape: Sequence[int], source: TensorSharding, target: TensorSharding, mesh: Mesh) -> _Reshard:
        cuts = _cuts(source.axes, target.axes, mesh)
        return cls(shape, mesh, target.mesh, *([_cut(axes, cuts, mesh) for axes in s.axes] for s in (source, target)))

    def steps(self) -> Iterator[Step]:
        yield from self._sliced()
        yield from self._permuted()
        yield from self._exchanged()
        if not all(_starts_with(a, b) for a, b in zip(self.now, self.then, strict=True)):
            self.now = [t + [a for a in n if a not in t] for n, t in zip(self.now, self.then, strict=True)]
            yield self._step(SdyCollective("collective_permute"))
        gathered = [now[len(then) :] for now, then in zip(self.now, self.then, strict=True)]
        if any(gathered):
            self.now = self.then
            yield self._step(SdyCollective("all_gather", self._lists(gathered)))

    # Slices.

    def _sliced(self) -> Iterator[Step]:
        before = [len(atoms) for atoms in self.now]
        for dim in range(len(self.now)):
            self._continue(dim)
        for is_own, is_whole in itertools.product((True, False), (True, False)):
            for dim in range(len(self.now)):
                self._slice(dim, is_own, is_whole)
        added = [atoms[count:] for atoms, count in zip(self.now, before, strict=True)]
        if any(added):
            yield self._step(SdyCollective("all_slice", self._lists(added)))

    def _continue(self, dim: int) -> None:
        now, then = self.now[dim], self.then[dim]
        while _starts_with(then, now) and len(now) < len(then) and not self._is_here(then[len(now)]):
            now.append(then[len(now)])

    def _slice(self, dim: int, is_own: bool, is_whole: bool) -> None:
        """Slices what is missing in a dimension, there or where it will come from, or else anywhere."""
        then = self.then[dim]
        for axis in self._missing_axes(dim) if is_whole else [[a] for a in then]:
            if any(map(self._is_here, axis)):
                continue
            place = self._place_of_slice(dim, then.index(axis[0]), axis) if is_own else self._any_room(axis)
            if place is not None:
                self.now[place] += axis
                if place != dim and is_own:
                    self.expected[dim] = then[: then.index(axis[-1]) + 1]

    def _missing_axes(self, dim: int) -> list[Atoms]:
        """Atoms of one axis that follow each other."""
        found: list[Atoms] = []
        for atom in self.then[dim]:
            if found and can_merge(found[-1][-1], atom):
                found[-1].append(atom)
            else:
                found.append([atom])
        return found

    def _is_here(self, atom: AxisRef) -> bool:
        return any(atom in atoms for atoms in self.now)

    def _place_of_slice(self, dim: int, index: int, axis: Atoms) -> int | None:
        """Behind the atoms that an all-to-all will bring before it, or else in its own dimension."""
        then, now = self.then[dim], self.now[dim]
        if _starts_with(then, now) and len(now) < index:
            for other, atoms in enumerate(self.now):
                block = [atom for atom in atoms if atom in then]
                is_next = block and atoms[-len(block) :] == block == then[index - len(block) : index]
                fits = self.shape[other] % self._size([*atoms, *(a for a in then[index:] if not self._is_here(a))]) == 0
                if other != dim and is_next and fits and _starts_with(atoms[: -len(block)], self.then[other]):
                    return other
        return dim if self._has_room(dim, axis) else None

    def _any_room(self, axis: Atoms) -> int | None:
        return next((dim for dim in range(len(self.now)) if self._has_room(dim, axis)), None)

    def _has_room(self, dim: int, axis: Atoms) -> bool:
        now = max(self._counts(self.now[dim]), self._counts(self.expected[dim]), key=lambda c: c.total())
        wanted, more = self._counts(self.then[dim]), self._counts(axis)
        return all(now[size] + count <= wanted[size] for size, count in more.items())

    def _counts(self, atoms: Sequence[AxisRef]) -> Counter[int]:
        return Counter(atom.size(self.mesh) for atom in atoms)

    # A permute.

    def _permuted(self) -> Iterator[Step]:
        heads = [self._head(dim) for dim in range(len(self.now))]
        if self._is_arranged(heads):
            return
        self.now = self._arranged(heads)
        yield self._step(SdyCollective("collective_permute"))

    def _head(self, dim: int) -> Atoms:
        size, head = self._counts(self.now[dim]), Atoms()
        for atom in self.then[dim]:
            if self._counts(head)[atom.size(self.mesh)] == size[atom.size(self.mesh)]:
                break
            head.append(atom)
        return head

    def _dim_after(self, heads: list[Atoms]) -> dict[AxisRef, int]:
        """Where the atoms go that an all-to-all moves."""
        return {atom: dim for dim, head in enumerate(heads) for atom in self.then[dim][len(head) :]}

    def _is_arranged(self, heads: list[Atoms]) -> bool:
        to = self._dim_after(heads)
        for dim, (now, head) in enumerate(zip(self.now, heads, strict=True)):
            if now[: len(head)] != head:
                return False
            rest = now[len(head) :]
            moving = [atom in to for atom in rest]
            if sorted(moving) != moving or any(to.get(atom) == dim for atom in rest):
                return False
            if not self._is_in_order([atom for atom in rest if atom in to], to):
                return False
        return True

    def _is_in_order(self, atoms: Atoms, to: dict[AxisRef, int]) -> bool:
        """Those for one dimension are next to each other, in its order."""
        runs: list[int] = []
        for atom in atoms:
            if not runs or runs[-1] != to[atom]:
                runs.append(to[atom])
        if len(runs) != len(set(runs)):
            return False
        return all(_is_block([a for a in atoms if to[a] == dim], self.then[dim]) for dim in runs)

    def _arranged(self, heads: list[Atoms]) -> list[Atoms]:
        to, room = self._dim_after(heads), [self._counts(n) - self._counts(h) for n, h in zip(self.now, heads, strict=True)]
        tails: list[Atoms] = [[] for _ in heads]
        for atom, target in to.items():
            if any(atom in now for now in self.now):
                place = next((d for d in range(len(heads)) if d != target and room[d][atom.size(self.mesh)]), None)
                if place is not None:
                    tails[place].append(atom)
                    room[place][atom.size(self.mesh)] -= 1
        middles = [self._middle(dim, heads, to) for dim in range(len(heads))]
        pool = Atoms()
        for dim, (head, middle) in enumerate(zip(heads, middles, strict=True)):
            if +room[dim]:
                middle[:] = self._turned(dim, heads, to)
            foreign = len([a for a in tails[dim] if a not in self.now[dim]])
            behind = Atoms()
            while extra := self._counts(middle) - room[dim]:
                order = list(reversed(middle)) if foreign > 0 else middle
                atom = next(a for a in order if extra[a.size(self.mesh)])
                middle.remove(atom)
                if foreign > 0:
                    behind.insert(0, atom)
                else:
                    pool.append(atom)
                foreign -= 1
            pool += behind
        for dim, middle in enumerate(middles):
            front = Atoms()
            for atom in list(pool):
                if self._counts([*front, *middle])[atom.size(self.mesh)] < room[dim][atom.size(self.mesh)]:
                    front.append(atom)
                    pool.remove(atom)
            middle[:0] = front
        return [head + middle + tail for head, middle, tail in zip(heads, middles, tails, strict=True)]

    def _middle(self, dim: int, heads: list[Atoms], to: dict[AxisRef, int]) -> Atoms:
        return [a for a in self.now[dim] if a not in to and not any(a in h for h in heads)]

    def _turned(self, dim: int, heads: list[Atoms], to: dict[AxisRef, int]) -> Atoms:
        """The middle as the atoms of the head leave it that come to the front one by one: each displaces the first."""
        now, head, middle = self.now[dim], heads[dim], self._middle(dim, heads, to)
        in_place = next((i for i, a in enumerate(head) if now[i : i + 1] != [a]), len(head))
        own = [a for a in head[in_place:] if a in now]
        come = [a for a in head if a not in now and self._was_here(a)]
        leaving = [a for a in now if to.get(a) == dim or any(a in h for h in heads if h is not head)]
        for atom in [*own, *come[: len(leaving)]]:
            if middle and middle[0].size(self.mesh) == atom.size(self.mesh):
                middle.append(middle.pop(0))
        return middle

    def _was_here(self, atom: AxisRef) -> bool:
        return any(atom in atoms for atoms in self.now)

    # All-to-alls.

    def _exchanged(self) -> Iterator[Step]:
        to = self._dim_after([self._head(dim) for dim in range(len(self.now))])
        while moves := [self._move_from(dim, to) for dim, now in enumerate(self.now) if now and to.get(now[-1], dim) != dim]:
            source, target, moved = next((m for m in moves if self._is_in_place(m[1], m[2])), moves[0])
            del self.now[source][-len(moved) :]
            self.now[target] += moved
            params: Params = ((merge_neighbours(moved, self.mesh), source, target),)
            yield self._step(SdyCollective("all_to_all", params=params))

    def _move_from(self, source: int, to: dict[AxisRef, int]) -> tuple[int, int, Atoms]:
        now = self.now[source]
        target = to[now[-1]]
        count = next((i for i, atom in enumerate(reversed(now)) if to.get(atom) != target), len(now))
        return source, target, now[len(now) - count :]

    def _is_in_place(self, target: int, moved: Atoms) -> bool:
        return _starts_with(self.then[target], [*self.now[target], *moved])

    def _step(self, collective: SdyCollective) -> Step:
        return collective, TensorSharding.closed(self.mesh_name, self._lists(self.now))

    def _lists(self, lists: Sequence[Atoms]) -> tuple[Axes, ...]:
        return tuple(merge_neighbours(atoms, self.mesh) for atoms in lists)

    def _size(self, atoms: Sequence[AxisRef]) -> int:
        return axes_size(atoms, self.mesh)


def _starts_with(atoms: Atoms, head: Atoms) -> bool:
    return atoms[: len(head)] == head


def _is_block(atoms: Atoms, all_atoms: Atoms) -> bool:
    first = all_atoms.index(atoms[0])
    return all_atoms[first : first + len(atoms)] == atoms


def _cuts(source: Sequence[Axes], target: Sequence[Axes], mesh: Mesh) -> dict[str, list[int]]:
    """Per axis the sizes of what is major to a cut."""
    found: dict[str, set[int]] = {}
    for axis in (axis for axes in (*source, *target) for axis in axes):
        found.setdefault(axis.name, {1, mesh.sizes[axis.name]}).update((axis.pre_size, axis.next_pre_size(mesh)))
    here = {axis.name for axes in source for axis in axes}
    return {name: sorted(_with_primes(sorted(cuts), name in here)) for name, cuts in found.items()}


def _with_primes(cuts: list[int], is_ascending: bool) -> set[int]:
    found = set(cuts)
    for major, minor in zip(cuts, cuts[1:], strict=False):
        while major < minor:
            prime = next(n for n in range(2, minor // major + 1) if (minor // major) % n == 0)
            if is_ascending:
                major *= prime
                found.add(major)
            else:
                minor //= prime
                found.add(minor)
    return found


def _cut(axes: Axes, cuts: dict[str, list[int]], mesh: Mesh) -> Atoms:
    atoms = Atoms()
    for axis in axes:
        inside = [c for c in cuts[axis.name] if axis.pre_size <= c <= axis.next_pre_size(mesh)]
        atoms += [AxisRef.canonical(axis.name, a, b // a, mesh) for a, b in zip(inside, inside[1:], strict=False)]
    return atoms
