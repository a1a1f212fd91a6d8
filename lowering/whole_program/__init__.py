"""Layouts that are chosen for a whole program: proposed, planned and tried; the best program that fits stays."""
