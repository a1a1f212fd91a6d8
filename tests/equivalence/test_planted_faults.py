"""`verify` finds mistakes that are planted in strategies, rules, collectives, emission and passes, and names them."""

from collections.abc import Iterator
from types import CodeType

import pytest
from forked_verification import verified_by_forks
from planted_faults import NAME, PLANTED

import sdy_jax as sdy


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    """A process per fault, as many faults are in the way of one another."""
    with verified_by_forks():
        yield


@pytest.mark.dear(cases=13)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_named(name, monkeypatch):
    planted = PLANTED[name]
    monkeypatch.setenv("SDY_JAX_VERIFY_HOOK", "planted_faults:plant")
    monkeypatch.setenv(NAME, name)
    options = {"mesh": planted.mesh, "in_shardings": planted.specs, "out_shardings": planted.out}
    once = {"targets": [planted.target], "uneven": False, "derivatives": False, "options": planted.options}
    found = sdy.verify(planted.program, *planted.types, **options, **once)
    assert not found and len(found.faults) == 1, str(found)
    fault = found.faults[0]
    assert (fault.op, fault.culprit) == (planted.op, "sdy_jax"), found
    file, _, line = fault.source.rpartition(":")
    # What moves at the border moves for the shardings that the call of `verify` states.
    is_border = file.endswith("test_planted_faults.py")
    assert is_border or (file.endswith("planted_faults.py") and int(line) in lines_of(planted.program.__code__)), found
    assert "PROGRAM" in fault.reproducer


def lines_of(code: CodeType) -> set[int]:
    """The lines of a function, with those inside of it."""
    inner = [lines_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {line for *_, line in code.co_lines() if line is not None}.union(*inner)


@pytest.mark.more("that the programs are right without faults")
def test_without_a_fault_all_of_these_programs_are_the_same():
    """Some of them, one after the other: each of the others runs in the test of its fault."""
    for name in ("wrong halo", "bucket in another order", "ring in the wrong direction"):
        planted = PLANTED[name]
        options = {"mesh": planted.mesh, "in_shardings": planted.specs, "out_shardings": planted.out}
        found = sdy.verify(
            planted.program, *planted.types, **options, targets=[planted.target], options=planted.options
        )
        assert found, found
