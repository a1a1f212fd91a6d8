"""What jax does around calls of functions, jit itself among it, and tracebacks as users see them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jaxlib
from jax import export
from jax._src import config, core, distributed, source_info_util, traceback_util
from jax._src.api import jit as jit
from jax._src.array import ArrayImpl
from jax._src.interpreters.batching import batch_jaxpr
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax._src.util import register_cache

from sdy_jax.base.errors import SdyError, misfit

# The calls that a jitted function's C++ does not know.
#
# * `_cache_miss` of jitted functions: what jit's C++ asks for a call that it has not seen. Ours is asked instead, for
#   the layouts of arrays, which are in the key of that cache and not in the types that jit traces by; so a call that
#   was seen before costs what jit's costs.

CACHE_MISS = "_cache_miss"
"""The method of a jitted function that its C++ calls for what its cache does not have. It returns the result, what the
cache is to keep or None, and whether to ask again."""


def with_cache_miss(jitted: Any, cache_miss: Callable[..., tuple[Any, Any, bool]]) -> Any:
    """A function with the name and options of `jitted`, of which calls that its C++ has not seen go to `cache_miss`.

    That is, calls that differ from those before in what they are known by: the arguments' types, shardings and whether
    they are committed, static arguments, the state of tracing, the mesh of `jax.set_mesh` and settings. The function of
    `jitted` runs only where jit is disabled.
    """
    kind: Any = type(jitted)
    made = kind.__new__(kind)
    made.__dict__.update(jitted.__dict__)
    made.__setstate__({**jitted.__getstate__(), "cache_miss": cache_miss})
    return made


# What is known of functions until `jax.clear_caches`.
#
# * `register_cache`: has that clear ours with jax's own.


class KnownOfFunctions:
    """A dict for each function, equal ones share one: it ends with the function, or at `jax.clear_caches`.

    Attributes:
        cleared: how often all were cleared.
    """

    def __init__(self) -> None:
        self.cleared = 0
        self._known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
        register_cache(self, "what functions were traced to")

    def of(self, fun: Callable[..., Any]) -> dict[Any, Any] | None:
        """What is known of a function; None of an object that is no key of a weak dict."""
        try:
            return self._known.setdefault(fun, {})
        except TypeError:
            return None

    def cache_clear(self) -> None:
        """As jax asks for it."""
        self.cleared += 1
        self._known = WeakKeyDictionary()


# What `jax.vmap` maps.
#
# * `batch_jaxpr`: which results of a function are mapped; those of `jax.vmap` itself have to be told.


def mapped_results(region: Any, axis_data: Any, dims: Sequence[int | None]) -> list[bool]:
    """Per result of a closed jaxpr whether `jax.vmap` over some of its arguments maps it; all where jax cannot tell."""
    apart = dataclasses.replace(axis_data, spmd_name=None)
    try:
        _, found = batch_jaxpr(region, apart, [dim is not None for dim in dims], False)
    except NotImplementedError:  # of a `custom_partitioning` function, which only partitioned programs map
        return [True] * len(region.out_avals)
    return list(found)


# Arrays that were donated, in jaxlibs before 0.12.
#
# * The class of arrays: an array whose buffers a program has taken is known to be deleted, but jit's C++ hands it to
#   the devices again, and with several of them jaxlib 0.10 ends the process. Once its `delete` was called, jit
#   refuses it.

PASSES_DONATED = jaxlib.version.__version_info__ < (0, 12)
"""Whether jit's C++ passes on arrays that were donated. Measured (2026-11): 0.10 and 0.11 do, 0.12 refuses them."""


def delete_donated(leaves: Iterable[Any]) -> None:
    """Has jit refuse those arrays among `leaves` that were donated to a program."""
    for x in leaves:
        if x.__class__ is ArrayImpl and x.is_deleted():
            x.delete()


# `jax_debug_nans` and `jax_debug_infs`: whether results are looked at.
#
# * Their values, which `jax.config` has untyped, and without those of contexts.
# * The current trace: where jit finds such a number it calls the function that it has traced once more, outside of its
#   own trace, to hear of the op that made it.


def is_run_for_its_ops() -> bool:
    """Whether jit calls a function to find the op that makes a number which it is to report."""
    is_looked_for = config.debug_nans.value or config.debug_infs.value
    return bool(is_looked_for) and not isinstance(core.trace_ctx.trace, DynamicJaxprTrace)


# Exported functions around other modules.
#
# * `Exported._in_named_shardings` and its like: a program that is partitioned has its shardings from the partitioner.


def with_module(exported: export.Exported, module: bytes, of_derivative: Callable[[bytes], bytes]) -> export.Exported:
    """An exported function with another module, which may be called on any number of devices, and leaves the shardings
    of its arguments and results to the caller. So may its derivatives; `of_derivative` gives the modules of these."""

    def derivative(_: export.Exported) -> export.Exported:
        own = exported.vjp()
        return with_module(own, of_derivative(own.mlir_module_serialized), of_derivative)

    ins, outs = (None,) * len(exported.in_avals), (None,) * len(exported.out_avals)
    return dataclasses.replace(
        exported,
        mlir_module_serialized=module,
        nr_devices=1,
        in_shardings_hlo=ins,
        out_shardings_hlo=outs,
        _in_named_shardings=ins,
        _out_named_shardings=outs,
        _get_vjp=derivative if exported.has_vjp() else None,
    )


# The service of several processes.
#
# * `distributed.global_state`: the service through which processes compare their programs. jax has no public one.


def distributed_client() -> Any:
    """The client of the service that `jax.distributed.initialize` starts; None without one."""
    return distributed.global_state.client


# Tracebacks as users see them: without frames of ours, as jax leaves out its own.
#
# jax does so where a call enters it from outside, for the folders that are registered, unless
# `JAX_TRACEBACK_FILTERING` is off. Its public `register_exclusion` is for the source lines of ops, and not for
# tracebacks.
#
# * `source_info_util.is_user_filename`: of which files jax says lines, which its public registry only adds to.
# * `source_info_util._source_info_context`: where jax evaluates a jaxpr, as for derivatives, it says the lines of the
#   equation around, which its public `user_context` can replace by others, not by those of Python's stack.

F = TypeVar("F", bound=Callable[..., Any])

traceback_util.register_exclusion(os.path.join(os.path.dirname(os.path.dirname(__file__)), ""))
for _between in (contextlib, functools):  # their frames stand between ours
    traceback_util.register_exclusion(str(_between.__file__))

BOUNDARY = traceback_util.__name__
"""The module of the frame that `api_boundary` puts before a function: it is nobody's line."""


def api_boundary(fun: F) -> F:
    """For functions that users call: what they raise shows the user's frames, and none of ours or jax's below."""
    bounded: F = traceback_util.api_boundary(explaining_misfits(fun))
    return bounded


def explaining_misfits(fun: F) -> F:
    """A function that says of a call that it does not take what would be right; one that takes anything as it is."""
    if hasattr(fun, "__wrapped__"):  # it takes what it is given, as of a user's function whose name it has
        return fun
    parameters = inspect.signature(fun).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return fun

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fun(*args, **kwargs)
        except TypeError as error:
            is_of_this_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
            if is_of_this_call and (problem := misfit(fun, args, kwargs)) is not None:
                raise problem from None
            raise

    return call  # type: ignore[return-value]


K = TypeVar("K", bound=type)


def api_class(cls: K) -> K:
    """For dataclasses that users make: errors of what they are made of show the user's frames, as `api_boundary`."""
    made = explaining_misfits(cls.__init__)  # type: ignore[misc]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            made(self, *args, **kwargs)
        except SdyError as error:
            raise error.with_traceback(None) from None  # the generated method has no file that jax could leave out

    cls.__init__ = traceback_util.api_boundary(init)  # type: ignore[misc]
    return cls


def unfiltered() -> AbstractContextManager[Any]:
    """Inside, tracebacks are whole: for reports of our own mistakes."""
    whole: AbstractContextManager[Any] = config.traceback_filtering("off")
    return whole


def is_user_file(file: str) -> bool:
    """Whether jax gives lines of this file as those of ops: none of its own, of the standard library, or of ours."""
    found: bool = source_info_util.is_user_filename(file)
    return found


@contextmanager
def lines_of_the_stack() -> Iterator[None]:
    """Inside, the lines that jax says of ops are those of Python's stack, as they are where nothing is evaluated."""
    context = source_info_util._source_info_context
    before = context.context
    context.context = source_info_util.SourceInfo(None, before.name_stack)
    try:
        yield
    finally:
        context.context = before


# What jax reports of traces, and whether it may trace at all.
#
# `explain_cache_misses` and `log_compiles` are silent while a program is traced inside of a trace that was told of.
# `no_tracing` forbids traces of the user's function, which ours are not.

_explains = ContextVar("explains", default=False)
"""Whether jax is to explain the traces inside of one that was explained already."""


def explains_traces() -> bool:
    """Whether jax is to say why it traces a function again."""
    return bool(config.explain_cache_misses.value)


@contextmanager
def already_explained() -> Iterator[None]:
    """Without jax's own explanation of a trace; with those of traces inside."""
    token = _explains.set(True)
    try:
        with config.explain_cache_misses(False):
            yield
    finally:
        _explains.reset(token)


def forbids_traces() -> bool:
    """Whether jax is to raise where it traces a function again."""
    return bool(config.no_tracing.value)


def tracing_allowed() -> AbstractContextManager[Any]:
    """Lets jax trace what is no trace of the user's function under `jax.no_tracing`, too."""
    allowed: AbstractContextManager[Any] = config.no_tracing(False)
    return allowed


@contextmanager
def in_silence() -> Iterator[None]:
    """Without jax's messages about traces and compilations: those of the jitted function around this speak of it."""
    with config.explain_cache_misses(False), config.log_compiles(False):
        yield


def loudly(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of which jax speaks as it does now, of what is traced inside."""
    explains, logs = _explains.get() or config.explain_cache_misses.value, config.log_compiles.value

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        with config.explain_cache_misses(explains), config.log_compiles(logs):
            return fun(*args, **kwargs)

    return run
