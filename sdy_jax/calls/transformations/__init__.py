"""What jax's transformations make of a partitioned function: derivatives, linear maps, and other programs to plan."""
