"""The collectives of the shard dialect on local arrays, for the bodies of `jax.shard_map`.

All functions take `grid`, the mesh whose axes they list: by default that of `with_grid`, or of the surrounding
`shard_map`. `grid_axes` are its axes by name or position, singly or in a sequence, whose order is that of the devices
of a group; there is no default. In the shapes of the docstrings `g` is the number of devices of a group, the product
of the sizes of the listed axes. `mesh` and `mesh_axes` can be said for `grid` and `grid_axes`.
"""
