"""Arguments that lie whole on other devices than the mesh's, as what a library has put on the first one: where
`in_shardings` say how they are to lie, they are brought there before each call, as jit brings them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax

from sdy_jax.calls.arguments import Arguments
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.runtime.function_mesh import auto_mesh
from sdy_jax.runtime.layouts import named


@dataclass(frozen=True, slots=True)
class OnMovedArguments:
    """A jitted function, called with arguments of which some are moved; of `donated` leaves only the moved array is
    left."""

    jitted: Any
    call: Arguments
    planned: PlannedCall
    donated: Collection[int]

    def _cache_miss(self, *_: Any, **__: Any) -> tuple[Any, Any, bool]:
        """As jit's: nothing is kept, so that the next call is moved as well."""
        leaves, mesh = [leaf.value for leaf in self.call.given], auto_mesh(self.call.mesh)
        for i in self.call.elsewhere:
            target = named(self.planned.entering[i], mesh)
            leaves[i] = jax.device_put(leaves[i], target, donate=i in self.donated)
        args, kwargs = jax.tree.unflatten(self.call.tree, leaves)
        statics = self.call.statics
        return self.jitted(*statics.merged(args), **kwargs, **dict(statics.named)), None, False
