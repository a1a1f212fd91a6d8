"""Rewrites of a propagated module before its layouts are chosen: joins, folds, dead code, what loops hold."""
