"""Partitioned programs as Python modules: what every device runs, inside `jax.shard_map`, for people to read and run.

A program is traced as it runs, to a jaxpr of lax calls, and read into steps without what tracing leaves behind
(`trace.py`, `steps.py`); loops are brought into the form that people write, and equal runs of steps become calls of
one function (`loops.py`). Each primitive is written by its family's printer (`elementwise.py`, `reductions.py`,
`control_flow.py`). `blocks.py` puts statements in order, `names.py` names values as the user's source does, and
`module.py` adds the mesh, the specs and the function of global arrays.
"""
