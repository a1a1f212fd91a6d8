"""Choices for all nodes of a model: the PBQP solver, moves from a choice, single steps, and lower bounds."""
