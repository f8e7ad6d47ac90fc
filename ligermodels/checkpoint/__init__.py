"""Hugging Face checkpoints: where they are (hub), their files (files), the weights in them (reading), which tensor is
which parameter (weights), how they are written (saving), and quantised weights (quantization). Nothing here knows an
architecture; hub and files do without torch."""
