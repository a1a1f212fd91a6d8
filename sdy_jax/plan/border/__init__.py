"""What a plan says of arguments and results: their layouts, moves and specs, and what it was planned with."""
