"""What plans and their records offer to be read: the page, tables, drawings, and where these are shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sdy_jax.ir.extensions import Extension
from sdy_jax.jax_internals.tracebacks import api_boundary

TABLE_OF: Extension[Callable[[Any, str], Any]] = Extension("table_of")
DRAWING_OF: Extension[Callable[[Any, str], Any]] = Extension("drawing_of")
SHOW: Extension[Callable[[str], None]] = Extension("show")
COLOURED: Extension[Callable[[str], Any]] = Extension("coloured")
AS_HTML: Extension[Callable[[str], str]] = Extension("as_html")


class Printed:
    """A plan, or the record of one, whose `str` is its page and which `record()` says as plain data."""

    def record(self) -> Any:
        """All that is printed."""
        raise NotImplementedError

    @api_boundary
    def table(self, name: str) -> Any:
        """All rows of one kind, which the page folds.

        Args:
            name: "collectives", "ops", "values", "arguments" (with results), "memory" (at the peak), "meshes" (of
                several those that were compared), or "pipelines" (a row per stage).

        Returns:
            A `Table` to print; iterating over it gives its rows, which are named tuples.

        Raises:
            SdyError: there is no such table.

        Example:
            print(plan.table("collectives"))
            most = max(plan.table("arguments"), key=lambda row: row.bytes)
        """
        return TABLE_OF.function(self.record(), name)

    @api_boundary
    def draw(self, value: str) -> Any:
        """The devices that hold each block of an argument or result, to print.

        Args:
            value: a path, `params['w1']`, or a name in `plan.table("values")`.

        Raises:
            SdyError: there is no such value, or more than two of its dimensions are split.

        Example:
            print(plan.draw("params['w1']"))
        """
        return DRAWING_OF.function(self.record(), value)

    def show(self) -> None:
        """Prints the page, in colours where standard output is a terminal and `rich` is installed."""
        SHOW.function(str(self))

    def __rich__(self) -> Any:
        return COLOURED.function(str(self))

    def _repr_html_(self) -> str:
        return AS_HTML.function(str(self))
