"""GGUF, llama.cpp's one file of weights, configuration and tokenizer.

folder      a file, or a text and its vision tower, as a folder in Hugging Face's layout
reader      reads a file under Hugging Face's names
pair        reads a text and its vision tower
output      a file that is planned, quantised, written and compared
writer      plans the file of a model
adapter     plans that of a LoRA adapter
mmproj      plans that of a vision tower
modelfile   Ollama's Modelfile beside one
layout      names of tensors, order of rows, changed values
config      the metadata and config.json
gemma4      what of Gemma 4's differs from block to block
gpt_oss     experts in MXFP4, and what else is gpt-oss's alone
tokenizer   the tokenizer in the metadata, as files of a folder
vocabulary  a tokenizer as metadata

Llama 3's rope is a table of divisors in the file, rope_freqs; LongRoPE has two, rope_factors_long and _short. Floats of
the metadata are stored as float32.

Nothing here imports an architecture or the text package: the writer is given a model on the meta device, and a function
that opens a tokenizer.

Checked against: gguf 0.19 (constants.py, gguf_writer.py, quants.py), convert_hf_to_gguf.py and conversion/,
src/llama-model.cpp, src/models and src/llama-vocab.cpp of llama.cpp.
"""
