"""Choices for all nodes of a model: the solver, moves that it is given, single steps, and bounds."""
