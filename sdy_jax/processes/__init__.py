"""Several processes: they agree that all of them run the same program before it runs."""
