"""Random single ops of all families and element types, in random layouts, return what they return on one device."""

from __future__ import annotations

import pytest
from random_ops import RandomOps
from random_texts import check_ways

pytestmark = pytest.mark.usefixtures("poisoned_padding")

_OPS = 16


def fuzz(seed: int) -> dict[str, int]:
    """A module of many ops in three ways; where it fails, the first op that fails alone is told."""
    drawn = RandomOps(seed, _OPS)
    try:
        return {"numeric": _OPS * check_ways(drawn.text(), seed)["same"]}
    except AssertionError:
        for number in range(_OPS):
            check_ways(drawn.text(number), seed)
        raise


@pytest.mark.dear
@pytest.mark.parametrize("seed", range(6))
def test_random_ops_return_what_they_return_on_one_device(seed: int) -> None:
    assert fuzz(seed)["numeric"] >= 2 * _OPS


def test_an_op_is_told_alone() -> None:
    drawn = RandomOps(3, _OPS)
    assert drawn.text(2).count(" = ") < drawn.text().count(" = ")
    assert RandomOps(3, _OPS).text() == drawn.text()
