"""Random programs for differential tests."""

from random_programs import calls, indexing, numeric, orders, shapes  # noqa: F401  (each registers its families)
from random_programs.program import FEATURES, RandomProgram
from random_programs.tensors import FAMILIES, Case, Tensor

__all__ = ["FAMILIES", "FEATURES", "Case", "RandomProgram", "Tensor"]
