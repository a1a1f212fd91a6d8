"""`sdy_jax.partition` in the place of `jax.jit`, for code that cannot be changed, and back again.

Who asks for `jax.jit` says which: code of the chosen modules gets functions that are partitioned, all other code, jax's
own first, gets jit. So `jax.jit` is one function as long as anything is installed, and looks at its caller.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType, TracebackType
from typing import Any

import jax

from sdy_jax.annotate.site import traced_manual_axes
from sdy_jax.base.jax_calls import CACHE_MISS, jit
from sdy_jax.base.tracebacks import api_boundary
from sdy_jax.calls.options import Options
from sdy_jax.calls.partitioned_function import P, PartitionedFunction, R
from sdy_jax.calls.traced_function import traced_on
from sdy_jax.errors import ArgumentError

_OF_JIT = ("in_shardings", "out_shardings", "static_argnums", "static_argnames")
"""The options of jit beside `Options.of_jit`."""

_NEVER = frozenset({"jax", "jaxlib", "sdy_jax"})
"""Packages whose functions are never replaced."""


class InstalledFunction(PartitionedFunction[P, R]):
    """A function that code has asked jit for: partitioned in calls that know a mesh, else what jit makes of it."""

    @functools.cached_property
    def _by_jit(self) -> Any:
        options = self._function.options
        stated = {name: getattr(options, name) for name in _OF_JIT}
        return jit(self._function.fun, **stated, **options.of_jit)

    def _is_by_jit(self, args: Any, kwargs: Any) -> bool:
        """Whether this call is jit's: no mesh is known, or another function of ours is being traced, of which this is a
        part as under jit."""
        is_part = traced_on() is not None or bool(traced_manual_axes())
        return is_part or not self._function.knows_mesh(args, kwargs)

    @api_boundary
    def _missed(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        if self._is_by_jit(args, kwargs):
            found: tuple[Any, Any, bool] = getattr(self._by_jit, CACHE_MISS)(*args, **kwargs)
            return found
        return super()._missed(*args, **kwargs)

    @api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As jit's, or of the partitioned function."""
        return (self._by_jit.trace if self._is_by_jit(args, kwargs) else super().trace)(*args, **kwargs)

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As jit's, or of the partitioned function."""
        return (self._by_jit.lower if self._is_by_jit(args, kwargs) else super().lower)(*args, **kwargs)

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As jit's, or of the partitioned function."""
        return (self._by_jit.eval_shape if self._is_by_jit(args, kwargs) else super().eval_shape)(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets plans and compiled programs."""
        super().clear_cache()
        self._by_jit.clear_cache()


class Installation:
    """What `install` has put in place of jit, until `uninstall()` or the end of a `with` block.

    Example:
        with sdy.install("trainer"):
            ...

    See also:
        `install`: makes it.
    """

    def __init__(self, modules: tuple[str, ...], options: dict[str, Any]):
        self._modules, self._options = modules, options

    def covers(self, module: str) -> bool:
        """Whether the code of a module gets partitioned functions."""
        if module.partition(".")[0] in _NEVER:
            return False
        return not self._modules or any(module == name or module.startswith(f"{name}.") for name in self._modules)

    def function(self, fun: Callable[P, R], options: dict[str, Any]) -> InstalledFunction[P, R]:
        """What the code of such a module gets for a function and options of jit."""
        return InstalledFunction(fun, Options(**{**self._options, **options}))

    def uninstall(self) -> None:
        """Has everybody get jit again; functions that were made stay as they are. A second time it does nothing."""
        if self not in _installed:
            return
        _installed.remove(self)
        while not _installed and _replaced:
            namespace, name, before = _replaced.pop()
            if namespace.get(name) is _jit:
                namespace[name] = before

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        where = ", ".join(self._modules) or "all modules"
        return f"<sdy_jax in place of jax.jit in {where}{'' if self in _installed else ', uninstalled'}>"

    def install(self) -> None:
        """Puts `partition` in place of jit."""
        _installed.append(self)
        modules = [(name, vars(each)) for name, each in [*sys.modules.items()] if isinstance(each, ModuleType)]
        imported = [(own, key) for name, own in modules if self.covers(name) for key in own if own[key] is jit]
        for namespace, key in ((vars(jax), "jit"), *imported):
            if namespace[key] is not _jit:
                _replaced.append((namespace, key, namespace[key]))
                namespace[key] = _jit


_installed: list[Installation] = []
"""What is installed, the newest last."""

_replaced: list[tuple[dict[str, Any], str, Any]] = []
"""The names that stood for jit, `jax.jit` first, and what they stood for."""


@functools.wraps(jit)
def _jit(*args: Any, **options: Any) -> Any:
    """`jax.jit` while something is installed: the newest that covers the caller's module decides."""
    module = sys._getframe(1).f_globals.get("__name__", "")
    found = next((each for each in reversed(_installed) if each.covers(module)), None)
    if found is None or not _KNOWN_TO_PARTITION.issuperset(options) or len(args) > 1:
        return (_replaced[0][2] if _replaced else jit)(*args, **options)
    return found.function(args[0], options) if args else lambda fun: found.function(fun, options)


_KNOWN_TO_PARTITION = frozenset({*_OF_JIT, *Options().of_jit})
"""Those of jit's options that say nothing of devices; with others a function stays jit's."""


def install(*modules: str | ModuleType, **options: Any) -> Installation:
    """Puts `partition` in place of `jax.jit`: for code that cannot be changed.

    A call is partitioned where it knows a mesh: by the function's `in_shardings` or `out_shardings`, by `jax.set_mesh`
    or `with mesh:` around it, or by an array on a mesh among its arguments. All else stays jit's: calls without any
    mesh (also where only constraints inside of the function name one), functions with `device=` or `backend=`, jitted
    functions that partitioned ones call (they are planned as parts of these), those inside of `jax.shard_map`, and
    jax's own. Functions that were jitted before stay what they are: install before the code is imported that jits at
    import.

    Args:
        *modules: modules, by name or themselves, whose code gets partitioned functions; a package with all that is in
            it. Without any, all but jax.
        **options: of `partition`, for all these functions: `costs=`, `memory=`, `on_unknown=` and the like; none of
            jit's, and no `mesh=`.

    Returns:
        An `Installation`: its `uninstall()` undoes it, as does the end of a `with` block.

    Raises:
        ArgumentError: an option that `partition` has not, or that code says itself.

    Example:
        with sdy.install("trainer"):
            import trainer  # what it jits is partitioned

            trainer.main()

    See also:
        `partition`: what it makes of functions.
    """
    names = tuple(module.__name__ if isinstance(module, ModuleType) else module for module in modules)
    if wrong := next((name for name in names if not isinstance(name, str)), None):
        raise ArgumentError(f"install got {wrong!r}; expected modules, or their names, as in install('trainer')")
    known = {field.name for field in fields(Options)} - {"mesh", "mesh_in_context", *_KNOWN_TO_PARTITION}
    if unknown := [name for name in options if name not in known]:
        raise ArgumentError(f"install has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    Options(**options).check()
    made = Installation(names, options)
    made.install()
    return made
