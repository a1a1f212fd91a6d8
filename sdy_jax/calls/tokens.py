"""jax's tokens as arguments and results. They hold nothing, so the function is partitioned without them: where one is
passed or returned, the trees have a node without leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from sdy_jax.annotate.arguments import is_token


@jax.tree_util.register_static
class _InPlaceOfToken:
    """A node without leaves."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InPlaceOfToken)

    def __hash__(self) -> int:
        return hash(_InPlaceOfToken)


_IN_PLACE = _InPlaceOfToken()


def without_tokens(tree: Any) -> Any:
    """The tree without its tokens."""
    return jax.tree.map(lambda x: _IN_PLACE if is_token(x) else x, tree)


def with_tokens(tree: Any) -> Any:
    """The tree with new tokens where there were some."""
    return jax.tree.map(
        lambda x: jax.lax.create_token() if isinstance(x, _InPlaceOfToken) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _InPlaceOfToken),
    )


def of_others(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of what is no token, which returns what is none."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        return without_tokens(fun(*with_tokens(args), **with_tokens(kwargs)))

    return run
