"""What runs beside what: rings, collectives one trip ahead, buckets, the order of ops, and what compilers hide."""
