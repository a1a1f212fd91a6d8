"""How many collectives a reshard takes at least, beside what is counted axis by axis."""

import itertools

import pytest

from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard.bounds import steps_between

ABSENT, UNREDUCED = None, "unreduced"


def place(layout, name):
    """The first dimension that an axis or a part of it splits."""
    for dim, axes in enumerate(layout.axes):
        if name in [axis.name for axis in axes]:
            return dim
    return UNREDUCED if name in [axis.name for axis in layout.unreduced_axes] else ABSENT


def counted(source, target, mesh):
    pairs = [(place(source, axis.name), place(target, axis.name)) for axis in mesh.axes]
    reduced = any(a == UNREDUCED != b for a, b in pairs)
    gathered = any(a not in (UNREDUCED, ABSENT) and b is ABSENT for a, b in pairs)
    moved = any(a != b and not {a, b} & {UNREDUCED, ABSENT} for a, b in pairs)
    return max(1, reduced + gathered + moved)


@pytest.mark.parametrize("unused", [0, 3])
def test_steps_are_counted_as_axis_by_axis(unused):
    """Axes that no layout has change nothing."""
    mesh = Mesh.of(**{f"u{n}": 2 for n in range(unused)}, x=2, y=4)
    atoms = [AxisRef("x"), AxisRef.canonical("y", 1, 2, mesh), AxisRef.canonical("y", 2, 2, mesh)]
    layouts = []
    for placed in itertools.product([0, 1, UNREDUCED, ABSENT], repeat=3):
        *dims, unreduced = ([a for a, at in zip(atoms, placed, strict=True) if at == p] for p in (0, 1, UNREDUCED))
        layouts.append(TensorSharding.closed("m", dims, tuple(unreduced)))
    found = steps_between(layouts, mesh)
    for (i, source), (j, target) in itertools.product(enumerate(layouts), repeat=2):
        assert found[i, j] == counted(source, target, mesh), (str(source), str(target))
