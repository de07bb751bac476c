"""One module a framework: importing it puts the fused head in place of the framework's functions of logits."""
