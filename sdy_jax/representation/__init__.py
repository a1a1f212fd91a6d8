"""The vocabulary: meshes, axis references, shardings and op sharding rules, and what can be said about them.

`axes` has the algebra of axis references, `verify` the dialect's verification rules, `text` and those named after what
they parse the parsers, `named` the conversions to and from `jax.sharding`, `attributes` those to and from MLIR.
"""
