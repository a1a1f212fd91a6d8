"""State that comes back: small parts of it come back as they went in, so that the next call is planned already.

Where nothing is stated of results, propagation and the planner choose their layouts. Weights and moments mostly come
back as they were passed; a norm's scale that each device has whole may come back split along the batch's axis, since
its gradient is summed there anyway. Then the second call has other arguments than the first, and is planned and
compiled again. It costs next to nothing to bring these small arrays back as they were.

    state = {"w": f32[4096@a,4096], "scale": f32[4096]}        step(state, batch) -> state
    left open:  "w" 4096@a, "scale" 4096@a                      another kind of call
    here:       "w" 4096@a, "scale" whole                       the same kind
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.statements import RETURNED
from sdy_jax.ir.stored_shardings import entries_of, function_shardings, set_entries, set_function_shardings
from sdy_jax.plan.usual_layouts import carried
from sdy_jax.representation.sharding import TensorSharding

_SMALL = 1 / 32
"""The part of a device's bytes of state that comes back as it went in, at most. Chosen: norms and biases of a GPT of 64
columns on 2 x 4 devices, which each has whole, are 0.024 of its blocks, and less of larger ones. With it a step sent
1.002 of the bytes by CPU prices, 1.003 in 1.015 of the time by those of a v5e, 1.05 in 0.78 by an H100's (2026-11)."""


def bring_back(program: Program) -> None:
    """States of small parts of the state of a traced program that they come back in the layouts in which they are
    passed, where nothing else is stated of them."""
    main, first = main_function(program.module), len(program.constants)
    given = function_shardings(main, "arg_attrs")[first:]
    stated = {result: given[argument] for argument, result in _small(program, given)}
    if not stated:
        return
    with program.module.context, ir.Location.unknown(program.module.context):
        set_function_shardings(main, "res_attrs", stated)
        entries = entries_of(main, "res_attrs")
        for result in stated:
            entries[result][RETURNED] = ir.UnitAttr.get()
        set_entries(main, "res_attrs", entries)


def _small(program: Program, given: list[TensorSharding | None]) -> Iterator[tuple[int, int]]:
    """The arguments that come back and are small beside all that do, with the results that nothing is stated of."""
    back = {a: r for a, r in carried(program).items() if _is_known(given[a], program)}
    sizes = {a: _bytes(program, a, given[a]) for a in back}
    left = sum(sizes.values()) * _SMALL
    for size in sorted(set(sizes.values())):
        alike = [a for a in back if sizes[a] == size]
        left -= size * len(alike)
        if left < 0:
            return
        yield from ((a, back[a]) for a in alike if program.stated_results[back[a]].spec is None)


def _is_known(sharding: TensorSharding | None, program: Program) -> bool:
    is_here = sharding is not None and sharding.mesh == program.mesh_name and not sharding.unreduced_axes
    return is_here and sharding is not None and all(dimension.is_closed for dimension in sharding.dimensions)


def _bytes(program: Program, argument: int, sharding: TensorSharding | None) -> int:
    """What a device holds of an argument."""
    assert sharding is not None
    type_ = program.in_info[argument]
    whole: int = math.prod(type_.shape) * type_.dtype.itemsize
    return -(-whole // math.prod(sharding.shard_counts(program.mesh)))
