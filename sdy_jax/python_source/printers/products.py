"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import numpy as np
from jax import lax

from sdy_jax.python_source.expressions import MUL, Expr, infix
from sdy_jax.python_source.literals import dtype_text, param_text
from sdy_jax.python_source.printers.registry import Call, printer


@printer("dot_general")
def _product(call: Call) -> Expr:
    options = _options(call)
    if len(call.inputs[0].shape) + len(call.inputs[1].shape) > len(ascii_letters) or _is_of_bits(call):
        return _dot_general(call)
    if not options and _is_matmul(call):
        return call.result(infix(call.array(0), "@", call.array(1), MUL), MUL)
    text = ", ".join([f'"{_subscripts(call)}"', call.arrays(), *options])
    return call.result(f"jnp.einsum({text})")


def _is_of_bits(call: Call) -> bool:
    return any(value.dtype == np.bool_ for value in call.inputs)


def _options(call: Call) -> list[str]:
    """What a product asks for beside its defaults."""
    dtype, precision = call.params["preferred_element_type"], call.params["precision"]
    options = []
    if precision not in (None, (lax.Precision.DEFAULT, lax.Precision.DEFAULT)):
        options.append(f"precision={param_text(precision)}")
    if any(value.dtype != call.out.dtype for value in call.inputs) and dtype is not None:
        options.append(f"preferred_element_type={dtype_text(dtype)}")
    return options


def _is_matmul(call: Call) -> bool:
    """Whether it is what `@` does: the last dimension with the first but one, after equal leading ones if there are."""
    sums, batching = call.params["dimension_numbers"]
    ranks = [len(value.shape) for value in call.inputs]
    if any(len(dims) != 1 for dims in sums) or sums[0][0] != ranks[0] - 1:
        return False
    if not batching[0]:
        return ranks[1] <= 2 and sums[1][0] == 0
    leading = tuple(range(ranks[0] - 2))
    is_batched = tuple(batching[0]) == tuple(batching[1]) == leading
    return is_batched and ranks[0] == ranks[1] > 2 and bool(sums[1][0] == ranks[1] - 2)


def _subscripts(call: Call) -> str:
    """`ab,bc->ac`: batching dimensions first, then those of the left operand, then those of the right one."""
    (left_sums, right_sums), (left_batch, right_batch) = call.params["dimension_numbers"]
    left_rank, right_rank = (len(value.shape) for value in call.inputs)
    left = ascii_letters[:left_rank]
    fresh = iter(ascii_letters[left_rank:])
    shared = dict(zip([*right_sums, *right_batch], [left[d] for d in (*left_sums, *left_batch)], strict=True))
    right = [shared[d] if d in shared else next(fresh) for d in range(right_rank)]
    out = [left[d] for d in left_batch] + _free(left, left_sums, left_batch) + _free(right, right_sums, right_batch)
    return f"{left},{''.join(right)}->{''.join(out)}"


def _free(letters: Sequence[str], sums: Sequence[int], batch: Sequence[int]) -> list[str]:
    return [letter for d, letter in enumerate(letters) if d not in sums and d not in batch]


def _dot_general(call: Call) -> Expr:
    text = ", ".join([call.arrays(), str(call.params["dimension_numbers"]), *_options(call)])
    return call.result(f"lax.dot_general({text})")


@printer("conv_general_dilated")
def _convolved(call: Call) -> Expr:
    params, rank = dict(call.params), len(call.out.shape) - 2
    plain: dict[str, Any] = {
        "lhs_dilation": (1,) * rank,
        "rhs_dilation": (1,) * rank,
        "feature_group_count": 1,
        "batch_group_count": 1,
        "precision": None,
        "preferred_element_type": None,
        "out_sharding": None,
    }
    if params["preferred_element_type"] == call.out.dtype == call.inputs[0].dtype:
        params["preferred_element_type"] = None
    if isinstance(params["precision"], tuple) and set(params["precision"]) == {lax.Precision.DEFAULT}:
        params["precision"] = None
    said = {name: value for name, value in params.items() if name not in plain or value != plain[name]}
    options = ", ".join(f"{name}={param_text(value)}" for name, value in said.items())
    return call.result(f"lax.conv_general_dilated({call.arrays()}, {options})")
