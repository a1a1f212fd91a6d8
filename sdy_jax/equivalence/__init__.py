"""Partitioned programs beside plain ones: whether the numbers are the same, and where they begin to differ.

`verify` is the call, `subject` what it verifies, `process` and `child` run it on virtual devices, `trial` is one
case; `observation`, `reference` and `bisection` find the first wrong value, `culprit` whose mistake it is,
`reproducer` writes it down. `comparison` is what all of them, and `sdy_jax.testing`, compare by.
"""
