"""The mesh, lines of source, arguments, results and annotations of a recorded plan: see `record.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecordedFrame:
    """A line of the user's code: `file.py:42`, its text, and the function that it is in."""

    line: str
    text: str = ""
    function: str = ""


@dataclass(frozen=True, slots=True)
class RecordedPlace:
    """Where an op comes from.

    Attributes:
        line, text, function: of the innermost frame in a file of the user's.
        library: the line of the library that made the op for it; may be empty.
        scope: the name scopes around it, `Block_2/attention/out`; may be empty.
        primitive: what jax calls the op; may be empty.
        backward: it belongs to a derivative's backward pass.
        callers: the user's frames around `line`, inner ones first.
    """

    line: str
    text: str = ""
    function: str = ""
    library: str = ""
    scope: str = ""
    primitive: str = ""
    backward: bool = False
    callers: tuple[RecordedFrame, ...] = ()

    @property
    def frames(self) -> tuple[RecordedFrame, ...]:
        """All of the user's frames, inner ones first."""
        return RecordedFrame(self.line, self.text, self.function), *self.callers

    @property
    def lines(self) -> str:
        """`model.py:42 (flax/linen/linear.py:287)`."""
        return f"{self.line} ({self.library})" if self.library else self.line


@dataclass(frozen=True, slots=True)
class RecordedAxis:
    """A mesh axis and the number of devices along it."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class RecordedMesh:
    """The mesh: its axes, the devices where these are not in order, and what the devices call themselves."""

    axes: tuple[RecordedAxis, ...]
    device_ids: tuple[int, ...] = ()
    device_kind: str = ""

    @property
    def size(self) -> int:
        """The number of devices."""
        count = 1
        for axis in self.axes:
            count *= axis.size
        return count

    def __str__(self) -> str:
        return ", ".join(f"{axis.name}={axis.size}" for axis in self.axes)


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A value as devices hold it.

    Attributes:
        type: as jax prints it, with axes: `f32[8@data,4]{U:model}`.
        dtype: jax's short name, `f32`.
        shape: the global shape.
        axes: the axes that split each dimension, major to minor; parts of axes as `model:(1)2`.
        unreduced: the axes along which devices hold terms of it.
        local_shape: the shape of one device's block, padding included.
        bytes: of that block.
    """

    type: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    axes: tuple[tuple[str, ...], ...] = ()
    unreduced: tuple[str, ...] = ()
    local_shape: tuple[int, ...] = ()
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordedBorder:
    """An argument, a closed-over array or a result.

    Attributes:
        path: `params['w1']`, `constant 0`, `result[0]`.
        tensor: its layout.
        origin: where the layout comes from: "stated" (`in_shardings`, `out_shardings`, or the module's own), "passed"
            (the array that was passed has it), "planner" (`AUTO`), or "propagation".
        stated: what was stated, `P('data')`; empty where nothing was.
        line: where that is said.
        move: the layout in which the argument comes, where it is moved on entry; and the bytes that a device receives
            then at least.
    """

    path: str
    tensor: RecordedTensor
    origin: str = "propagation"
    stated: str = ""
    line: str = ""
    move: str = ""
    moved_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordedAnnotation:
    """A sharding that the user wrote inside of the function.

    Attributes:
        kind: "sharding_constraint", "reshard", "manual_computation", or the name of a collective.
        text: what it says: `P('data', None)`, or the shardings of a manual computation.
        type: of the value that it is written on, without axes.
        place: where.
    """

    kind: str
    text: str
    type: str
    place: RecordedPlace
