"""The placement that rewrites a propagated module: each op gets its strategy, each use the layout that it needs."""
