"""Programs that are not traced here: MLIR text and bytecode, portable artifacts and files of `jax.export`.

`load` is the face; `artifacts` knows the formats, `loaded_function` makes a program a function of arrays,
`program_calls` runs it.
"""
