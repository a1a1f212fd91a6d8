"""From one sharding to another as the cheapest sequence of collectives, and what that costs between all layouts."""
