"""A plan as one screen, and as tables of all that it has; both made out of its record."""
