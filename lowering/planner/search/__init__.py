"""The search for a program: baseline, plans, and programs that keep within a device's memory; the best one stays."""
