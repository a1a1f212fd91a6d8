"""Random programs on random meshes and shardings: the same numbers partitioned as on one device.

Matrices of all sizes, even or not; inside of a program any dimension is split over any axes.
"""

import pytest
from machine_models import DEVICES
from random_functions import check

pytestmark = pytest.mark.usefixtures("poisoned_padding")


OPTIONS = ({"layouts": "local"}, {"layouts": "global", "memory": "1GiB"}, {"layouts": "global"})
"""Layouts chosen op by op, and for the whole program: with much memory, and with no more than op by op."""

OTHERS = (
    {"auto": True},
    {"layouts": "propagated"},
    {"uneven": "replicate"},
    {"combine": True},
)
"""Options that less is tried with."""


MACHINES = (None, *DEVICES)


def fuzz(seed):
    turn, how = divmod(seed, len(options := (*OPTIONS, *OTHERS)))
    check(seed, 3, MACHINES[turn % len(MACHINES)], **options[how])
    return {"numeric": 3}


def test_random_programs():
    check(0, 10, layouts="local")


@pytest.mark.dear
@pytest.mark.parametrize("options", OPTIONS[1:], ids=["much memory", "no more than op by op"])
def test_random_programs_whose_layouts_are_chosen_together(options):
    check(2, 5, **options)


@pytest.mark.dear
@pytest.mark.parametrize("machine", DEVICES)
def test_random_programs_as_they_are_planned_for_machines(machine):
    check(3, 4, machine, layouts="global", memory="1GiB")


@pytest.mark.more("other options")
@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_random_programs_with_other_options(options):
    check(5, 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=["local", "much memory", "no more than op by op"])
def test_many_random_programs(options):
    check(1, 300, **options)
