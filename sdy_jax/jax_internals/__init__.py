"""The one place where private names of jax are used: a module for each part of jax, with the reasons."""
