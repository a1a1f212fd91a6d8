"""The text of a plan: one screen. The sections on arguments and results, equal ones folded, stand here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sdy_jax.ir.jax_shardings import bytes_text, sizes_text
from sdy_jax.plan.page.costs import collective_section, device_section, kernels_section, most_section, verdict_section
from sdy_jax.plan.page.findings import (
    automatic_sections,
    blocked_section,
    host_section,
    layouts_section,
    local_sorts_section,
    meshes_section,
    moves_section,
    notes_section,
    padding_section,
    pipelines_section,
    recomputed_section,
    repeated_section,
)
from sdy_jax.plan.page.text import Section, fit_in_lines, shortened
from sdy_jax.plan.record.program import RecordedBorder
from sdy_jax.plan.record.record import PlanRecord

# Arguments and results with equal ones folded: layers of a list into one, and trees that are as another one is.
#
# `params['layers'][0]['w']` to `params['layers'][11]['w']` of one type are `params['layers'][0..11]['w']`, and where
# `opt.mu` has the leaves and types of `params`, it is one line that says so.

_TOKEN = re.compile(r"\[[^\]]*\]|\.?[^.\[\]]+")

_PARAMETERS = re.compile("param|weight", re.IGNORECASE)

Shape = tuple[object, ...]
"""What tells trees apart: paths below, and types of leaves."""


@dataclass(frozen=True, slots=True)
class FoldedValue:
    """Values in one line: how many, what one of them looks like, and the bytes of all. `like` is the path of the tree
    whose leaves have the same types."""

    path: str
    count: int
    bytes: float
    value: RecordedBorder
    like: str = ""


@dataclass(eq=False)
class PathNode:
    """A place in the tree of paths: its own path, what is below, and the value if it is a leaf."""

    path: str
    children: dict[str, PathNode] = field(default_factory=dict)
    value: RecordedBorder | None = None
    shape: Shape = ()

    @property
    def leaves(self) -> Iterator[RecordedBorder]:
        if self.value is not None:
            yield self.value
        for child in self.children.values():
            yield from child.leaves


class Folding:
    """Folds values; trees of later ones that are as earlier ones are said to be so."""

    def __init__(self) -> None:
        self._first: dict[Shape, PathNode] = {}

    def folded(self, values: Sequence[RecordedBorder]) -> list[FoldedValue]:
        """The values in few lines, in their order."""
        root = PathNode("")
        for value in values:
            _add(root, value)
        for child in root.children.values():
            _measure(child)
        self._find_first(root)
        return [row for child in root.children.values() for row in self._rows(child, child.path, 1)]

    def _find_first(self, root: PathNode) -> None:
        """The tree of each shape that is printed in full: the one nearest to the top, of several parameters."""
        level = list(root.children.values())
        while level:
            for node in sorted(level, key=lambda node: not _PARAMETERS.search(node.path)):
                if len(list(node.leaves)) > 2:
                    self._first.setdefault(node.shape, node)
            level = [child for node in level for child in node.children.values()]

    def _rows(self, node: PathNode, shown: str, times: int) -> Iterator[FoldedValue]:
        leaves = list(node.leaves)
        first = self._first.get(node.shape)
        if first is not None and first is not node:
            total = times * sum(leaf.tensor.bytes for leaf in leaves)
            yield FoldedValue(shown, times * len(leaves), total, leaves[0], first.path)
            return
        if node.value is not None:
            yield FoldedValue(shown, times, times * node.value.tensor.bytes, node.value)
        for tokens, child in _grouped(node):
            if child.value is not None and not child.children:
                count = times * len(tokens)
                yield FoldedValue(shown + _joined(tokens), count, count * child.value.tensor.bytes, child.value)
            else:
                yield from self._rows(child, shown + _joined(tokens), times * len(tokens))


def _add(root: PathNode, value: RecordedBorder) -> None:
    node, tokens = root, _TOKEN.findall(value.path)
    for token in tokens if "".join(tokens) == value.path else [value.path]:
        node = node.children.setdefault(token, PathNode(node.path + token))
    node.value = value


def _measure(node: PathNode) -> Shape:
    below = tuple((token, _measure(child)) for token, child in node.children.items())
    own = node.value.tensor.type if node.value is not None else ""
    node.shape = (own, *below)
    return node.shape


def _grouped(node: PathNode) -> Iterator[tuple[list[str], PathNode]]:
    """The children, those together that have the same shape: entries of a list, and leaves by other keys."""
    groups: dict[object, tuple[list[str], PathNode]] = {}
    for token, child in node.children.items():
        is_entry, is_leaf = bool(re.fullmatch(r"\[\d+\]", token)), not child.children
        key = (child.shape, is_entry) if is_entry or (is_leaf and token[0] == "[") else token
        groups.setdefault(key, ([], child))[0].append(token)
    yield from groups.values()


def _joined(tokens: Sequence[str]) -> str:
    """`[0..11]`, `['bias', 'scale']`."""
    if len(tokens) == 1:
        return tokens[0]
    keys = [token[1:-1] for token in tokens]
    numbers = [int(key) for key in keys if key.isdecimal()]
    if len(numbers) == len(keys) and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"[{numbers[0]}..{numbers[-1]}]"
    return f"[{', '.join(keys)}]" if len(keys) <= 4 else f"[{', '.join(keys[:3])}, ..]"


# The sections on arguments, closed-over arrays and results: what each looks like on a device.

_PLAIN = 12
"""Values up to which none are folded. Chosen: for a page of `LINES`."""

_LONG_PATH = 72
"""Columns of a path beyond which it loses its middle. Chosen: beside it there is room for a type."""

_RESULTS = 0.6
"""Lines of results beside those of arguments. Chosen: most results are arguments again."""


def border_sections(record: PlanRecord) -> list[Section]:
    """Arguments, closed-over arrays and results, with the type of each, the block of one device, and its bytes."""
    folding = Folding()
    values = ("arguments", record.arguments), ("closed-over arrays", record.closed_over), ("results", record.results)
    return [_section(title, of, folding) for title, of in values if of]


def _section(title: str, values: Sequence[RecordedBorder], folding: Folding) -> Section:
    folded = folding.folded(values)
    if len(values) <= _PLAIN:
        folded = [FoldedValue(value.path, 1, value.tensor.bytes, value) for value in values]
    rest = [value for value in folded if not value.like]
    order = {id(value): number for number, value in enumerate(sorted(folded, key=lambda value: -value.bytes))}
    shown = folded if len(folded) <= _PLAIN else sorted(folded, key=lambda value: order[id(value)])
    total = bytes_text(sum(value.bytes for value in folded))
    heading = f"{title}: {len(values)} arrays, {total} on each device" if len(rest) < len(values) else title

    def left_out(hidden: int) -> str:
        held = sum(value.bytes for value in shown[len(shown) - hidden :])
        return f"and {hidden} more, {bytes_text(held)}: plan.table('arguments')"

    weight = 1.0 if title == "arguments" else _RESULTS
    return Section(heading, [_row(value) for value in shown], {3, 4}, weight, left_out)


def _row(value: FoldedValue) -> tuple[str, ...]:
    tensor, held = value.value.tensor, bytes_text(value.bytes) if value.bytes else ""
    path = shortened(value.path, _LONG_PATH)
    if value.like:
        return path, f"as {shortened(value.like, _LONG_PATH)}", "", f"{value.count} arrays", held
    block = f"{sizes_text(tensor.local_shape)} on a device" if tensor.local_shape != tensor.shape else ""
    return path, tensor.type, block, f"x {value.count}" if value.count > 1 else "", held


# The text of a plan: one screen.

_FIXES = 3.0
"""Lines of fix-its beside those of other sections. Chosen: each is worth reading."""

LINES = 60
"""The lines of a page at most. Chosen: one screen."""


def page_of(record: PlanRecord, fixes: Sequence[str] = ()) -> str:
    """The page of a plan.

    Args:
        record: the plan.
        fixes: lines on fix-its, those that save most first.
    """
    sections = [
        Section(record.headline),
        verdict_section(record),
        device_section(record),
        most_section(record),
        *border_sections(record),
        pipelines_section(record),
        meshes_section(record),
        *automatic_sections(record),
        moves_section(record),
        host_section(record),
        collective_section(record),
        kernels_section(record),
        layouts_section(record),
        recomputed_section(record),
        blocked_section(record),
        local_sorts_section(record),
        padding_section(record),
        repeated_section(record),
        notes_section(record),
        Section("fix-its" if fixes else "", [(line,) for line in fixes], weight=_FIXES),
    ]
    return fit_in_lines(sections, LINES)
