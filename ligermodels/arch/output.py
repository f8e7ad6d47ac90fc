"""The output of a forward pass, and the contents of generation_config.json: dicts with attributes."""

from collections.abc import Mapping
from typing import Any, Self

import torch.utils._pytree as pytree

from ligermodels.attr_dict import AttrDict
from ligermodels.errors import InputError
from ligermodels.generation.options import CACHE_ALIAS, KNOWN_NAMES, TOKEN_IDS


class CausalLMOutput(AttrDict):
    """The output of a forward. A field that was not computed is absent as a key and None as an attribute.

    The exception is `logits` after a loss that was computed without them: reading the attribute, or a position after
    the loss, is an error that says how to get logits. `output.get("logits")` and `getattr(output, "logits", None)` are
    None.

    loss: scalar fp32. logits: [B, S, V]. logprobs: [B, S] fp32, of the labels. past_key_values: the Cache, which is
    read as `cache` too. last_hidden_state: [B, S, hidden_size], after the final norm. hidden_states: the input of each
    block and the last hidden state. router_logits: [B * S, experts] of each block. experts: int32 [L, B * S, top_k],
    those that the routers of all L blocks chose, -1 in blocks without one. aux_loss: scalar, the load-balancing loss.
    mtp_loss: scalar, of a layer for multi-token prediction, in training.
    attentions: always absent; attention weights are never in memory.
    """

    fields = frozenset({
        "loss", "logits", "logprobs", "past_key_values", "last_hidden_state", "hidden_states", "attentions",
        "router_logits", "experts", "aux_loss", "mtp_loss",
    })  # fmt: skip
    aliases = CACHE_ALIAS

    def __getattr__(self, name: str) -> Any:
        if name == "logits" and self._lacks_logits:
            raise AttributeError(_NO_LOGITS)
        return super().__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int | slice) and key not in (0, slice(1)) and self._lacks_logits:
            raise InputError(_NO_LOGITS)
        return super().__getitem__(key)

    @property
    def _lacks_logits(self) -> bool:
        return "loss" in self and "logits" not in self


_NO_LOGITS = (
    "the output has no logits: with labels the loss is computed without them. Call the model with return_logits=True "
    "(and no loss_function), or read the other fields by name"
)


class GenerationConfig(AttrDict):
    """The contents of generation_config.json, whose values are the defaults of `generate`."""

    fields = KNOWN_NAMES | {"_from_model_config"}

    @classmethod
    def of_file(cls, content: Mapping[str, Any]) -> Self:
        """The contents of a generation_config.json. Absent token ids are None: those of config.json do not count."""
        return cls({**dict.fromkeys(TOKEN_IDS), **content})

    def to_dict(self) -> dict[str, Any]:
        return dict(self)

    to_diff_dict = to_dict  # which transformers' pipelines ask for

    def update(self, *mappings: Any, defaults_only: bool = False, **values: Any) -> None:
        """`dict.update`. defaults_only: keeps existing values, for Seq2SeqTrainer."""
        new = dict(*mappings, **values)
        super().update({name: new[name] for name in new if not defaults_only or self.get(name) is None})

    def _get_default_generation_params(self) -> dict[str, Any]:
        """transformers' default for a max_length of None, which Seq2SeqTrainer asks for."""
        return {"max_length": 20}


# FSDP and torch.compile find the tensors in an output through pytree, which does not look into dict subclasses.
pytree.register_pytree_node(
    CausalLMOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: CausalLMOutput(zip(keys, values, strict=True)),
    serialized_type_name="ligermodels.CausalLMOutput",
)
