"""Global arrays in and out: where the leaves of the arguments are found, and how the results are put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, PyTreeDef, SequenceKey

from sdy_jax.python_source.expressions import tuple_text
from sdy_jax.python_source.names import identifier


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of the function of global arrays, and an expression for each leaf of its arguments."""

    positional: tuple[str, ...]
    named: tuple[str, ...]
    leaves: tuple[str, ...]
    trees: tuple[tuple[PyTreeDef, str], ...]
    """The parts of the arguments that are no tuples, lists or dictionaries, by their structure."""

    @property
    def text(self) -> str:
        return ", ".join([*self.positional, *(["*", *self.named] if self.named else [])])


def signature_of(tree: PyTreeDef, paths: Sequence[str]) -> Signature:
    """The signature of a function of positional and keyword arguments; `paths` say what the user calls the leaves."""
    args, kwargs = jax.tree.unflatten(tree, map(_Index, range(tree.num_leaves)))
    names: list[str] = []
    for number, arg in enumerate(args):
        found = jax.tree.leaves(arg)
        root = identifier(paths[found[0].number].partition("[")[0].partition(".")[0]) if found else f"arg{number}"
        names.append(root if root not in names and root not in kwargs else f"{root}_{number}")
    roots = [*zip(names, args, strict=True), *kwargs.items()]
    leaves = {leaf: text for root, value in roots for leaf, text in _leaves(root, value)}
    trees = tuple(found for root, value in roots for found in _special(root, value))
    return Signature(tuple(names), tuple(kwargs), tuple(leaves[i] for i in range(tree.num_leaves)), trees)


def _leaves(root: str, value: Any) -> Iterator[tuple[int, str]]:
    """Each leaf of an argument, and an expression for it."""
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(value)):
        steps = [_step(key) for key in path]
        yield leaf.number, f"jax.tree.leaves({root})[{number}]" if None in steps else root + "".join(map(str, steps))


def _step(key: Any) -> str | None:
    """One key of a path, as Python takes it; None for what only pytrees know."""
    if isinstance(key, DictKey) and isinstance(key.key, (str, int)):
        return f"[{_quoted(key.key)}]"
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, GetAttrKey):
        return f".{key.name}"
    return None


def _quoted(key: str | int) -> str:
    return f'"{key}"' if isinstance(key, str) and key.isprintable() and not set(key) & set('"\\') else repr(key)


def _special(root: str, value: Any) -> Iterator[tuple[PyTreeDef, str]]:
    if type(value) in (tuple, list):
        for number, item in enumerate(value):
            yield from _special(f"{root}[{number}]", item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _special(f"{root}[{_quoted(key)}]", item)
    elif value is not None and not isinstance(value, _Index):
        yield jax.tree.structure(value), root


def result_text(tree: PyTreeDef, leaves: Sequence[str], known: Sequence[tuple[PyTreeDef, str]]) -> str:
    """The results in their tree. What is no tuple, list or dictionary is made like an argument of its structure, or is
    a tuple of its leaves where there is none."""
    return _tree_text(jax.tree.unflatten(tree, [_Leaf(text) for text in leaves]), known)


@dataclass(frozen=True, slots=True)
class _Leaf:
    text: str


@dataclass(frozen=True, slots=True)
class _Index:
    """A leaf by its number; no number itself, of which a node may make an array."""

    number: int


def _tree_text(value: Any, known: Sequence[tuple[PyTreeDef, str]]) -> str:
    if isinstance(value, _Leaf):
        return value.text
    if value is None:
        return "None"
    if type(value) is dict:
        return f"{{{', '.join(f'{_quoted(key)}: {_tree_text(item, known)}' for key, item in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(_tree_text(item, known) for item in value)}]"
    if type(value) is tuple:
        return tuple_text([_tree_text(item, known) for item in value]) if value else "()"
    leaves = [leaf.text for leaf in jax.tree.leaves(value)]
    structure = jax.tree.structure(value)
    alike = next((text for tree, text in known if tree == structure), None)
    if alike is not None:
        return f"jax.tree.unflatten(jax.tree.structure({alike}), [{', '.join(leaves)}])"
    return tuple_text(leaves) if leaves else "()"
