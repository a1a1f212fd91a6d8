"""Shardy's propagation: the op sharding rules, the propagation of shardings by them, and the passes around it."""
