"""The random suites of tests/ in several processes: who runs which seed, what was reached, what is known afterwards."""
