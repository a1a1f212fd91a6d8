"""Parsers for the dialect's textual forms of axes, meshes, shardings, op sharding rules and records of propagation."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn, TypeVar

from sdy_jax.base.errors import ParseError
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, MeshAxis, quoted
from sdy_jax.ir.shardings import (
    LETTERS,
    REDUCTION_KINDS,
    AxisSpread,
    DimensionSharding,
    EdgeValue,
    OpShardingRule,
    PropagationEdges,
    PropagationStep,
    TensorMapping,
    TensorSharding,
)

# A position in a text of the dialect, and the tokens that its forms share.

_SHOWN = 20
"""Characters of the text that an error shows. Chosen: a name or two."""

_HEX = 16
"""Given: the base."""

T = TypeVar("T")
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"((?:[^"\\\n]|\\(?:[0-9A-Fa-f]{2}|["\\nt]))*)"')
_ESCAPE = re.compile(r'\\([0-9A-Fa-f]{2}|["\\nt])')
_INTEGER = re.compile(r"-?\d+")


class Scanner:
    """A position in a text; every method skips white space first."""

    def __init__(self, text: str):
        self.text = text
        self.position = 0

    def accept(self, token: str) -> bool:
        """Steps over `token` if it comes next."""
        self._skip()
        if not self.text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(f"expected `{token}`")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._skip()
        found = pattern.match(self.text, self.position)
        if found:
            self.position = found.end()
        return found

    def require(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        return self.match(pattern) or self.fail(f"expected {what}")

    def peek(self, token: str) -> bool:
        self._skip()
        return self.text.startswith(token, self.position)

    def end(self) -> None:
        self._skip()
        if self.position < len(self.text):
            self.fail("expected the end")

    def items(self, item: Callable[[Scanner], T], close: str) -> tuple[T, ...]:
        """Comma-separated items up to and with `close`; possibly none."""
        if self.accept(close):
            return ()
        found = [item(self)]
        while self.accept(","):
            found.append(item(self))
        if not self.accept(close):
            self.fail(f"expected `,` or `{close}`")
        return tuple(found)

    def fail(self, expected: str) -> NoReturn:
        rest = self.text[self.position :]
        got = f"`{rest[:_SHOWN]}`" if rest else "the end"
        pointer = f"\n  {self.text}\n  {' ' * self.position}^" if "\n" not in self.text else ""
        raise ParseError(f"column {self.position + 1}: {expected}, got {got}{pointer}")

    def _skip(self) -> None:
        space = _SPACE.match(self.text, self.position)
        self.position = space.end() if space else self.position


def unwrapped(text: str, attribute: str, body: Callable[[Scanner], T]) -> T:
    scanner = Scanner(text)
    named = scanner.accept(attribute)
    wrapped = scanner.accept("<")
    if named and not wrapped:
        scanner.fail("expected `<`")
    parsed = body(scanner)
    if wrapped:
        scanner.expect(">")
    scanner.end()
    return parsed


def scan_string(scanner: Scanner, what: str) -> str:
    literal = scanner.require(_STRING, what)
    name = bytearray()
    position, body = 0, literal[1]
    for escape in _ESCAPE.finditer(body):
        name += body[position : escape.start()].encode() + _escape(escape[1])
        position = escape.end()
    name += body[position:].encode()
    return name.decode(errors="surrogateescape")


def _escape(code: str) -> bytes:
    plain = {'"': b'"', "\\": b"\\", "n": b"\n", "t": b"\t"}
    return plain[code] if code in plain else bytes([int(code, _HEX)])


def scan_integer(scanner: Scanner) -> int:
    return int(scanner.require(_INTEGER, "an integer")[0])


# Parsers for the textual forms of axes and lists of them.
#
#     axis   '"name"'  |  '"name":(pre)size'
#     axes   "{" axis , ... "}"
#     lists  "[" axes , ... "]"
#     moves  "[" axes ": source->target" , ... "]"
#
# The parsers of shardings say how they are wrapped, and what they check.


def parse_axis(text: str) -> AxisRef:
    """An axis reference: `"x"` or `"x":(1)2`."""
    scanner = Scanner(text)
    axis = scan_axis(scanner)
    scanner.end()
    return axis


def parse_axis_name(text: str) -> AxisRef:
    """An axis as `axis_name` writes it, without quotes: `x` or `x:(1)2`."""
    name, colon, rest = text.partition(":")
    return parse_axis(f"{quoted(name)}{colon}{rest}")


@lru_cache(maxsize=1 << 12)
def parse_axes(text: str) -> Axes:
    """A list of axes, `{"x", "y":(1)2}`, or `#sdy<axis_ref_list{"x"}>`."""
    return unwrapped(text, "#sdy", lambda scanner: _axes(_after(scanner, "axis_ref_list")))


@lru_cache(maxsize=1 << 12)
def parse_axis_lists(text: str) -> tuple[Axes, ...]:
    """A list of axes per dimension, `[{"x"}, {}]`, or `#sdy<list_of_axis_ref_lists[{"x"}, {}]>`."""
    return unwrapped(text, "#sdy", lambda scanner: _list(_after(scanner, "list_of_axis_ref_lists"), _axes))


@lru_cache(maxsize=1 << 12)
def parse_moves(text: str) -> tuple[tuple[Axes, int, int], ...]:
    """The (axes, source, target) of an all-to-all, `[{"x"}: 0->1]`, or `#sdy<all_to_all_param_list[{"x"}: 0->1]>`."""
    return unwrapped(text, "#sdy", lambda scanner: _list(_after(scanner, "all_to_all_param_list"), _move))


def scan_axis(scanner: Scanner) -> AxisRef:
    name = scan_string(scanner, "an axis name in double quotes")
    if not scanner.accept(":"):
        return AxisRef(name)
    scanner.expect("(")
    pre_size = scan_integer(scanner)
    scanner.expect(")")
    return AxisRef.sub(name, pre_size, scan_integer(scanner))


def _axes(scanner: Scanner) -> Axes:
    scanner.expect("{")
    return scanner.items(scan_axis, "}")


def _list(scanner: Scanner, item: Callable[[Scanner], T]) -> tuple[T, ...]:
    scanner.expect("[")
    return scanner.items(item, "]")


def _after(scanner: Scanner, word: str) -> Scanner:
    """The scanner behind a word that may be left out."""
    scanner.accept(word)
    return scanner


def _move(scanner: Scanner) -> tuple[Axes, int, int]:
    axes = _axes(scanner)
    scanner.expect(":")
    source = scan_integer(scanner)
    scanner.expect("->")
    return axes, source, scan_integer(scanner)


# Parsers for the textual forms of meshes and tensor shardings.
#
#     mesh      "<[" ('"name"=size' ...) "]" (", device_ids=[" ints "]")? ">"
#     dimension "{" axes? "?"? "}" ("p" number)?
#     sharding  ("@name" | "mesh<...>") ", [" dimensions "]" tail*
#     tail      ", replicated={" axes "}"  |  ", unreduced=" kind? "{" axes "}"
#     per value "[" "<sharding>" , ... "]"
#
# Those of axes, op sharding rules and records of propagation are in `axis_text`, `rule_text` and
# `propagation_edges_text`. Each form may be wrapped in `<...>` or in its attribute, `#sdy.sharding<...>`. `str`
# prints what these functions parse: `parse(str(x)) == x`. They check the form only; `verify` checks the meaning.

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


# The parser for the textual form of op sharding rules.
#
#     rule  "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}"
#
# The parsers of shardings say how it is wrapped, and what it checks.

_FACTOR_SETS = ("reduction", "need_replication", "permutation", "blocked_propagation")
_FACTOR = re.compile(r"z_([1-9]\d*)|([i-z])")


def parse_rule(text: str) -> OpShardingRule:
    """An op sharding rule, such as `([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}`."""
    return unwrapped(text, "#sdy.op_sharding_rule", _rule)


def _rule(scanner: Scanner) -> OpShardingRule:
    scanner.expect("(")
    operands = scanner.items(_mapping, ")")
    scanner.expect("->")
    scanner.expect("(")
    results = scanner.items(_mapping, ")")
    sizes = _factor_sizes(scanner)
    reduction, need_replication, permutation, blocked = (_factor_set(scanner, name) for name in _FACTOR_SETS)
    is_custom = scanner.accept(",")
    if is_custom:
        scanner.expect("custom")
    return OpShardingRule(sizes, operands, results, reduction, need_replication, permutation, blocked, is_custom)


def _mapping(scanner: Scanner) -> TensorMapping:
    scanner.expect("[")
    return scanner.items(_dimension_mapping, "]")


def _dimension_mapping(scanner: Scanner) -> tuple[int, ...]:
    factors = [_factor(scanner)]
    while found := _FACTOR.match(scanner.text, scanner.position):
        scanner.position = found.end()
        factors.append(_factor_index(found))
    return tuple(factors)


def _factor(scanner: Scanner) -> int:
    return _factor_index(scanner.require(_FACTOR, "a factor: `i` to `z`, `z_1`, `z_2`, ..."))


def _factor_index(symbol: re.Match[str]) -> int:
    return LETTERS - 1 + int(symbol[1]) if symbol[1] else ord(symbol[2]) - ord("i")


def _factor_sizes(scanner: Scanner) -> tuple[int, ...]:
    if not scanner.accept("{"):
        return ()
    start = scanner.position
    sized = scanner.items(_factor_size, "}")
    if [factor for factor, _ in sized] != list(range(len(sized))):
        scanner.position = start
        scanner.fail("expected the sizes of the factors i, j, k, ... in that order")
    return tuple(size for _, size in sized)


def _factor_size(scanner: Scanner) -> tuple[int, int]:
    factor = _factor(scanner)
    scanner.expect("=")
    return factor, scan_integer(scanner)


def _factor_set(scanner: Scanner, name: str) -> frozenset[int]:
    if not scanner.accept(name):
        return frozenset()
    scanner.expect("=")
    scanner.expect("{")
    start = scanner.position
    factors = scanner.items(_factor, "}")
    if list(factors) != sorted(set(factors)):
        scanner.position = start
        scanner.fail("expected each factor once, in ascending order")
    return frozenset(factors)


# The parser for the textual form of records of propagation. No list in them is empty.
#
#     edges  "[{step-0 = [{"x" = operand-0 -> [operand-1, result-0]}]}]"
#
# The parsers of shardings say how it is wrapped, and what it checks.

_SIDE = re.compile(r"operand|result")


def parse_propagation_edges(text: str) -> PropagationEdges:
    """A record of propagation, such as `[{step-0 = [{"x" = operand-0 -> [operand-1, result-0]}]}]`."""
    return unwrapped(text, "#sdy.propagation_edges", _propagation_edges)


def _propagation_edges(scanner: Scanner) -> PropagationEdges:
    return PropagationEdges(_list_of(scanner, _propagation_step))


def _list_of(scanner: Scanner, item: Callable[[Scanner], T]) -> tuple[T, ...]:
    scanner.expect("[")
    if scanner.peek("]"):
        scanner.fail("expected an entry")
    return scanner.items(item, "]")


def _propagation_step(scanner: Scanner) -> PropagationStep:
    for token in ("{", "step", "-"):
        scanner.expect(token)
    index = scan_integer(scanner)
    scanner.expect("=")
    spreads = _list_of(scanner, _axis_spread)
    scanner.expect("}")
    return PropagationStep(index, spreads)


def _axis_spread(scanner: Scanner) -> AxisSpread:
    scanner.expect("{")
    axis = scan_axis(scanner)
    scanner.expect("=")
    source = _edge_value(scanner)
    scanner.expect("->")
    targets = _list_of(scanner, _edge_value)
    scanner.expect("}")
    return AxisSpread(axis, source, targets)


def _edge_value(scanner: Scanner) -> EdgeValue:
    side = scanner.require(_SIDE, "`operand` or `result`")[0]
    scanner.expect("-")
    return EdgeValue("operand" if side == "operand" else "result", scan_integer(scanner))
