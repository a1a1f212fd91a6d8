"""The per-device function: ops as lax calls on local arrays, collectives, and ops that are emitted as they are.

`local_op` is the registry that families fill, `emit` walks a partitioned program through it.
"""
