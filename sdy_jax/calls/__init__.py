"""A partitioned function and its calls: `partition`, which plan a call has, how it is dispatched, and its derivatives.

The top room of the library: everything else serves it. All of it happens while `jax.jit` traces.
"""
