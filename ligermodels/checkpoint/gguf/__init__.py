"""GGUF, llama.cpp's one file of weights, configuration and tokenizer: read (reader), and written (writer)."""
