"""How many operands of a `scan` are constants of its loop.

* `flattree`: in jax 0.12 the parameters of the primitive say so by a tree of operands, in 0.10 by a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def scan_constants(parameters: Mapping[str, Any]) -> int:
    """How many operands of a `scan` come before what it carries."""
    if "num_consts" in parameters:
        return int(parameters["num_consts"])
    return len(parameters["ft_in"].unpack()[0])


def with_scan_constants(parameters: Mapping[str, Any], more: int) -> dict[str, Any]:
    """The parameters of a `scan` that say how many these are, where there are so many more."""
    if "num_consts" in parameters:
        return {"num_consts": parameters["num_consts"] + more}
    from jax._src import flattree  # type: ignore[attr-defined, unused-ignore]

    constants, *rest = parameters["ft_in"].unpack()
    return {"ft_in": flattree.pack((flattree.nones(len(constants) + more), *rest))}
