"""Passes of the mesh and shard dialects: their annotations become SDY's before import."""
