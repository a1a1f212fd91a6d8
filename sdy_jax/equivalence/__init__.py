"""Partitioned programs beside plain ones: whether the numbers are the same, and where they begin to differ.

`verify` is the call, `subject` what it verifies, `trial` is one case, run here or in a process with virtual devices;
`bisection` finds the first wrong value, `faults` whose mistake it is, `comparison` is what all of them compare by;
`assertions` are those of users' tests, for which `pytest_plugin` has an option.
"""
