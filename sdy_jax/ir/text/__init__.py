"""MLIR text, read and printed: with source positions, guards against what jaxlib dies of, and the assembly of the mesh
and shard dialects, which jaxlib does not know.
"""
