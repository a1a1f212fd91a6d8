"""Choices of plans as plain data and back, and the program that they are for."""
