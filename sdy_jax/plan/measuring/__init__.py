"""Plans beside what their programs do: measured times and memory, per collective where the profiler tells."""
