"""What planning decides, as data: candidates of ops with their prices, the model of a program, and plans of layouts."""
