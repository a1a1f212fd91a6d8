"""Parsers for the textual forms of meshes and tensor shardings.

    mesh      "<[" ('"name"=size' ...) "]" (", device_ids=[" ints "]")? ">"
    dimension "{" axes? "?"? "}" ("p" number)?
    sharding  ("@name" | "mesh<...>") ", [" dimensions "]" tail*
    tail      ", replicated={" axes "}"  |  ", unreduced=" kind? "{" axes "}"
    per value "[" "<sharding>" , ... "]"

Those of axes, op sharding rules and records of propagation are in `axis_text`, `rule_text` and
`propagation_edges_text`. Each form may be wrapped in `<...>` or in its attribute, `#sdy.sharding<...>`. `str` prints
what these functions parse: `parse(str(x)) == x`. They check the form only; `verify` checks the meaning.
"""

from __future__ import annotations

import re

from sdy_jax.representation.axis_text import scan_axis
from sdy_jax.representation.mesh import AxisRef, Mesh, MeshAxis
from sdy_jax.representation.scanner import Scanner, scan_integer, scan_string, unwrapped
from sdy_jax.representation.sharding import REDUCTION_KINDS, DimensionSharding, TensorSharding

_SYMBOL = re.compile(r'@(?:([A-Za-z_][\w$.]*)|(?="))', re.ASCII)
_PRIORITY = re.compile(r"p(0|[1-9]\d*)(?!\w)")
_WORD = re.compile(r"[A-Za-z_]+")


def parse_mesh(text: str) -> Mesh:
    """A mesh, such as `<["x"=2, "y"=4], device_ids=[...]>`. Ids equal to 0, 1, 2, ... mean no ids."""
    scanner = Scanner(text)
    if not scanner.accept("#sdy.mesh"):
        scanner.accept("mesh")
    mesh = _mesh(scanner)
    scanner.end()
    return mesh


def parse_sharding(text: str, mesh: str | Mesh | None = None) -> TensorSharding:
    """A tensor sharding, such as `@mesh, [{"data"}, {"model", ?}p1], replicated={"x"}`.

    Args:
      text: the form, bare or wrapped.
      mesh: the mesh of a text that names none and begins with the dimensions.
    """
    return unwrapped(text, "#sdy.sharding", lambda scanner: _sharding(scanner, mesh))


def parse_shardings(text: str) -> tuple[TensorSharding, ...]:
    """A list of tensor shardings, one per value: `[<@mesh, [{"data"}]>, <@mesh, [{?}]>]`."""
    return unwrapped(text, "#sdy.sharding_per_value", _shardings)


def _mesh(scanner: Scanner) -> Mesh:
    scanner.expect("<")
    scanner.expect("[")
    axes = scanner.items(_mesh_axis, "]")
    ids = _device_ids(scanner) if scanner.accept(",") else ()
    scanner.expect(">")
    return Mesh(axes, () if axes and ids == tuple(range(len(ids))) else ids)


def _mesh_axis(scanner: Scanner) -> MeshAxis:
    name = scan_string(scanner, "an axis name in double quotes")
    scanner.expect("=")
    return MeshAxis(name, scan_integer(scanner))


def _device_ids(scanner: Scanner) -> tuple[int, ...]:
    for token in ("device_ids", "=", "["):
        scanner.expect(token)
    if scanner.peek("]"):
        scanner.fail("expected a device id")
    return scanner.items(scan_integer, "]")


def _sharding(scanner: Scanner, default_mesh: str | Mesh | None) -> TensorSharding:
    mesh = _mesh_reference(scanner, default_mesh)
    scanner.expect("[")
    dimensions = scanner.items(_dimension, "]")
    tails: dict[str, tuple[AxisRef, ...]] = {}
    reduction = "sum"
    while scanner.accept(","):
        name = _tail_name(scanner, tails)
        if name == "unreduced" and not scanner.peek("{"):
            reduction = _reduction(scanner)
        tails[name] = _nonempty_axes(scanner)
    return TensorSharding(mesh, dimensions, tails.get("replicated", ()), tails.get("unreduced", ()), reduction)


def _mesh_reference(scanner: Scanner, default_mesh: str | Mesh | None) -> str | Mesh:
    if scanner.peek("[") and default_mesh is not None:
        return default_mesh
    mesh: str | Mesh
    if scanner.accept("mesh"):
        mesh = _mesh(scanner)
    else:
        name = scanner.require(_SYMBOL, "a mesh, `@name` or `mesh<...>`")[1]
        mesh = name if name is not None else scan_string(scanner, "a mesh name")
    scanner.expect(",")
    return mesh


def _dimension(scanner: Scanner) -> DimensionSharding:
    scanner.expect("{")
    items = scanner.items(_axis_or_open, "}")
    axes = tuple(item for item in items if item is not None)
    return DimensionSharding(axes, None not in items, _priority(scanner))


def _axis_or_open(scanner: Scanner) -> AxisRef | None:
    """An axis, or None for `?`, which comes last."""
    if not scanner.accept("?"):
        return scan_axis(scanner)
    if not scanner.peek("}"):
        scanner.fail("expected `}` after `?`, which comes last")
    return None


def _priority(scanner: Scanner) -> int | None:
    if not scanner.peek("p"):
        return None
    return int(scanner.require(_PRIORITY, "a priority such as `p0` or `p12`, without leading zeros")[1])


def _tail_name(scanner: Scanner, seen: dict[str, tuple[AxisRef, ...]]) -> str:
    for name in ("replicated", "unreduced"):
        if name not in seen and scanner.accept(name):
            scanner.expect("=")
            return name
    return scanner.fail("expected `replicated={...}` or `unreduced={...}`, each at most once")


def _reduction(scanner: Scanner) -> str:
    start = scanner.position
    word = scanner.match(_WORD)
    if word and word[0] in REDUCTION_KINDS:
        return word[0]
    scanner.position = start
    return scanner.fail(f"expected `{{` or one of {', '.join(REDUCTION_KINDS)}")


def _nonempty_axes(scanner: Scanner) -> tuple[AxisRef, ...]:
    scanner.expect("{")
    if scanner.peek("}"):
        scanner.fail("expected an axis; leave an empty list out")
    return scanner.items(scan_axis, "}")


def _shardings(scanner: Scanner) -> tuple[TensorSharding, ...]:
    scanner.expect("[")
    return scanner.items(_bracketed_sharding, "]")


def _bracketed_sharding(scanner: Scanner) -> TensorSharding:
    scanner.expect("<")
    sharding = _sharding(scanner, None)
    scanner.expect(">")
    return sharding
