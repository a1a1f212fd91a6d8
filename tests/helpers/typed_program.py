"""What a type checker says of annotated functions: the comment at each line, of types the last part of their names.

tests/ir/test_types.py compares; nothing here runs.
"""

from typing import reveal_type

import jax

import sdy_jax as sdy
from sdy_jax import partition

mesh = jax.make_mesh((8,), ("data",))
x = jax.numpy.ones(8)


def scaled(x: jax.Array, by: float = 1.0) -> tuple[jax.Array, int]:
    return x * by, x.ndim


@partition(mesh=mesh)
def decorated(x: jax.Array, by: float = 1.0) -> tuple[jax.Array, int]:
    return scaled(x, by)


@partition
def bare(x: jax.Array) -> jax.Array:
    return x


class Model:
    @partition(mesh=mesh)
    def step(self, x: jax.Array) -> jax.Array:
        return x


reveal_type(partition(scaled, mesh=mesh))  # PartitionedFunction[[x: Array, by: float =], tuple[Array, int]]
reveal_type(decorated)  # PartitionedFunction[[x: Array, by: float =], tuple[Array, int]]
reveal_type(bare)  # PartitionedFunction[[x: Array], Array]
reveal_type(Model().step)  # def (x: Array) -> Array
reveal_type(partition(sdy.load("mlp.bin"), mesh=mesh)(x, by=2.0))  # Any
reveal_type(decorated(x, by=2.0))  # tuple[Array, int]
reveal_type(decorated.plan(x))  # Plan
reveal_type(decorated.lower(jax.ShapeDtypeStruct((8,), "float32")))  # Lowered
reveal_type(sdy.named_computation(scaled, name="scaled"))  # def (x: Array, by: float =) -> tuple[Array, int]
reveal_type(sdy.named_computation("scaled")(scaled))  # def (x: Array, by: float =) -> tuple[Array, int]
reveal_type(sdy.with_sharding_rule(bare, "([i])->([i]) {i=8}"))  # def (x: Array) -> Array
manual = sdy.manual_computation(scaled, in_shardings=None, out_shardings=None, manual_axes="data")
reveal_type(manual)  # def (x: Array, by: float =) -> tuple[Array, int]
decorated("text")  # Argument 1 to "__call__" of "PartitionedFunction" has incompatible type "str"; expected "Array"
decorated(x, to=2.0)  # Unexpected keyword argument "to" for "__call__" of "PartitionedFunction"
partition(scaled, meshes=mesh)  # Unexpected keyword argument "meshes" for overloaded function "partition"
partition(3)  # No overload variant of "partition" matches argument type "int"
