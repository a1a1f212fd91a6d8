"""Arguments and results with equal ones folded: layers of a list into one, and trees that are as another one is.

`params['layers'][0]['w']` to `params['layers'][11]['w']` of one type are `params['layers'][0..11]['w']`, and where
`opt.mu` has the leaves and types of `params`, it is one line that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sdy_jax.plan.record.border import RecordedBorder

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
class Node:
    """A place in the tree of paths: its own path, what is below, and the value if it is a leaf."""

    path: str
    children: dict[str, Node] = field(default_factory=dict)
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
        self._first: dict[Shape, Node] = {}

    def folded(self, values: Sequence[RecordedBorder]) -> list[FoldedValue]:
        """The values in few lines, in their order."""
        root = Node("")
        for value in values:
            _add(root, value)
        for child in root.children.values():
            _measure(child)
        self._find_first(root)
        return [row for child in root.children.values() for row in self._rows(child, child.path, 1)]

    def _find_first(self, root: Node) -> None:
        """The tree of each shape that is printed in full: the one nearest to the top, of several parameters."""
        level = list(root.children.values())
        while level:
            for node in sorted(level, key=lambda node: not _PARAMETERS.search(node.path)):
                if len(list(node.leaves)) > 2:
                    self._first.setdefault(node.shape, node)
            level = [child for node in level for child in node.children.values()]

    def _rows(self, node: Node, shown: str, times: int) -> Iterator[FoldedValue]:
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


def _add(root: Node, value: RecordedBorder) -> None:
    node, tokens = root, _TOKEN.findall(value.path)
    for token in tokens if "".join(tokens) == value.path else [value.path]:
        node = node.children.setdefault(token, Node(node.path + token))
    node.value = value


def _measure(node: Node) -> Shape:
    below = tuple((token, _measure(child)) for token, child in node.children.items())
    own = node.value.tensor.type if node.value is not None else ""
    node.shape = (own, *below)
    return node.shape


def _grouped(node: Node) -> Iterator[tuple[list[str], Node]]:
    """The children, those together that have the same shape: entries of a list, and leaves by other keys."""
    groups: dict[object, tuple[list[str], Node]] = {}
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
