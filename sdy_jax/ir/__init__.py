"""Meshes, shardings and op sharding rules, the module that carries them, its text and its kernels.

All rooms above read modules through `graph`; inner loops do not touch MLIR's objects.
"""
