"""The primitives in Triton: one file a primitive, kernel beside its launcher. Importing this package needs no Triton."""
