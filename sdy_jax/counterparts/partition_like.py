"""`partition_like`: a kernel that is split as a plain function of the same arrays is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from sdy_jax.annotate.user_function import function_name
from sdy_jax.counterparts.kernel_call import KernelCalls
from sdy_jax.errors import SdyError, with_article
from sdy_jax.jax_internals.tracebacks import api_boundary

P = ParamSpec("P")
R = TypeVar("R")

Derivative = Literal["kernel", "reference"]


@api_boundary
def partition_like(
    kernel: Callable[P, R], reference: Callable[P, Any], *, derivative: Derivative | None = None
) -> Callable[P, R]:
    """Makes one op of a kernel, which is split as a plain function that computes the same may be.

    For kernels that cannot be read: FFI calls, CUDA, a Pallas kernel whose body reads its grid. Outside of a
    partitioned function it is `kernel` itself. Inside, `reference` is traced on the types of the arguments, and never
    run: the rules of its ops say along which dimensions blocks of the results come of blocks of the arguments with
    nothing sent, or are terms of a sum. Along these each device runs `kernel` on its blocks; all others are whole.

    - A dimension that decides about itself stays whole: what is sorted, summed up and then squared, or compared with
      positions that the reference counts from 0 (a causal mask along its queries).
    - So does one of which the reference on blocks is another function than on the whole, as a mean over it is.
    - A kernel that raises on small blocks, or has a grid without steps for them, is split into multiples of the
      smallest that it takes. One that computes anything else of them is split wrongly: `verify` finds it.

    Args:
        kernel: any JAX function of trees of arrays whose shapes may be those of blocks.
        reference: a function of the same arguments in plain JAX, for arguments of any size, which returns arrays of the
            same shapes in the same tree; floating-point numbers may be of another precision. Of loops, those that only
            map (`jax.lax.map`) are split along what they map.
        derivative: whose derivative it has: the "kernel"'s, whose backward pass is one op as well, split as
            `jax.vjp(reference)` is, or the "reference"'s, in ordinary ops. By default the kernel's if it calls a
            `jax.custom_vjp`.

    Returns:
        A function that computes the same. Arguments that are no arrays (numbers, strings, functions) are passed on as
        they are. Under `vmap` the rule gains a factor for the new dimension, and blocks are mapped over too. A backward
        pass of the kernel's takes the arguments, and runs the forward pass again for what else it needs.

    Raises:
        SdyError: `kernel` or `reference` is no function, or closes over traced arrays; no such derivative.
        ShardingError: in a partitioned function: the reference does not take the arguments, or returns other trees or
            shapes than the kernel.

    Example:
        >>> def plain(x, w):
        ...     return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * w
        >>> norm = partition_like(jax.jit(plain), plain)
        >>> norm(jnp.ones((8, 4)), jnp.ones(4)).shape
        (8, 4)

    See also:
        `custom_op`: takes a rule that is written by hand.
        `verify`: runs kernel and reference on blocks, and compares the numbers.

    Source: jax-ml/jax#19748.
    """
    for what, fun in (("kernel", kernel), ("reference", reference)):
        if not callable(fun):
            raise SdyError(f"partition_like got {with_article(type(fun))} as {what}; expected a function")
    if derivative not in (None, *get_args(Derivative)):
        known = ", ".join(map(repr, get_args(Derivative)))
        raise SdyError(f"partition_like got the derivative {derivative!r}; it is one of {known}, or None")
    calls = KernelCalls(kernel, reference, derivative)

    @functools.wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = calls.run(args, kwargs)
        return result

    call.__name__ = function_name(kernel)
    return call
