"""Rooms that others know of only by what they register: the mesh and shard dialects.

They bring sharding rules, emitters, passes and checks of their own, which stand in the same registries as those of
StableHLO and SDY. The rooms below them must not import them, so each registry asks for them here before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

F = TypeVar("F")

_EXTENSIONS = ("sdy_jax.lowering.strategies", "sdy_jax.shard.registration", "sdy_jax.partitioning.registration")

_FUNCTIONS = {
    "analyze": "sdy_jax.measuring.analyze",
    "as_html": "sdy_jax.plan_page.terminal",
    "coloured": "sdy_jax.plan_page.terminal",
    "drawing_of": "sdy_jax.plan_page.drawing",
    "fixes": "sdy_jax.fixes.fixes",
    "loads": "sdy_jax.loading.load",
    "page_of": "sdy_jax.plan_page.page",
    "partition_into_reshards": "sdy_jax.partitioning.reshards",
    "run_local": "sdy_jax.shard.local_program",
    "show": "sdy_jax.plan_page.terminal",
    "table_of": "sdy_jax.plan_page.tables",
    "write_page": "sdy_jax.plan_html.page",
    "why_not_layout": "sdy_jax.fixes.asked",
}
"""What methods of a class, or options of a pass, offer that rooms above do."""


@cache
def load_extensions() -> None:
    """Imports what registers itself, once."""
    for module in _EXTENSIONS:
        import_module(module)


def registered(table: dict[str, F], names: Iterable[str], what: str) -> Callable[[F], F]:
    """A decorator that puts a function into a table under each of some names; `what` two of one name would be."""

    def register(function: F) -> F:
        for name in names:
            assert name not in table, f"two {what} for {name}"
            table[name] = function
        return function

    return register


def extension(name: str) -> Any:
    """A function of a room above, for a method or option that is nothing but this function."""
    return getattr(import_module(_FUNCTIONS[name]), name)
