"""Layers over a mesh axis: schedules as tables, one executor for all of them, and the user's function."""
