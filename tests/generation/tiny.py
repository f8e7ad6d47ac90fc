"""A model small enough to think about, called as every model of the zoo is."""

from types import SimpleNamespace

import torch
from torch import nn

VOCAB = 31


class Cache:
    """Remembers hidden states, as a KV cache remembers keys: enough for attention over everything before."""

    def __init__(self):
        self.x = None

    def extend(self, x):
        self.x = x if self.x is None else torch.cat([self.x, x], 1)
        return self.x

    def reset(self):
        self.x = None


class Tiny(nn.Module):
    """One attention layer with learned positions. `calls` holds the shape of the ids and logits_to_keep of each call."""

    def __init__(self, positions: int = 64):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, 16), nn.Embedding(positions, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        for p in self.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
        self.config = SimpleNamespace(
            vocab_size=VOCAB, eos_token_id=None, pad_token_id=None, max_position_embeddings=positions
        )
        self.config.get_text_config = lambda: self.config
        self.generation_config = {}
        self.calls, self.images = [], []
        self.extra_inputs = {"image"}
        self.switches_at = None
        rotary = SimpleNamespace(switches=lambda past, length: past == self.switches_at)
        self.decoder = SimpleNamespace(rotary_emb=rotary)

    @property
    def device(self):
        return self.embed.weight.device

    def get_input_embeddings(self):
        return self.embed

    def new_cache(self, batch_size, max_length):
        return Cache()

    def prepare_inputs_for_generation(self, input_ids, **inputs):
        return {"input_ids": input_ids, **inputs}

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
        logits_to_keep=0, image=None,
    ):  # fmt: skip
        self.calls.append((tuple(input_ids.shape), logits_to_keep))
        self.images.append(image)
        past = 0 if past_key_values is None or past_key_values.x is None else past_key_values.x.shape[1]
        total = past + input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, total, device=self.device)[None]
        x = self.embed(input_ids) + 2 * self.place(position_ids)
        keys = x if past_key_values is None else past_key_values.extend(x)
        visible = torch.ones(x.shape[1], total, dtype=torch.bool, device=self.device).tril(past)[None]
        if attention_mask is not None:
            assert attention_mask.shape == (len(x), total)
            visible = visible & attention_mask.bool()[:, None]
        scores = (x @ keys.mT / 16).masked_fill(~visible, -1e9)
        logits = self.head(scores.softmax(-1) @ keys + x)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)


def prompt(rows=1, length=5):
    return torch.randint(0, VOCAB, (rows, length))
