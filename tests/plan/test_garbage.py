"""Python looks for garbage of planning rarely, and in the end always."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from sdy_jax.plan import build
from sdy_jax.plan.build import collection_paused


class Linked:
    """An object of a circle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def none_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    are_frozen = gc.get_freeze_count() > build._OF_PYTHON
    gc.unfreeze()
    gc.collect()
    monkeypatch.setattr(build, "_waiting", 0)
    monkeypatch.setattr(build, "_others_freeze", False)
    yield
    (gc.freeze if are_frozen else gc.unfreeze)()


def circles(count: int) -> list[weakref.ref[Linked]]:
    """What is garbage already."""
    return [weakref.ref(Linked()) for _ in range(count)]


def alive(found: list[weakref.ref[Linked]]) -> int:
    return sum(one() is not None for one in found)


def test_a_plans_objects_are_not_looked_through_when_it_is_done() -> None:
    with collection_paused():
        found = circles(5000)
    assert gc.isenabled() and alive(found) == 5000
    assert not any(isinstance(one, Linked) for young in (0, 1) for one in gc.get_objects(young))
    gc.collect()
    assert not alive(found)


def test_once_many_wait_all_are_looked_through_before_more_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_MANY", 25_000)
    kept, seen = list[list[weakref.ref[Linked]]](), []
    for _ in range(4):
        with collection_paused():
            seen.append(sum(map(alive, kept)))
            kept.append(circles(5000))  # each with what refers to it
    assert seen == [0, 5000, 10_000, 0]


def test_what_makes_very_many_objects_is_looked_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_MANY", 1000)
    with collection_paused():
        found = circles(5000)
    list(map(list, [[]] * 2000))  # enough for Python to look
    assert not alive(found)


def test_what_the_user_froze_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    with collection_paused():
        circles(100)
    assert gc.get_freeze_count() == frozen
    with monkeypatch.context() as patch, collection_paused():
        patch.delattr(build.gc, "get_freeze_count")  # which takes long where much is frozen: asked once
        circles(100)
    assert gc.get_freeze_count() == pytest.approx(frozen, abs=100)


def test_a_pause_within_a_pause_ends_with_the_outer_one() -> None:
    with collection_paused():
        with collection_paused():
            found = circles(100)
        assert not gc.isenabled() and alive(found) == 100
    assert gc.isenabled()


def test_an_interrupt_behind_planning_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(build.gc, "get_freeze_count", interrupted)
    with pytest.raises(KeyboardInterrupt), collection_paused():
        pass
    assert gc.isenabled()
    monkeypatch.undo()
