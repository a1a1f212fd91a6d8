"""The exceptions of sdy_jax: one small tree.

`SdyError` and its subclasses report a mistake of the user; `InternalError` reports one of ours. Every message says
what was given, where (argument path, source line or MLIR location), and what would be right.
"""

from sdy_jax.base.errors import *  # noqa: F403 - what `__all__` lists there
from sdy_jax.base.errors import __all__ as __all__
