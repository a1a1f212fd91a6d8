"""Figures of a plan, by estimate: totals, memory, padding, work, times, and what meshes are compared by."""
