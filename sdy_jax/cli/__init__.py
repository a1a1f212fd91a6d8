"""What the subcommands of `sdy-jax` do. jax is imported by them, not by the parser of arguments."""

from sdy_jax.base.errors import SdyError


class UsageError(SdyError):
    """Options that are wrong whatever the program is: exit status 2."""
