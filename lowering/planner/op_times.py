"""What the ops of a partitioned program take and which of them send, by their numbers: what outlives the planning."""

from __future__ import annotations

from typing import NamedTuple


class OpTime(NamedTuple):
    """What one execution of an op takes on a device.

    Attributes:
        op: its number among all ops of the module, in pre-order.
        time: by the cost model, but for what is sent.
        traffic: the bytes that it reads from the device's memory and writes to it; 0 where these have no price.
    """

    op: int
    time: float
    traffic: float


class SendingOp(NamedTuple):
    """The op of a collective: its number, -1 where the module does not have it; and whether the op is the collective,
    so that it may start before it is waited for. Else it sends as a part of its work."""

    op: int
    is_alone: bool


class OpTimes(NamedTuple):
    """What a partitioned program's ops take, in program order, and the op of each of its collectives, members of
    buckets one by one."""

    work: tuple[OpTime, ...] = ()
    senders: tuple[SendingOp, ...] = ()


NO_TIMES = OpTimes()
"""Of a program on local arrays."""


class WorkDone(NamedTuple):
    """What an op takes while its program is still rewritten: time and traffic as of `OpTime`, and how often it runs by
    estimate."""

    time: float
    traffic: float
    times: int

    def with_folded(self, time: float, traffic: float) -> WorkDone:
        """With so much more in all executions."""
        return self._replace(time=self.time + time / self.times, traffic=self.traffic + traffic / self.times)
