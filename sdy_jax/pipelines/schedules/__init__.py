"""Schedules as tables, and what a pipeline writes on its ops: plain Python, which plans read as well."""
