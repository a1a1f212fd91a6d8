"""Plans beside what their programs do: what was compiled, and measured times and memory, per collective where the
profiler tells.
"""
