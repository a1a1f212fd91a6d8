"""The mesh and shard dialects."""
