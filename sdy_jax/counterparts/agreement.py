"""Whether a kernel and its reference return the same arrays, as their types say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.annotate.arguments import match_prefix
from sdy_jax.counterparts.factors import Types
from sdy_jax.counterparts.proof import said
from sdy_jax.errors import ShardingError


def check_results(title: str, made: Any, reference_title: str, reference: Callable[..., Any], types: Types) -> None:
    """
    Args:
        title: what the kernel is called.
        made: the types of its results, in their tree.
        reference_title: what the reference is called.
        reference: a function of arrays.
        types: theirs.

    Raises:
        ShardingError: the reference fails, or returns others.
    """
    where = f"partition_like of `{title}`"
    try:
        plain = jax.eval_shape(reference, *types)
    except Exception as error:  # whatever the user's function raises
        raise ShardingError(
            f"{where}: the reference `{reference_title}` does not take its arguments: {said(error)}"
        ) from error
    ours, theirs = _by_path(made), _by_path(plain)
    for path in [*ours, *theirs]:
        if path not in ours or path not in theirs:
            has, lacks = (title, reference_title) if path in ours else (reference_title, title)
            raise ShardingError(f"{where}: `{has}` returns `{path}`, and `{lacks}` does not; both return the same tree")
        if not _are_alike(ours[path], theirs[path]):
            raise ShardingError(
                f"{where}: `{path}` is {_text(ours[path])} by `{title}`, {_text(theirs[path])} by `{reference_title}`; "
                "they have the same shapes, and floating-point numbers of any precision or else the same types"
            )


def _by_path(result: Any) -> Mapping[str, Any]:
    return {leaf.path: leaf.value for leaf in match_prefix(None, result, "result", "out_shardings")}


def _are_alike(one: Any, other: Any) -> bool:
    kinds = (jnp.floating, jnp.complexfloating)
    is_rounded = any(all(jnp.issubdtype(x.dtype, kind) for x in (one, other)) for kind in kinds)
    return one.shape == other.shape and (is_rounded or one.dtype == other.dtype)


def _text(type_: Any) -> str:
    return f"{type_.dtype}{list(type_.shape)}"
