"""Random ops with regions through which values flow: loops, branches, barriers, computations.

Each takes the program and the block that it appends to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from random_programs.block import TOKEN, Block, Named
from random_programs.tensors import Tensor

if TYPE_CHECKING:
    from random_programs.program import RandomProgram

_COUNTER = Tensor((), "i32")


def optimization_barrier(program: RandomProgram, block: Block) -> None:
    values = [block.pick() for _ in range(block.rng.randint(1, 3))]
    tokens = block.tokens[-1:] if program.chance(0.5) else []
    types = [str(v.tensor) for v in values] + [TOKEN] * len(tokens)
    names = [v.name for v in values] + tokens
    result = block.name()
    given = program.per_value([v.tensor for v in values] + [None] * len(tokens))
    block.lines.append(
        f'{result}:{len(names)} = "stablehlo.optimization_barrier"({", ".join(names)}){given} : '
        f"({', '.join(types)}) -> ({', '.join(types)})"
    )
    program.bring_in(block, result, [v.tensor for v in values], len(names))


def loop(program: RandomProgram, block: Block) -> None:
    carried = [block.pick() for _ in range(block.rng.randint(1, 3))]
    tensors = [_COUNTER, *(v.tensor for v in carried)]
    tokens = block.tokens[-1:] if program.chance(0.3) else []
    start = block.emit("stablehlo.constant dense<0> : tensor<i32>", _COUNTER)
    types = [*map(str, tensors), *[TOKEN] * len(tokens)]

    arguments = [Named(block.name(), t) for t in tensors]
    heading = _heading(arguments, [block.name() for _ in tokens])
    condition = block.inner(arguments)
    for _ in range(block.rng.choice((0, 0, 1, 2))):
        program.op(condition)
    limit = condition.emit("stablehlo.constant dense<4> : tensor<i32>", _COUNTER)
    test = condition.emit(
        f"stablehlo.compare LT, {arguments[0].name}, {limit.name} : (tensor<i32>, tensor<i32>) -> tensor<i1>",
        Tensor((), "i1"),
    )
    condition.lines.append(f"stablehlo.return {test.name} : tensor<i1>")

    variables = [Named(block.name(), t) for t in tensors]
    inner_tokens = [block.name() for _ in tokens]
    body = block.inner(variables)
    body.tokens = list(inner_tokens)
    program.ops(body, 1, 4)
    counter = _increased(body, variables[0]) if program.runs else variables[0]
    returned = [counter.name, *(program.of_type(body, t).name for t in tensors[1:]), *inner_tokens]
    body.lines.append(f"stablehlo.return {', '.join(returned)} : {', '.join(types)}")

    result = block.name()
    operands = [start.name, *(v.name for v in carried), *tokens]
    given = program.per_value([*tensors, *[None] * len(tokens)])
    block.lines += [
        f'{result}:{len(operands)} = "stablehlo.while"({", ".join(operands)}) ({{',
        f"{heading}:",
        *condition.lines,
        "}, {",
        f"{_heading(variables, inner_tokens)}:",
        *body.lines,
        f"}}){given} : ({', '.join(types)}) -> ({', '.join(types)})",
    ]
    program.bring_in(block, result, tensors, len(operands))


def _increased(block: Block, counter: Named) -> Named:
    one = block.emit("stablehlo.constant dense<1> : tensor<i32>", _COUNTER)
    return block.emit(f"stablehlo.add {counter.name}, {one.name} : {_COUNTER}", _COUNTER)


def _heading(arguments: list[Named], tokens: list[str]) -> str:
    texts = [f"{a.name}: {a.tensor}" for a in arguments] + [f"{t}: {TOKEN}" for t in tokens]
    return f"^bb0({', '.join(texts)})"


def case(program: RandomProgram, block: Block) -> None:
    _branches(program, block, "stablehlo.case", _COUNTER, block.rng.randint(1, 3))


def if_(program: RandomProgram, block: Block) -> None:
    _branches(program, block, "stablehlo.if", Tensor((), "i1"), 2)


def _branches(program: RandomProgram, block: Block, name: str, index: Tensor, count: int) -> None:
    tensors = [block.pick().tensor for _ in range(block.rng.randint(1, 2))]
    selector = block.operand(index)
    branches = []
    for _ in range(count):
        branch = block.inner([])
        program.ops(branch, 0, 3)
        returned = [program.of_type(branch, t).name for t in tensors]
        branch.lines.append(f"stablehlo.return {', '.join(returned)} : {', '.join(map(str, tensors))}")
        branches.append("\n".join(branch.lines))
    result = block.name()
    regions = "\n}, {\n".join(branches)
    block.lines += [
        f'{result}:{len(tensors)} = "{name}"({selector.name}) ({{',
        regions,
        f"}}){program.per_value(list(tensors))} : ({index}) -> ({', '.join(map(str, tensors))})",
    ]
    program.bring_in(block, result, tensors, len(tensors), edges=0.8 * (name == "stablehlo.case"))


def named_computation(program: RandomProgram, block: Block) -> None:
    inputs = [block.pick() for _ in range(block.rng.randint(1, 3))]
    arguments = [Named(block.name(), v.tensor) for v in inputs]
    body = block.inner(arguments, isolated=True)
    tensors = _computation_body(program, body, arguments)
    attributes = [
        f"{name}=[{_bracketed([program.sharding(t) for t in types])}]"
        for name, types in (("in_shardings", [v.tensor for v in inputs]), ("out_shardings", tensors))
        if program.chance(0.4)
    ]
    head = f'sdy.named_computation<"{block.rng.choice("fgh")}">({_names(inputs)}) {" ".join(attributes)}'
    _append_computation(program, block, body, (head, inputs, arguments), tensors)


def manual_computation(program: RandomProgram, block: Block) -> None:
    """Some axes are manual: each divides a dimension of a value, or the value is the same along it."""
    free = sorted(program.annotations.axes)
    if not free:
        return
    axes = block.rng.sample(free, block.rng.choice((0, 1, 1, 1, 2)) if len(free) > 1 else 1)
    inputs = [block.pick() for _ in range(block.rng.randint(1, 2))]
    entries = [_cut(program, v.tensor, axes) for v in inputs]
    arguments = [Named(block.name(), local) for local, _ in entries]
    body = block.inner(arguments, isolated=True)
    outside = program.annotations.manual
    program.annotations.manual = (*outside, *axes)
    scope, program.scope = program.scope, next(program.scopes)
    locals_ = _computation_body(program, body, arguments)
    program.scope = scope
    exits = [_grown(program, t, axes) for t in locals_]
    boundary = [(v.tensor, leading) for v, (_, leading) in zip(inputs, entries, strict=True)]
    in_shardings, out_shardings = (
        [_with_manual(program, t, leading, axes) for t, leading in side] for side in (boundary, exits)
    )
    program.annotations.manual = outside
    manual = ", ".join(f'"{axis}"' for axis in axes)
    head = (
        f"sdy.manual_computation({_names(inputs)}) in_shardings=[{_bracketed(in_shardings)}] "
        f"out_shardings=[{_bracketed(out_shardings)}] manual_axes={{{manual}}}"
    )
    _append_computation(program, block, body, (head, inputs, arguments), [t for t, _ in exits], out_shardings)


def _computation_body(program: RandomProgram, body: Block, arguments: list[Named]) -> list[Tensor]:
    """Fills a body. Returns the types of what it returns."""
    if "edges" in program.features:
        body.values = [program.edge(body, a, program.annotations.sharding(a.tensor, mesh="mesh")) for a in arguments]
    program.ops(body, 1, 5)
    returned = [body.pick() for _ in range(body.rng.randint(1, 2))]
    types = ", ".join(str(v.tensor) for v in returned)
    body.lines.append(f"sdy.return {_names(returned)} : {types}")
    return [v.tensor for v in returned]


Computation = tuple[str, list[Named], list[Named]]


def _append_computation(
    program: RandomProgram,
    block: Block,
    body: Block,
    computation: Computation,
    results: list[Tensor],
    shardings: Sequence[str] = (),
) -> None:
    """`shardings`: those of the edges of the results, if these edges are written by hand."""
    head, inputs, arguments = computation
    name = block.name()
    listed = ", ".join(f"{a.name}: {a.tensor}" for a in arguments)
    types = f"({', '.join(str(v.tensor) for v in inputs)}) -> ({', '.join(map(str, results))})"
    block.lines += [f"{name}:{len(results)} = {head} ({listed}) {{", *body.lines, f"}} : {types}"]
    program.bring_in(block, name, results, len(results), edges=1.0, given=shardings)


def _names(values: list[Named]) -> str:
    return ", ".join(v.name for v in values)


def _bracketed(shardings: list[str]) -> str:
    return ", ".join(f"<{s}>" for s in shardings)


def _cut(program: RandomProgram, tensor: Tensor, axes: list[str]) -> tuple[Tensor, list[list[str]]]:
    """What is left of a tensor inside, and the manual axes per dimension."""
    sizes, shape = program.annotations.axes, list(tensor.shape)
    leading: list[list[str]] = [[] for _ in shape]
    for axis in axes:
        dims = [d for d, n in enumerate(shape) if n and n % sizes[axis] == 0]
        if dims and program.chance(0.85):
            dim = program.rng.choice(dims)
            shape[dim] //= sizes[axis]
            leading[dim].append(axis)
    return Tensor(tuple(shape), tensor.dtype), leading


def _grown(program: RandomProgram, tensor: Tensor, axes: list[str]) -> tuple[Tensor, list[list[str]]]:
    """The type outside of what has this type inside, and the manual axes per dimension."""
    sizes, shape = program.annotations.meshes["mesh"].axes, list(tensor.shape)
    leading: list[list[str]] = [[] for _ in shape]
    for axis in axes:
        dims = [d for d, n in enumerate(shape) if n * sizes[axis] <= 64]
        if dims and math.prod(shape) < 4096 and (program.runs or program.chance(0.8)):
            dim = program.rng.choice(dims)
            shape[dim] *= sizes[axis]
            leading[dim].append(axis)
    return Tensor(tuple(shape), tensor.dtype), leading


def _with_manual(program: RandomProgram, tensor: Tensor, leading: list[list[str]], axes: list[str]) -> str:
    """The sharding of a boundary value; now and then it says that it is the same along the other manual axes."""
    placed = {axis for dim in leading for axis in dim}
    rest = [axis for axis in axes if axis not in placed]
    replicated = rest if program.chance(0.3) else []
    return "@mesh, " + program.annotations.body(
        tensor.rank,
        program.annotations.meshes["mesh"],
        priority="priority" in program.features and "one" not in program.features,
        leading=leading,
        replicated=replicated,
    )
