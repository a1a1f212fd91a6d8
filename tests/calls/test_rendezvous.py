"""How a group of processes agrees: threads in the place of processes, and a dictionary in that of jax's service."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sdy_jax.calls.processes import Missing, ProcessGroup


class Service:
    """jax's service, as far as a group uses it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.sets = 0

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key], self.sets = value, self.sets + 1
            self.changed.notify_all()

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self.changed:
            return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: no such key")
            return self.values[key]


def run(count: int, program: Callable[[ProcessGroup, int], object], service: Service | None = None) -> list[object]:
    """What `program` returns in each process."""
    service = service or Service()
    members = range(3, 3 + count)
    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(lambda me: program(ProcessGroup(service, me, members), me), members)]


def missed(group: ProcessGroup, digest: str) -> tuple[int, ...]:
    with pytest.raises(Missing) as caught:
        group.agree(digest, 0.1)
    return caught.value.processes


@pytest.mark.parametrize("count", [2, 5])
def test_equal_programs_run_in_any_number_of_rounds(count: int) -> None:
    def program(group: ProcessGroup, me: int) -> list[dict[int, str]]:
        return [group.agree(digest, 10) for digest in "abacabad"]

    assert run(count, program) == [[{}] * 8] * count


def test_what_was_agreed_on_costs_nothing() -> None:
    service = Service()
    run(2, lambda group, me: [group.agree("a", 10) for _ in range(100)], service)
    assert service.sets == 3  # one by each process, and the verdict


def test_all_know_who_has_which_program_and_may_agree_afterwards() -> None:
    def program(group: ProcessGroup, me: int) -> object:
        time.sleep(0.05 * (me == 6))
        first = group.agree("b" if me == 4 else "a", 10)
        group.tell(f"{me}", "text") if me == 4 else None
        return first, group.told("4", 10), group.agree("a", 10)

    found = {3: "a", 4: "b", 5: "a", 6: "a"}
    assert run(4, program) == [(found, "text", {})] * 4


@pytest.mark.parametrize("absent", [3, 4])
def test_who_waits_in_vain_says_for_whom_and_may_come_again(absent: int) -> None:
    barrier = threading.Barrier(3)

    def program(group: ProcessGroup, me: int) -> object:
        found = () if me == absent else missed(group, "a")
        barrier.wait()
        return found, group.agree("a", 10)

    expected = [(() if me == absent else (absent,), {}) for me in (3, 4, 5)]
    assert run(3, program) == expected


def test_groups_do_not_wait_for_each_other() -> None:
    service = Service()
    pairs = [ProcessGroup(service, me, members) for members in ((0, 1), (0, 2)) for me in members]
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda group: group.agree("a", 10), pairs)] == [{}] * 4


def test_errors_of_the_service_are_not_hidden() -> None:
    class Broken(Service):
        def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
            raise RuntimeError("UNAVAILABLE: the coordinator is gone")

    with pytest.raises(RuntimeError, match="coordinator is gone"):
        ProcessGroup(Broken(), 1, (0, 1)).agree("a", 10)
