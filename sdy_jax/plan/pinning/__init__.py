"""The choices of plans, as plain data and back, and programs that are partitioned by those of a plan that was
kept.
"""
