"""Shardy's passes of partitioning, under their names: the partitioner's stages one by one, from module to module.

`registration` puts them among the other passes. Shapes stay global up to `sdy-convert-global-to-local`.
"""
