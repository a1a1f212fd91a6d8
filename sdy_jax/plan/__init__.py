"""Plans: what was decided, as something to print and to assert on; and what was compiled."""
