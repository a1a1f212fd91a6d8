"""The mesh and shard dialects: one implementation under two names.

* Text: `ops` is the table of ops, `kinds` that of their attributes; `assembly` reads and prints pretty forms by the
  formats in the table and their `elements`, `statement` generic ones. `reader` and `source` turn a user's text into
  what jaxlib parses, `printer` turns what jaxlib prints into the dialects' text.
* Meaning: `view` gives a parsed op as Python values, `meshes`, `shardings` and `pairs` what several ops say together.
  `verification` has the rules.
* Execution: `semantics` is what ops do to local arrays; the other modules run programs on them.
"""
