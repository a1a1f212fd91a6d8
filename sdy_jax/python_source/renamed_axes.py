"""Functions of blocks that name axes of the user's mesh, in the names of the atoms into which a program cuts these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr  # type: ignore[attr-defined, unused-ignore]

Axes = Sequence[tuple[str, int]]
"""The names and sizes of the axes of a mesh."""

ON_USER_AXES = "sdy_whole_axes"
"""The primitive that calls such a function. Its parameters are the function, which has a jaxpr, and the user's mesh."""

_NAMES = ("axis_name", "axes")
"""The parameters by which collectives name axes."""


def on_atoms(jaxpr: Any, atoms: Axes) -> Any:
    """A jaxpr in which collectives of all such functions are over the atoms, the axes of its mesh."""

    def changed(eqn: Any) -> Any:
        if eqn.primitive.name != ON_USER_AXES:
            return eqn
        jaxpr = _renamed(eqn.params["function"].jaxpr, _made_of(eqn, atoms))
        return eqn.replace(params={"jaxpr": jaxpr, "mesh": eqn.params["mesh"]})

    return _rewritten(jaxpr, changed)


def _made_of(eqn: Any, atoms: Axes) -> Mapping[str, tuple[str, ...]]:
    """The atoms of each axis of the user's mesh, major to minor. Both meshes have the devices in one order."""
    found, rest = dict[str, tuple[str, ...]](), list(atoms)
    for axis, size in eqn.params["mesh"].shape.items():
        taken, product = list[str](), 1
        while rest and (product < size or (size == rest[0][1] == 1 and not taken)):
            name, own = rest.pop(0)
            taken.append(name)
            product *= own
        found[axis] = tuple(taken)
    return found


def _renamed(jaxpr: Any, atoms: Mapping[str, tuple[str, ...]]) -> Any:
    def over(names: Any) -> Any:
        listed = names if isinstance(names, tuple | list) else (names,)
        found = tuple(each for name in listed for each in atoms.get(name, (name,)))
        return found[0] if isinstance(names, str) and len(found) == 1 else found

    def changed(eqn: Any) -> Any:
        return eqn.replace(params={k: over(v) if k in _NAMES else v for k, v in eqn.params.items()})

    return _rewritten(jaxpr, changed)


def _rewritten(x: Any, changed: Callable[[Any], Any]) -> Any:
    """A jaxpr, or a parameter that may hold some, with other equations."""
    if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
        return type(x)(_rewritten(each, changed) for each in x)
    if isinstance(x, Jaxpr):
        return x.replace(eqns=[_with_parameters(changed(eqn), changed) for eqn in x.eqns])
    return x.replace(jaxpr=_rewritten(x.jaxpr, changed)) if isinstance(x, ClosedJaxpr) else x


def _with_parameters(eqn: Any, changed: Callable[[Any], Any]) -> Any:
    return eqn.replace(params={name: _rewritten(value, changed) for name, value in eqn.params.items()})
