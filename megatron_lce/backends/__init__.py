"""The backends `torch` and `triton` supply the primitives of both operations; `reference` is the oracle.

`choice` is a module of its own, because the name `torch` is this package's folder here.
"""
