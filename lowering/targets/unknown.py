"""Devices of which nothing is known."""

from __future__ import annotations

from sdy_jax.lowering.targets.family import Family

UNKNOWN = Family("unknown")
