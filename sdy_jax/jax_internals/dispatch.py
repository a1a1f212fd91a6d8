"""The calls that a jitted function's C++ does not know.

* `_cache_miss` of jitted functions: what jit's C++ asks for a call that it has not seen. Ours is asked instead, for the
  layouts of arrays, which are in the key of that cache and not in the types that jit traces by; so a call that was seen
  before costs what jit's costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
