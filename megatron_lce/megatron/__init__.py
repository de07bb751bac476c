"""What is said and done to megatron-core models; megatron-core is imported when these are called."""
