"""MLIR text, read and printed: with source positions, guards against what jaxlib dies of, and the assembly of the mesh
and shard dialects, which jaxlib does not know.

`modules` reads text, `printer` prints it. `mesh_ops` is the table of the two dialects' ops, `kinds` that of their
attributes; `assembly` reads and prints pretty forms by the formats in the table, `statement` generic ones.
"""
