"""The errors of `checkify`.

* `check_p`, `ErrorEffect` and `error_checks` of `checkify`: what a partitioned function becomes under it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
from jax._src import checkify
from jax.extend.core import Primitive

check_p: Primitive = checkify.check_p


def effects_of_checks(found: Set[Any]) -> Set[Any]:
    """Those of `checkify.check` among some effects."""
    return {effect for effect in found if isinstance(effect, checkify.ErrorEffect)}


def on_checkify(
    primitive: Primitive,
    functionalized: Callable[..., tuple[Any, Sequence[Any]]],
    may_fail: Callable[..., bool] = lambda errors, **parameters: True,
) -> None:
    """Registers what `checkify.checkify` makes of a primitive with several results.

    Args:
        primitive: the primitive.
        functionalized: the error and the results, given `(errors, *values, **parameters)`: the kinds of errors that are
            looked for and the operands.
        may_fail: whether there may be errors in it at all, given `(errors, **parameters)`.
    """

    def rule(*args: Any, **parameters: Any) -> tuple[Any, Sequence[Any]]:
        first = next(i for i, x in enumerate(args) if isinstance(x, checkify.Error))
        error, errors, *values = args[first:]
        if not may_fail(errors, **parameters):
            return error, primitive.bind(*values, **parameters)
        new, results = functionalized(errors, *values, **parameters)
        leaves, tree = jax.tree.flatten(new)
        error, _ = checkify.error_checks[check_p](*args[: first + 2], *leaves, err_tree=tree, debug=False)
        return error, results

    checkify.error_checks[primitive] = rule
