"""Kernels that are split as plain functions are: sharding rules from the ops of a reference.

kernel(q, k, v)       cannot be read                  reference(q, k, v)     plain ops
     |                                                       |  traced on whole arrays, and on blocks
     |                                                  the factors along which the ops on blocks
     v                                                  make blocks, or terms of a sum, of the results
a custom op with that rule  <--------------------------------+
"""
