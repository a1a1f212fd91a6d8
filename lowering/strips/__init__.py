"""Which strips of split dimensions travel between shards where blocks neither join to blocks nor are cut into blocks.

Integers only, no arrays: who wants what, and in which rounds it travels.
"""
