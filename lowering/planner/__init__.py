"""Planning of a program's layouts, recomputation and schedule for all of it at once.

`problem` states what is chosen, `solve` chooses, `placement` rewrites the module accordingly, `search` tries programs,
`rewrites` changes a program before, `memory` and `schedule` say what one holds and what runs beside what.
"""
