"""jit itself, whatever `jax.jit` is by now: users put `sdy_jax.partition`, or an object of their own, in its place.

* `jit` of `jax._src.api`: the public name may be something else before a module of ours that uses it is imported.
"""

from __future__ import annotations

from jax._src.api import jit as jit
