"""The `megatron-lce` command."""
