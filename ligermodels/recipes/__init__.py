"""Training recipes: from a file of examples to a tuned model."""
