"""Hugging Face checkpoints: where they are (hub), what is in them (reading), which tensor is which parameter (weights),
how they are written (saving), and quantised weights (quantization). Nothing here knows an architecture."""
