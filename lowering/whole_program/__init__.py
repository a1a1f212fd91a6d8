"""Layouts that are chosen for a whole program: a walk proposes, plans are made and walked, the best that fits stays."""
