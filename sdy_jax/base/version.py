"""The version of sdy_jax: builds, `sdy_jax.__version__`, records of plans and `sdy-jax --version` take it from here."""

__version__ = "0.1.0"
