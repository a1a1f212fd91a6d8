"""Why values have their layouts, why not others, why collectives run: naming, origins, obstacles, reasons."""
