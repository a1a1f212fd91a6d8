"""What the operands of a scan are: constants, what is carried, and slices.

* `num_consts` and `num_carry` say so up to jax 0.11; since 0.12 a tree with these three parts does (`ft_in`, and
  `ft_out` of results), from which what is not used is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class ScanParts(NamedTuple):
    """How many operands of a scan are constants, and how many operands and results are carried."""

    constants: int
    carried: int
    returned: int


def scan_parts(equation: Any) -> ScanParts:
    """The parts of a scan; slices come last, of operands and of results."""
    params = equation.params
    if "ft_in" not in params:
        return ScanParts(params["num_consts"], params["num_carry"], params["num_carry"])
    constants, carried, _ = params["ft_in"].update(equation.invars).unpack()
    returned, _ = params["ft_out"].update(equation.outvars).unpack()
    return ScanParts(len(list(constants)), len(list(carried)), len(list(returned)))
