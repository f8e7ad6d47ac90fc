"""The sizes of tiny models, beside which a test names what its own model has."""

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
