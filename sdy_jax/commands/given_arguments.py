"""The arguments that a command line gives: types by `--args`, or what a function returns by `--args-from`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sdy_jax.commands import UsageError
from sdy_jax.commands.failures import explained
from sdy_jax.commands.literals import parse_types
from sdy_jax.commands.user_functions import UserModules, module_and_name


def given_arguments(options: argparse.Namespace, modules: UserModules) -> tuple[Any, ...] | None:
    """The arguments, as types or values; None where nothing is said of them.

    Raises:
        UsageError: what is said names no types, and no function.
        SdyError: there is no such function, or it fails.
    """
    if options.args:
        return parse_types(options.args, "--args")
    if not options.args_from:
        return None
    function, text = module_and_name(options.args_from), options.args_from
    if function is None and text.isidentifier() and (program := module_and_name(options.program)) is not None:
        function, text = (program[0], text), f"{program[0]}:{text}"
    if function is None:
        raise UsageError(f"--args-from {text}: expected module:function or file.py:function")
    with explained(text):
        returned = (_values if _runs_with_values(options) else _types)(modules.function(*function))
    return returned if type(returned) is tuple else (returned,)


def _runs_with_values(options: argparse.Namespace) -> bool:
    """Whether what the function returns is passed as it is."""
    return options.command == "run" and not options.inputs and options.random is None


def _values(make: Callable[[], Any]) -> Any:
    return make()


def _types(make: Callable[[], Any]) -> Any:
    """The types of what a function returns, which computes nothing, unless it has to look at its numbers."""
    others: list[Any] = []

    def arrays() -> list[Any]:
        leaves, tree = jax.tree.flatten(make())
        others[:] = [tree, [None if _is_array(leaf) else leaf for leaf in leaves]]
        return [leaf for leaf in leaves if _is_array(leaf)]

    try:
        types = iter(jax.eval_shape(arrays))
    except jax.errors.JAXTypeError:
        return jax.tree.map(lambda leaf: jax.typeof(leaf) if _is_array(leaf) else leaf, make())
    tree, kept = others
    return jax.tree.unflatten(tree, [next(types) if leaf is None else leaf for leaf in kept])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))
