"""`python -m sdy_jax`."""

from sdy_jax.commands.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
