"""The backends `torch` and `triton` supply the primitives of all operations; `reference` is the tests' oracle."""
