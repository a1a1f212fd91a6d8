"""Rewrites of a module before its layouts are chosen: dead code, loops, pieces, recomputation, and loops over parts."""
