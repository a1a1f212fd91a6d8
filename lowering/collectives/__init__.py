"""The collectives as lax calls on local arrays, in the forms that compilers take best: alone, packed, in rings."""
