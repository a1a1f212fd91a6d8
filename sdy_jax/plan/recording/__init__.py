"""From a plan to its record: names that edits elsewhere do not change, places, and everything else as plain data."""
