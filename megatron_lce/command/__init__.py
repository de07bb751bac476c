"""The `megatron-lce` command, and `explain`."""
