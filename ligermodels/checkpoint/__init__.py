"""Hugging Face checkpoints, without an architecture. It reads in this order:

hub           finds or downloads the folder of a checkpoint
files         its files: JSON, names of weight files, errors (hub and files do without torch)
reading       opens the weights: safetensors, pickles; gguf/ a GGUF file, dcp a distributed checkpoint
weights       which tensor on disk is which parameter; checks, loads, exports
transfer      copies from files to a GPU
saving        writes a folder atomically
adapters      LoRA adapters in PEFT's files
quantization  loads and saves models with quantised modules, which quantizers makes
"""
