"""Fix-its: changes of one line of the user's code that save bytes, each tried by the planner before it is offered."""
