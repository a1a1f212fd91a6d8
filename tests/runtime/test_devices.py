"""Which platform a mesh's devices are of, where they need not be there."""

from types import SimpleNamespace

import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from partitioned_ops import LINE

from sdy_jax.runtime.devices import lowering_platform, platform_of


def described(device) -> AbstractMesh:
    return AbstractMesh((8,), ("x",), abstract_device=device)


def test_devices_say_their_platform():
    assert platform_of(LINE) == "cpu" == platform_of(AbstractMesh((8,), ("x",)))
    assert platform_of(described(AbstractDevice("Abacus 3", 1, "abacus"))) == "abacus"


@pytest.mark.parametrize(
    ("kind", "platform", "lowered"),
    [
        ("TPU v5 lite", "tpu", "tpu"),
        ("TPU7x", "tpu", "tpu"),
        ("cpu", "cpu", "cpu"),
        ("Abacus 3", "abacus", "abacus"),
        ("NVIDIA H100 80GB HBM3", "gpu", "cuda"),
        ("Tesla V100-SXM2-16GB", "gpu", "cuda"),
        ("AMD Instinct MI300X", "gpu", "rocm"),
    ],
)
def test_those_that_do_not_are_known_by_their_kind(kind, platform, lowered):
    """As of jax 0.10.0."""

    class Kind(SimpleNamespace):
        __hash__ = object.__hash__

    mesh = described(Kind(device_kind=kind))
    assert platform_of(mesh) == platform and lowering_platform(mesh) == lowered
