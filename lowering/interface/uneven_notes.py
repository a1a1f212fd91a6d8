"""Messages about dimensions that were given axes which do not divide them, and keep fewer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sdy_jax.ir.tensor_types import itemsize
from sdy_jax.representation.mesh import Mesh, axes_size
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import bytes_text, listed_axes, type_text


def uneven(
    name: str, shape: tuple[int, ...], dtype: str, stated: TensorSharding, even: TensorSharding, mesh: Mesh
) -> Iterator[str]:
    """A message for each dimension of a value that lost axes of its stated sharding."""
    type_ = type_text(dtype, shape, stated)
    held = bytes_text(math.prod(even.local_shape(shape, mesh)) * itemsize(dtype))
    for dim, (n, axes, left) in enumerate(zip(shape, stated.axes, even.axes, strict=True)):
        shards = axes_size(axes, mesh)
        if not n % shards:
            continue
        now = f"it is split over {listed_axes(left)} only" if left else "it is not split"
        yield (
            f"dim {dim} of {name}, {type_}, cannot be split over {listed_axes(axes)}, because {shards} does not divide "
            f"{n}; {now}, and every device holds {held}. To fix: pad it to {math.ceil(n / shards) * shards}"
        )
