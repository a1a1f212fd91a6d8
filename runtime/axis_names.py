"""Names of mesh axes that compilers take."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from sdy_jax.errors import UnsupportedError

_TAKES_ASCII_ONLY = version("jaxlib").startswith("0.10.")


def check_axis_names(names: Iterable[str]) -> None:
    """Refuses names of which XLA would end the process: it reads the escapes of its own printer wrongly.

    jaxlib 0.10 dies of what is not ASCII, 0.12 of backslashes; `jax.jit` likewise.

    Raises:
        UnsupportedError: such a name.
    """
    for name in names:
        if "\\" in name or (_TAKES_ASCII_ONLY and not name.isascii()):
            raise UnsupportedError(
                f"mesh axis {name!r} cannot be compiled: XLA ends the process at such a name, in jax.jit too; to fix: "
                "name the axis in ASCII letters"
            )
