"""Arrays that were donated, in jaxlibs before 0.12.

* The class of arrays: an array whose buffers a program has taken is known to be deleted, but jit's C++ hands it to the
  devices again, and with several of them jaxlib 0.10 ends the process. Once its `delete` was called, jit refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jaxlib
from jax._src.array import ArrayImpl

PASSES_DONATED = jaxlib.version.__version_info__ < (0, 12)
"""Whether jit's C++ passes on arrays that were donated. Measured (2026-11): 0.10 and 0.11 do, 0.12 refuses them."""


def delete_donated(leaves: Iterable[Any]) -> None:
    """Has jit refuse those arrays among `leaves` that were donated to a program."""
    for x in leaves:
        if x.__class__ is ArrayImpl and x.is_deleted():
            x.delete()
