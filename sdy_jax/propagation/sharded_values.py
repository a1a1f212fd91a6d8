"""What has a sharding in propagation: values, and the results of functions."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.ir.graph import Op, Value


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """The sharding attribute of result `index` of a function: a value id that no `Value` stands for."""

    function: Op
    index: int


ShardedValue = Value | FunctionResult
