"""Facts of programs that several rooms ask for: trips of loops, what compilers fuse and round, factors of shardings.

Beside them stands the verifier of partitioned modules.
"""
