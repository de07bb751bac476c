"""The primitives in plain torch."""
