"""From one sharding to another as the cheapest sequence of collectives, and the cost model that says what is cheap.

`plan` is the door; the search below it works on an abstract problem of atoms.
"""
