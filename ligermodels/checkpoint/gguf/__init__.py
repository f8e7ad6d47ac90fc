"""GGUF, llama.cpp's one file of weights, configuration and tokenizer: `reader` reads it, `writer` writes it.

config and tokenizer say what the metadata means; vocabulary turns a tokenizer into metadata. The file differs from a
Hugging Face folder in this:
- Llama, Mistral and Mixtral are one architecture, "llama", which rotates neighbouring rows of a head, (0, 1), (2, 3),
  ...: rows of q and k and of their biases are permuted. The others rotate halves, as Hugging Face's models do.
- Gemma's norm weights w are stored as 1 + w.
- Norms, biases and routers are float32, whatever the dtype of the matrices is.
- The experts of a layer are stacked: ffn_gate_exps, ffn_up_exps and ffn_down_exps [experts, rows, columns].
- A tied head is not stored.
- Llama 3's rope is a table of divisors, rope_freqs; LongRoPE has two, rope_factors_long and _short.
- Metadata floats are stored as float32.

Nothing here imports an architecture or the text package: the writer is given a model on the meta device, and a function
that opens a tokenizer.

Checked against: gguf 0.19 (constants.py, gguf_writer.py, quants.py), convert_hf_to_gguf.py, src/llama-model.cpp,
src/models and src/llama-vocab.cpp of llama.cpp.
"""
