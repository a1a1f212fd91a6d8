"""Facts of programs that planning asks for: factors of shardings, fusion, trips of loops, meshes, the verifier."""
