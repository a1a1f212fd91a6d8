"""Steps around propagation, each a named pass with options, and running lists of them."""
