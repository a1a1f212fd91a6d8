"""What users say of shardings: of arguments and results, and inside of functions, by identities that say something.

Each annotation of SDY's compiler API stands in its own module; `program` traces functions with them.
"""
