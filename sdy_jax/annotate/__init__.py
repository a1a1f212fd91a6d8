"""What users say of shardings: of arguments and results, and inside of functions, by identities that say something.

Each annotation of SDY's compiler API stands in its own module; `program` traces functions with them.
"""

from sdy_jax.annotate import (  # noqa: F401  (each registers what it emits)
    barrier,
    collective_primitive,
    constraints,
    custom_ops,
    custom_partitioning,
    ffi_calls,
    groups,
    kernels,
    library_functions,
    named,
    sharding_rules,
)
