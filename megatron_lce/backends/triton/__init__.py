"""The primitives in Triton, each kernel in the file of its launcher. Importing this package needs no Triton."""
