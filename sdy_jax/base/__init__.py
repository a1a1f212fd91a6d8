"""What every room stands on: files that are written whole, and the one place where private names of jax are used."""
