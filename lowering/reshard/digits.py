"""Where an axis, or an atom, cuts a tensor, and what devices that differ in it have to send each other for another cut.

An axis of g devices behind others cuts a dimension into blocks whose number, modulo g, is the device's digit.
"""

from __future__ import annotations

from typing import NamedTuple


class Digit(NamedTuple):
    """The dimension that an axis cuts, and in how many blocks the axes before it cut that."""

    dim: int
    blocks: int


def received_along(size: int, have: Digit | None, want: Digit | None) -> float:
    """What a device receives at least from devices that differ from it in an axis, in blocks that all axes cut.

    The devices with one digit need together what they want and none of them has, and each different block of it is
    received by one of them: there are no more of these than devices.

    Args:
        size: the devices along the axis.
        have, want: where it cuts the tensor before and after; None where all devices along it have, or want, the same.

    >>> received_along(2, Digit(0, 1), None), received_along(2, Digit(0, 1), Digit(1, 1))
    (1.0, 0.5)
    """
    if have is None or have == want:
        return 0.0
    if want is None:
        return size - 1.0
    few, many = sorted((have.blocks, want.blocks))
    are_apart = have.dim != want.dim or many % (few * size) == 0  # else one digit says something of the other
    return 1 - 1 / size if are_apart else 0.0
