"""All processes of a mesh compare a program before it runs, and each of them raises where it is not the same in all.

jax compares nothing: processes that run different programs exchange what these happen to send, and end with wrong
numbers, or wait forever.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import jax

from sdy_jax.errors import ProcessError, SdyError
from sdy_jax.jax_internals.processes import distributed_client
from sdy_jax.plan.plan import Plan
from sdy_jax.processes.difference import Description, difference
from sdy_jax.processes.rendezvous import Failed, Group, Missing, Service
from sdy_jax.representation.named import AnyMesh

VARIABLE = "SDY_JAX_PROCESS_TIMEOUT"

_DEFAULT = 300.0
"""Seconds to wait for a process, which may be reading a checkpoint. Published (`jax.distributed.initialize`, whose
default it is): with less, slow hosts are taken for missing ones."""

_DETAILS = 30.0
"""Seconds to wait for what another process says of its program. Guessed: it has that at hand, unless it has died, and
then the error comes that much later."""


def are_several() -> bool:
    """Whether there are other processes that could run something else."""
    return jax.process_count() > 1 and distributed_client() is not None


def compare(plan: Plan, mesh: AnyMesh) -> None:
    """Waits until all processes of the mesh are about to run this program. Returns at once where that was found out
    before, in a single process, and in one that has no devices of the mesh.

    Raises:
        ProcessError: it is not the same in all of them, or some do not come.
    """
    timeout = _timeout()
    if not timeout or not are_several() or not isinstance(mesh, jax.sharding.Mesh):
        return
    members, me = sorted({device.process_index for device in mesh.devices.flat}), jax.process_index()
    if me not in members or len(members) == 1:
        return
    group = _group(distributed_client(), me, tuple(members))
    description = Description.of(plan, [device.id for device in mesh.devices.flat])
    try:
        digests = group.agree(description.digest, timeout)
    except Missing as missing:
        raise ProcessError(_missing_message(plan.name, missing.processes, timeout)) from None
    except Failed as failed:
        raise ProcessError(
            f"process {failed.process} ended before it came to `{plan.name}`, by {failed.error}. To fix: see its output"
        ) from None
    if digests:
        raise ProcessError(_message(group, me, description, digests))


@lru_cache(maxsize=64)
def _group(service: Service, me: int, members: tuple[int, ...]) -> Group:
    return Group(service, me, members)


def _timeout() -> float:
    text = os.environ.get(VARIABLE, "")
    try:
        found = float(text) if text else _DEFAULT
    except ValueError:
        found = -1.0
    if found < 0:
        raise SdyError(f"{VARIABLE}={text}; expected seconds, or 0 for processes that are not to be compared")
    return found


def _message(group: Group, me: int, own: Description, digests: Mapping[int, str]) -> str:
    """Which process differs from most, and where. The first process with each program says what that is."""
    firsts = {digest: process for process, digest in sorted(digests.items(), reverse=True)}
    if firsts.get(own.digest) == me:
        group.tell(own.digest, own.packed())
    counts = Counter(digests.values())
    usual = max(counts, key=lambda digest: (counts[digest], -firsts[digest]))
    odd = min((digest for digest in counts if digest != usual), key=firsts.__getitem__)
    alike, others = ([p for p, d in sorted(digests.items()) if d == digest] for digest in (usual, odd))
    told = [group.told(digest, _DETAILS) for digest in (usual, odd)]
    return _difference_message(alike, others, [Description.unpacked(text) if text else None for text in told])


def _difference_message(alike: Sequence[int], others: Sequence[int], told: Sequence[Description | None]) -> str:
    first, second = told
    if first is None or second is None:
        names, where = "programs", "what they say of theirs does not come"
    else:
        names = f"`{first.name}`" if first.name == second.name else f"`{second.name}` and `{first.name}`"
        where = difference(alike[0], first, others[0], second)
    return (
        f"{_processes(others)} {'is' if len(others) == 1 else 'are'} about to run another program than "
        f"{_processes(alike)}, {names}: {where}. To fix: call the same functions, with the same options and types, in "
        "the same order in all processes"
    )


def _missing_message(name: str, missing: Sequence[int], timeout: float) -> str:
    theirs = "that process" if len(missing) == 1 else "those processes"
    return (
        f"{_processes(missing)} did not come to `{name}` within {timeout:g} s, whose mesh has devices of {theirs}. To "
        f"fix: call it in all processes of its mesh, or wait longer by {VARIABLE}=SECONDS in the environment; with 0, "
        "programs are not compared"
    )


def _processes(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    if not others:
        return f"process {last}"
    some = others if len(others) < 8 else [*others[:7], "..."]
    return f"processes {', '.join(some)} and {last}"
