"""`python -m sdy_jax`."""

from sdy_jax.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
