"""One module per framework. Importing it, as docs/integrations.md shows, replaces functions of logits."""
