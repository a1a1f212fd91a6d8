"""Frames of what is traced lie in one chunk of Python's stack, at whatever depth it is called."""

import resource
from collections.abc import Callable

import pytest

from sdy_jax.calls.planned_function import with_room

CALLS, DEPTHS = 500, range(300)


def faults(run: Callable[[], object]) -> int:
    """Pages that were touched for the first time, as those of a chunk that was mapped anew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def deep(depth: int, run: Callable[[], object]) -> object:
    return run() if depth == 0 else deep(depth - 1, run)


def leaf(a: int = 0, b: int = 0, c: int = 0) -> int:
    return a + b + c


def calls_of_leaves() -> None:
    for _ in range(CALLS):
        leaf()


def most_faults(run: Callable[[], object]) -> int:
    return max(deep(depth, lambda: faults(run)) for depth in DEPTHS)  # type: ignore[type-var]


def test_calls_map_no_memory_at_any_depth() -> None:
    with_room(calls_of_leaves)()
    assert most_faults(calls_of_leaves) >= CALLS, "Python has chunks of another size: room is of no use, or not tested"
    assert most_faults(with_room(calls_of_leaves)) < CALLS / 5


def test_what_is_returned_and_raised_is_the_functions() -> None:
    @with_room
    def function(a: int, *, b: int) -> int:
        """Divides."""
        return a // b

    assert function(7, b=2) == 3
    assert function.__name__ == "function" and function.__doc__ == "Divides."
    with pytest.raises(ZeroDivisionError):
        function(1, b=0)


def test_a_function_may_call_itself_with_room() -> None:
    @with_room
    def count(n: int) -> int:
        return 0 if n == 0 else 1 + count(n - 1)

    assert count(200) == 200
