"""What users say of shardings: of arguments and results, and inside of functions, by identities that say something.

`program` traces functions with these annotations; `parameters` and `dimension_names` have specs of whole models.
"""

from sdy_jax.annotate import collectives, computations, constraints, custom_ops, jaxprs, kernels  # noqa: F401  (each registers what it emits)
