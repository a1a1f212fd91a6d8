"""Which rooms offer the functions that rooms below them declare, and which register what they bring."""
