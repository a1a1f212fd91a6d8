"""From a propagated program to the function that every device runs, in four rooms: targets, reshard, ops, planner."""
