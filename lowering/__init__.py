"""From a propagated program to the function that every device runs, in five rooms: `reshard`, `emission`, `strategies`,
`planning` and `placement`.
"""
