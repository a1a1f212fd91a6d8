"""Stated work: it stands in the module, is printed and read back, and refuses numbers that mean nothing."""

from __future__ import annotations

import pytest
from sharding_dump import parse

from sdy_jax.errors import SdyError
from sdy_jax.ir.custom_ops import Share, StatedWork, stated_work
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import named

_CALL = """
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @kernel(%x) : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}"""


def test_what_a_call_states_is_printed_and_read_back() -> None:
    module, work = parse(_CALL), StatedWork(2.5e10, 3e6, 0.6, "its body", ((2, ((2, 0.75), (16, 0.2))),))
    (call,) = named(module.operation, "stablehlo.custom_call")
    assert stated_work(call) is None
    with module.context:
        work.write(call.attributes)
    read = Graph(parse(str(module)).operation)
    assert stated_work(read.main.blocks[0].ops[0]) == work


def test_calls_that_state_different_work_are_no_equal_ops() -> None:
    signatures = []
    for flops in (1.0, 2.0):
        module = parse(_CALL)
        with module.context:
            StatedWork(flops, 0.0).write(named(module.operation, "stablehlo.custom_call")[0].attributes)
        signatures.append(str(Graph(module.operation).main.blocks[0].ops[0].signature))
    assert len({*signatures}) == 2


def test_a_share_is_that_of_the_device_with_most() -> None:
    share = Share(100.0, (3, 8), uneven=((1, ((2, 0.75), (4, 0.4))),))
    assert share((1, 1)) == 100 and share((2, 1)) == pytest.approx(200 / 3)
    assert share((1, 2)) == 75 and share((3, 4)) == pytest.approx(40 / 3)
    assert share((1, 8)) == 12.5  # nothing else is known of eight parts


def test_time_is_counted_in_operations_at_peak() -> None:
    assert StatedWork(6e9, 0.0, efficiency=0.6).operations == 5e9


@pytest.mark.parametrize("numbers", [(-1.0, 0.0, 1.0), (0.0, float("nan"), 1.0), (1.0, 1.0, 0.0)])
def test_numbers_that_mean_nothing_are_refused(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(SdyError, match="expected a finite number"):
        StatedWork(*numbers)
