"""The primitives in Triton: one file a primitive, kernel beside its launcher. Importing this needs no Triton."""
