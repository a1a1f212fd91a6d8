"""A module as plain Python objects: ops, values, edges, symbols, source lines, and where shardings are kept.

All rooms above read modules through it; inner loops do not touch MLIR's objects.
"""
