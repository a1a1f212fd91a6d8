"""The walk that rewrites a propagated module: each op gets its strategy, each use the layout that it needs.

`partitioner.partition_locally` is the door; what was inserted is its report. Nothing here knows an op by name.
"""
