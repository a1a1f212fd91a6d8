"""What is held between a forward and a backward pass, and what is computed again instead.

jax keeps what a derivative needs of the forward pass: of a scan, stacks with an entry per trip. Where a program does
not fit, some of these values are computed again of others, by the ops that made them. Which ones is a minimum cut: the
ops that run again cost their time, and each value that stays costs a price for its bytes, which rises until enough is
saved.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); the cut as in the partitioner of PyTorch's
AOTAutograd; `jax.checkpoint`, whose policies state by hand what is found here.
"""
