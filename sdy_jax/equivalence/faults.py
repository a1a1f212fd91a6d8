"""A wrong value explained: whose mistake it is, and a Python program of a few lines that shows it by itself."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from sdy_jax.base.errors import SdyError
from sdy_jax.calls.load import loads
from sdy_jax.equivalence.arrays import draw_of
from sdy_jax.equivalence.bisection import Observed, Rounding, Wrong, WrongOp, WrongStage, worst_of
from sdy_jax.equivalence.comparison import Difference, compared
from sdy_jax.equivalence.extraction import extracted, meaning, on_whole_arrays, run_plain, with_border
from sdy_jax.equivalence.verification import Fault, Trial
from sdy_jax.ir.collectives import COLLECTIVE_OPS, collective_from_attributes
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.jax_shardings import type_text
from sdy_jax.ir.locations import place_of, short_source
from sdy_jax.ir.operations import copied
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.plan.plan import Plan
from sdy_jax.runtime.devices import mesh_on_devices

# Whose mistake a wrong value is, and all that is told of it.

_TOGETHER = (
    "every value is right where all of them are looked at, so that only what XLA makes of the whole, or the border of "
    "the program, is left"
)
_ADDS_UP = "values differ, and every op is right alone, on right operands: roundings add up"


def fault_of(wrong: Wrong | None, plan: Plan) -> Fault:
    """What is wrong, in words."""
    if wrong is None:
        return Fault("the program", short_source(plan.source), "its results differ", "unknown", _TOGETHER)
    if isinstance(wrong, Rounding):
        return Fault("the program", short_source(plan.source), "its results differ", "rounding", _ADDS_UP)
    if isinstance(wrong, WrongStage):
        return _of_stage(wrong, plan)
    place = place_of(wrong.op.mlir.location)
    culprit, evidence = _culprit(wrong)
    return Fault(
        _title(wrong.op),
        short_source(place.line),
        _difference_text(wrong),
        culprit,
        evidence,
        short_source(place.library) if place.library else "",
        place.scope,
        _strategy(wrong),
        _collectives(wrong),
        _users(wrong),
        wrong.within,
    )


def _of_stage(wrong: WrongStage, plan: Plan) -> Fault:
    before = list(plan.stages)[: list(plan.stages).index(wrong.stage)]
    evidence = "what is traced computes something else than the function under jax.jit"
    if before:
        evidence = (
            f"the module is right {before[-1]}, and wrong {wrong.stage}: a pass in between changes what it computes"
        )
    path = plan.results[wrong.result].path
    return Fault(f"`{path}`", short_source(plan.source), wrong.difference.problem, "sdy_jax", evidence)


def _title(op: Op) -> str:
    return op.key if op.name == "stablehlo.custom_call" else op.name


def _difference_text(wrong: WrongOp) -> str:
    if len(wrong.results) == 1:
        return f"its result {wrong.difference.problem}"
    return f"result {wrong.index} of {len(wrong.results)} {wrong.difference.problem}"


def _strategy(wrong: WrongOp) -> str:
    """The types of operands and results with the axes that split them."""
    known = wrong.observed.shardings
    taken, made = (", ".join(_type(v, known.get(v)) for v in values) for values in (wrong.inputs, wrong.results))
    return f"{taken} -> {made}"


def _type(value: Value, sharding: TensorSharding | None) -> str:
    return type_text(value.dtype, value.shape, sharding)


def _collectives(wrong: WrongOp) -> tuple[str, ...]:
    """What makes the operands, where these are collectives."""
    makers = [v.defining_op for v in wrong.inputs]
    return tuple(dict.fromkeys(_said(op) for op in makers if op is not None and op.name in COLLECTIVE_OPS))


def _users(wrong: WrongOp) -> tuple[str, ...]:
    """For which ops a wrong collective is, and what it says."""
    if wrong.op.name not in COLLECTIVE_OPS and wrong.op.name != "sdy.reshard":
        return ()
    users = [user for v in wrong.results for user, _ in v.uses]
    return tuple(dict.fromkeys(f"{_user(user)}: {_said(wrong.op)}" for user in users))


def _user(op: Op) -> str:
    if op.name == "func.return":
        return "a result of the program"
    return f"{_title(op)} at {short_source(op.source)}"


def _said(op: Op) -> str:
    if op.name not in COLLECTIVE_OPS:
        return op.name
    said = collective_from_attributes(op.name, op.attributes)
    return f"{said.kind} {said}".strip()


def _culprit(wrong: WrongOp) -> tuple[str, str]:
    """By what jit makes of the same op with the same shardings: where that is what we make of it, and not what XLA
    makes of it on one device, XLA is wrong."""
    alone = f"{_title(wrong.op)} alone, on right operands, is wrong as we run it"
    shardings = [wrong.observed.shardings.get(v) for v in (*wrong.inputs, *wrong.results)]
    if any(s is not None and s.unreduced_axes for s in shardings):
        return "sdy_jax", f"{alone}; jit has no values that are unreduced, to compare with"
    if not all(map(_is_even, (*wrong.inputs, *wrong.results), shardings, [wrong] * len(shardings))):
        return "sdy_jax", f"{alone}; jit has no arrays whose sizes do not divide, to compare with"
    try:
        theirs, whole = _by_jit(wrong), meaning(wrong.ops, wrong.inputs, wrong.results, wrong.arguments)[wrong.index]
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return "sdy_jax", f"{alone}; jit does not run it so ({type(error).__name__})"
    if compared(theirs, whole).ok:
        return "sdy_jax", f"{alone}, and right by jit with the same shardings"
    ours = wrong.observed.run(wrong.ops, wrong.inputs, wrong.results, wrong.arguments)[wrong.index]
    if all(compared(x, theirs).ok for x in ours):
        return "XLA", "the op differs between one device and several by jit alone, with the same shardings"
    return "unknown", f"{alone}, and by jit with the same shardings it is wrong, too, in another way"


def _is_even(value: Value, sharding: TensorSharding | None, wrong: WrongOp) -> bool:
    counts = sharding.shard_counts(wrong.observed.mesh) if sharding is not None else ()
    return all(n % count == 0 for n, count in zip(value.shape or (), counts, strict=False))


def _by_jit(wrong: WrongOp) -> np.ndarray:
    """The result by XLA's own partitioning."""
    module = on_whole_arrays(extracted(wrong.ops, wrong.inputs, wrong.results))
    found = run_plain(module, wrong.arguments, shardings=(_jax(wrong, wrong.inputs), _jax(wrong, wrong.results)))
    return found[wrong.index]


def _jax(wrong: WrongOp, values: Sequence[Value]) -> tuple[NamedSharding, ...]:
    observed = wrong.observed
    mesh = observed.refined.to_jax(observed.devices.devices)
    return tuple(NamedSharding(mesh, observed.refined.spec(observed.shardings.get(v))) for v in values)


# A few ops of a partitioned program, run alone: beside what they mean for whole arrays.


def difference_alone(text: str, arguments: Sequence[np.ndarray]) -> Difference:
    """How the results of a partitioned module differ from those of the same ops on whole arrays, on one device.

    Nothing is planned: the module's ops and collectives run in the layouts that it says. A reproducer of `sdy.verify`
    is a call of this.

    Args:
        text: a module as `plan.mlir("partitioned")` prints it; its arguments and results may be partial sums, and need
            not be split evenly.
        arguments: whole arrays for its main function.

    Returns:
        What differs most.

    Raises:
        SdyError: the text is wrong, or there are fewer devices than its mesh has.
    """
    program = loads(text)
    graph = Graph(copied(program.module))
    devices = mesh_on_devices(program.mesh)
    ops, given = graph.main.blocks[0].ops[:-1], [np.asarray(x) for x in arguments]
    with jax.enable_x64(True):
        wanted = meaning(ops, graph.arguments, graph.outputs, given, devices)
        found = Observed(graph, program.mesh, devices).run(ops, graph.arguments, graph.outputs, given)
    differences = [worst_of(x, y)[0] for x, y in zip(found, wanted, strict=True)]
    return max(differences, key=lambda difference: (not difference.ok, difference.largest), default=Difference())


# A Python program of a few lines that shows by itself what is wrong.

_SEEDS = 3
"""How many times arguments are made up. Chosen: what is wrong for most arguments is found by the first."""

_WRITTEN = 256
"""Elements up to which arrays are written into the program. Chosen: for a reader."""

_TEXT = 1 << 18
"""Characters up to which a whole program is written. Chosen: for an editor."""

_ALONE = '''\
"""{what}"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={devices}"

import numpy as np

from sdy_jax.equivalence.faults import difference_alone

PROGRAM = r"""
{text}"""

rng = np.random.default_rng({seed})
arguments = [
{arguments}
]
print(difference_alone(PROGRAM, arguments).problem or "no difference")
'''

_WHOLE = '''\
"""{what}"""

import numpy as np

import sdy_jax as sdy

PROGRAM = r"""
{text}"""

rng = np.random.default_rng({seed})
arguments = [
{arguments}
]
print(sdy.verify(sdy.loads(PROGRAM), *arguments, targets=["{target}"], uneven=False))
'''


def reproducer_of_op(wrong: WrongOp, what: str) -> str:
    """A program that runs the wrong op alone, on smaller arrays as long as it is wrong on these; empty if none is."""
    known = wrong.observed.shardings
    sides = [[known.get(v) for v in values] for values in (wrong.inputs, wrong.results)]
    module = with_border(extracted(wrong.ops, wrong.inputs, wrong.results), *sides)
    text = module.get_asm(enable_debug_info=False, print_generic_op_form=True)
    seed = next((seed for seed in range(_SEEDS) if _reproduces(text, seed)), None)
    if seed is None:
        return _of_given(wrong, text, what)
    text = _shrunk(text, seed)
    arguments = [str(draw_of(value)) for value in _graph(text).arguments]
    return _program(_ALONE, what, text, seed, arguments, devices=wrong.observed.mesh.size)


def reproducer_of_program(trial: Trial, text: str, what: str) -> str:
    """A program that verifies the whole one; empty if that, or an argument, is too long to be written."""
    if len(text) > _TEXT or trial.target == "own":
        return ""
    draws = [str(draw_of(value)) for value in _graph(text).arguments]
    return _program(_WHOLE, what, text, 0, draws, target=trial.target)


def _of_given(wrong: WrongOp, text: str, what: str) -> str:
    """With the arguments for which the op was found to be wrong, if they are small."""
    if sum(x.size for x in wrong.arguments) > _WRITTEN or not _reproduces(text, given=wrong.arguments):
        return ""
    arguments = [f'np.array({x.tolist()!r}, "{x.dtype.name}")' for x in wrong.arguments]
    return _program(_ALONE, what, text, 0, arguments, devices=wrong.observed.mesh.size)


def _program(form: str, what: str, text: str, seed: int, arguments: Sequence[str], **more: object) -> str:
    lines = "\n".join(f"    {argument}," for argument in arguments)
    return form.format(
        what=what.replace("\\", "/").replace('"""', "'''"), text=text, seed=seed, arguments=lines, **more
    )


def _graph(text: str) -> Graph:
    return Graph(copied(loads(text).module))


def _reproduces(text: str, seed: int = 0, given: Sequence[np.ndarray] | None = None) -> bool:
    """Whether ops are wrong for arguments that are made up, or given; not where they do not run at all."""
    return not _difference(text, seed, given).ok


def _difference(text: str, seed: int, given: Sequence[np.ndarray] | None) -> Difference:
    try:
        if given is None:
            rng = np.random.default_rng(seed)
            given = [draw_of(value).array(rng) for value in _graph(text).arguments]
        return difference_alone(text, given)
    except (SdyError, ValueError, TypeError, IndexError, RuntimeError):
        return Difference()


# Smaller sizes --------------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"(?<=[<x])(\d+)(?=x)")


def _shrunk(text: str, seed: int) -> str:
    """The text with smaller sizes, each divided as long as the ops are still wrong."""
    for size in sorted({int(size) for size in _SIZE.findall(text)}, reverse=True):
        while (found := _smaller(text, size, seed)) is not None:
            text, size = found
    return text


def _smaller(text: str, size: int, seed: int) -> tuple[str, int] | None:
    """The text with another size wherever it has this one, in types and attributes, and the size; most such texts are
    no programs at all."""
    number = re.compile(rf"(?<![0-9A-WYZa-wyz_.%\"#)])(?<!0x){size}(?=x|,|\]|>)")
    for other in (size // 4, size // 2):
        lines = text.splitlines(keepends=True)
        changed = "".join(line if "sdy.mesh" in line else number.sub(str(other), line) for line in lines)
        if other >= 1 and changed != text and _reproduces(changed, seed):
            return changed, other
    return None
