"""From a propagated program to a per-device program: costs, resharding, partitioning, emission."""
