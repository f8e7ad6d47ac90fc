"""What a training loop needs besides the model: an optimizer, captured steps, gradients that add up in place."""
