"""What goes from room to room: the decisions of a walk over a program, and the plan that the next one follows."""
