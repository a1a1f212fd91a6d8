"""Random programs with notes to the host, custom ops, `custom_partitioning`, searches and factored matrices."""

from __future__ import annotations

import pytest
from machine_models import DEVICES
from random_functions import check
from random_opaque import OPAQUE

pytestmark = pytest.mark.usefixtures("poisoned_padding")

_MACHINES = (None, *DEVICES)
_OPTIONS = ({"layouts": "local"}, {"layouts": "global"}, {"auto": True}, {"uneven": "replicate"})


def fuzz(seed: int) -> dict[str, int]:
    turn, how = divmod(seed, len(_OPTIONS))
    check(seed, 2, _MACHINES[turn % len(_MACHINES)], ops=OPAQUE, **_OPTIONS[how])
    return {"numeric": 2}


@pytest.mark.dear
@pytest.mark.parametrize("seed", range(2))
def test_random_programs_return_what_they_return_on_one_device(seed: int) -> None:
    fuzz(seed)
