"""One module per framework. Importing it replaces the framework's functions of logits with the fused head."""
