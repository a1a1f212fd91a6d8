"""A solver for discrete choices with costs of single choices and of pairs: the layout planner's arithmetic.

It knows nothing of layouts: nodes have candidates with costs, edges have a price for each pair of candidates.
`solve` contracts the graph exactly, then eliminates what is left, or bounds and decodes it where tables would be large.
See docs/explanation/planner.md#the-solver.
"""

from sdy_jax.lowering.solve.solver.problem import Ports, Problem, Restriction, identity, restricted, zeros
from sdy_jax.lowering.solve.solver.solution import Solution, solve

__all__ = ["Ports", "Problem", "Restriction", "Solution", "identity", "restricted", "solve", "zeros"]
