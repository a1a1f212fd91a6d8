"""Shardings by their text, and at random."""

import re

from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding


def axes(text):
    found = re.findall(r"(\w+)(?::\((\d+)\)(\d+))?", text)
    return tuple(AxisRef.sub(n, int(p), int(s)) if p else AxisRef(n) for n, p, s in found)


def sharding(text):
    """`[{x,y},{}] U={z}`."""
    dims, _, unreduced = text.partition("U=")
    return TensorSharding.closed("m", [axes(d) for d in re.findall(r"\{([^}]*)\}", dims)], axes(unreduced))


def mesh_of(text):
    return Mesh.of(**{name: int(size) for name, size in (item.split("=") for item in text.split())})


def pieces(mesh, rng):
    for axis in mesh.axes:
        if axis.size == 4 and rng.random() < 0.5:
            yield AxisRef.sub(axis.name, 1, 2)
            yield AxisRef.sub(axis.name, 2, 2)
        else:
            yield AxisRef(axis.name)


def joined(refs, mesh):
    made = []
    for ref in refs:
        if made and made[-1].name == ref.name and made[-1].next_pre_size(mesh) == ref.pre_size:
            ref = AxisRef.canonical(ref.name, made[-1].pre_size, made.pop().size(mesh) * ref.size(mesh), mesh)
        made.append(ref)
    return tuple(made)


def random_sharding(mesh, rank, rng, unreduced):
    dims, open_axes, refs = [[] for _ in range(rank)], [], list(pieces(mesh, rng))
    rng.shuffle(refs)
    for ref in refs:
        if rng.random() < unreduced:
            open_axes.append(ref)
        elif rng.random() < 0.7:
            dims[rng.randrange(rank)].append(ref)
    open_axes.sort(key=lambda a: (mesh.positions[a.name], a.pre_size))
    return TensorSharding.closed("m", [joined(d, mesh) for d in dims], joined(open_axes, mesh))
