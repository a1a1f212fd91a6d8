"""Helpers for tests: ours and our users'."""

from sdy_jax.equivalence.assertions import assert_plan, assert_same

__all__ = ["assert_plan", "assert_same"]
