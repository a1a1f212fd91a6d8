"""What users say of shardings: of arguments and results, and inside of functions, by identities that say something.

`program` traces functions with these annotations; trees of specifications for whole models are in `spec_trees`.
"""

from sdy_jax.annotate import (  # noqa: F401  (each registers what it emits)
    collectives,
    computations,
    constraints,
    custom_ops,
    groups,
    jax_primitives,
    kernels,
    sharding_rules,
)
