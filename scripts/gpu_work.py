"""What the instructions of a program compiled for GPUs take, of which their compiler states nothing.

The longer one of their products at the chip's peak for their type, and of what they read and write at the rate of its
memory, both as published. It is the same for whoever partitioned a program, and says how much of its collectives runs
beside work (`timing.server_time`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from sdy_jax.lowering.targets.family import Chip
from sdy_jax.plan.hlo_module import HloInstruction, HloModule, arrays_of_type, bytes_of_type, called_by

SHARE = 0.6
"""Of the chip's peak, what kernels of attention reach. Published for those of TPUs and GPUs, rounded; it decides how
much of a step is attention, not which of two programs that run the same kernels is faster."""

_RUNNING = frozenset(("while", "conditional", "call"))
"""What runs computations as they are; all others are of one instruction."""

_NO_WORK = _RUNNING | {
    *("parameter", "constant", "bitcast", "get-tuple-element", "tuple"),
    *("partition-id", "replica-id", "after-all", "opt-barrier"),
}
"""What moves nothing, or does so in computations of its own."""

_PARTS = frozenset(("dynamic-slice", "slice", "gather"))
"""What reads a part of its first operand."""

_SEEN_THROUGH = frozenset(("bitcast", "reshape"))

_ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
"""Products between queries and keys: scores and values; scores again, and the gradients of the scores, the queries, the
keys and the values."""

_CONVOLVED = {
    "convForward": (2, 1),
    "convBiasActivationForward": (2, 1),
    "convBackwardInput": (0, 1),
    "convBackwardFilter": (1, 2),
}
"""Of cuDNN's convolutions, which of the two operands and the result is what the convolution makes, or its gradient, and
which is the kernel."""

_LETTERS = {"s": "i", "u": "ui"}
"""Of integers, in MLIR."""

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_SCORES = re.compile(r'"intermediate_tensor_shape": \{.*?"dimensions": \[([^\]]*)\]')


class GpuWork:
    """The seconds of an instruction of a module, without those of loops' bodies; of what is fused, of the fusion; of
    kernels of which nothing is known what they read and write."""

    def __init__(self, module: HloModule, chip: Chip):
        self._module, self._chip = module, chip
        users = [each for body in module.computations.values() for each in body if each.opcode not in _RUNNING]
        self._inside = {each.name for user in users for name in called_by(user) for each in module.computations[name]}

    def __call__(self, instruction: HloInstruction) -> float:
        if instruction.name in self._inside or instruction.opcode in _NO_WORK or instruction.opcode.endswith("-done"):
            return 0.0
        if instruction.opcode == "custom-call":
            return self._library(instruction)
        return max(self._products(instruction), self._moved(instruction) / self._chip.memory)

    def _products(self, instruction: HloInstruction) -> float:
        """The seconds of the products in an instruction, at their peaks."""
        own = self._product(instruction) if instruction.opcode == "dot" else 0.0
        return own + sum(self._products(each) for each in self._fused(instruction))

    def _product(self, product: HloInstruction) -> float:
        (dtype, sizes), contracted = self._array(product.operands[0]), _CONTRACTED.search(product.attributes)
        (_, result), *_ = _arrays(product.type)
        dims = [int(dim) for dim in re.findall(r"\d+", contracted[1])] if contracted else []
        flops = 2.0 * math.prod(result) * math.prod(sizes[dim] for dim in dims)
        return flops / self._chip.peak(dtype)

    def _library(self, call: HloInstruction) -> float:
        found = _TARGET.search(call.attributes)
        target = found[1] if found else ""
        moved = self._moved(call) / self._chip.memory
        if target == "AllocateBuffer":
            return 0.0
        if target.startswith("__cublas$"):
            return max(self._product(call), moved)
        if target in _ATTENTION:
            return max(self._attention(call, _ATTENTION[target]), moved)
        if target.removeprefix("__cudnn$") in _CONVOLVED:
            return max(self._convolution(call, *_CONVOLVED[target.removeprefix("__cudnn$")]), moved)
        return moved

    def _attention(self, call: HloInstruction, products: int) -> float:
        """Of a causal mask one half of the scores."""
        scores = _SCORES.search(call.attributes)
        assert scores  # each of these calls states it
        elements = math.prod(map(int, re.findall(r"\d+", scores[1])))
        dtype, sizes = self._array(call.operands[0])
        seen = 0.5 if '"mask_type": "CAUSAL"' in call.attributes else 1.0
        return seen * products * 2.0 * elements * sizes[-1] / (SHARE * self._chip.peak(dtype))

    def _convolution(self, call: HloInstruction, made: int, kernel: int) -> float:
        """A result takes the elements of a kernel without its own features."""
        arrays = [*map(self._array, call.operands[:2]), _arrays(call.type)[0]]
        labels = _LABELS.search(call.attributes)
        assert labels  # as above
        dtype, elements = arrays[made]
        taken = math.prod(arrays[kernel][1]) / arrays[kernel][1][labels[1].index("o")]
        return 2.0 * math.prod(elements) * taken / self._chip.peak(dtype)

    def _moved(self, instruction: HloInstruction) -> float:
        """The bytes that it reads and writes: of what is sliced the slices, of what is updated in place the updates."""
        body = self._fused(instruction) or [instruction]
        inside = _parameters(body) or instruction.operands
        operands = dict(zip(inside, instruction.operands, strict=True))
        read = sum(self._read(name, self._module.bytes_of(operand), body) for name, operand in operands.items())
        root = body[-1]
        written = [self._module.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
        return read + sum(map(self._written, written))

    def _read(self, name: str, whole: float, body: Sequence[HloInstruction]) -> float:
        """What some instructions read of a value, at most all of it."""
        names, read = {name}, 0.0
        for user in body:
            if not names.intersection(user.operands):
                continue
            if user.opcode in _SEEN_THROUGH:
                names.add(user.name)
            elif user.opcode in _PARTS and user.operands[0] in names:
                read += bytes_of_type(user.type)
            elif user.opcode not in ("dynamic-update-slice", "scatter") or user.operands[0] not in names:
                return whole
        return min(read, whole)

    def _written(self, root: HloInstruction) -> float:
        while root.opcode in _SEEN_THROUGH:
            root = self._module.instructions[root.operands[0]]
        if root.opcode == "dynamic-update-slice":
            return self._module.bytes_of(root.operands[1])
        if root.opcode == "scatter":
            return 2.0 * self._module.bytes_of(root.operands[-1])
        return bytes_of_type(root.type)

    def _fused(self, instruction: HloInstruction) -> list[HloInstruction]:
        if instruction.opcode != "fusion":
            return []
        return self._module.computations[called_by(instruction)[0]]

    def _array(self, name: str) -> tuple[str, tuple[int, ...]]:
        return _arrays(self._module.instructions[name].type)[0]


def _parameters(body: Sequence[HloInstruction]) -> list[str]:
    """Those of a computation, in order."""
    found = {int(each.operands[0]): each.name for each in body if each.opcode == "parameter"}
    return [name for _, name in sorted(found.items())]


def _arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of a type, each with its element type, as MLIR writes it, and its sizes."""
    return [(f"{_LETTERS.get(letters, letters)}{bits}", sizes) for letters, bits, sizes in arrays_of_type(type_)]
