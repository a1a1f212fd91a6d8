"""Plans to explore: one HTML file that needs neither a network nor anything beside it."""
