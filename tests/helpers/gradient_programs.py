"""Programs whose gradients are rounded."""

import pytest
from machine_models import plan_for_order

from sdy_jax.lowering.targets.family import Arrays

ROUNDED = Arrays(rounded=2)


@pytest.fixture
def late(monkeypatch):
    """Programs are for compilers that put ops off."""
    plan_for_order(monkeypatch, ROUNDED, runs_late=True)
