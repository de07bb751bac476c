"""What supplies the primitives of both operations: `torch` and `triton`; beside them `reference`, the oracle.

The choice is in a module of its own: here the name `torch` is the folder's, once that is imported.
"""
