"""`AUTO`: a specification that leaves the layout of an argument or a result to the planner."""

from __future__ import annotations

from typing import Final, final


@final
class Automatic:
    """The type of `AUTO`, its only instance."""

    def __new__(cls) -> Automatic:
        return AUTO if "AUTO" in globals() else super().__new__(cls)

    def __reduce__(self) -> str:
        return "AUTO"

    def __repr__(self) -> str:
        return "AUTO"


AUTO: Final = Automatic()
"""In `in_shardings` and `out_shardings`, for one leaf or a whole tree: the planner chooses the layout, together with
those of the values inside."""
