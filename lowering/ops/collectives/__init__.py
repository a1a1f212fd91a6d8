"""Collectives as lax calls on local arrays: alone, packed, in rings; those that a program states; bytes sent."""
