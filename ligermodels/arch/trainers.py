"""Attributes and methods of transformers' models, for Trainer, TRL, PEFT, accelerate and lm-eval.

They work by duck typing: none of these libraries is imported.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, constraints

from ligermodels.errors import InputError
from ligermodels.layers import Embedding, LMHead
from ligermodels.training.recompute import Checkpointing


class TrainerInterface(nn.Module):
    """The attributes and methods of `CausalLM` that trainers read and call."""

    config: Any
    decoder: Any
    lm_head: nn.Module
    model: nn.Module
    model_tags: list[str]
    vocab_size: int

    loss_type = "ForCausalLM"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    main_input_name = "input_ids"
    base_model_prefix = "model"
    _keys_to_ignore_on_save = None

    def _get_name(self) -> str:
        """transformers' name of the class. Trainer's label smoothing shifts the labels of the names it knows; models
        that also read images, which it does not know, have Llama's name."""
        name = self.config.architecture
        return name if name.endswith("ForCausalLM") else "LlamaForCausalLM"

    def __repr__(self) -> str:
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    @classmethod
    def can_generate(cls) -> bool:
        return True

    @property
    def base_model(self) -> nn.Module:
        """The model without its head: its output has `last_hidden_state`."""
        return self.model

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        """{the head's weight: the embedding that it is tied to if the config says so}."""
        decoder = "model" if self.decoder is self.model else "model.language_model"
        return {"lm_head.weight": f"{decoder}.embed_tokens.weight"}

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Makes `embeddings` the token table, which a tied head also reads.

        If the architecture scales the rows (Gemma), the weight of a plain `nn.Embedding` moves to a scaled `Embedding`.
        """
        scale = getattr(self.decoder.embed_tokens, "embed_scale", None)
        if scale is not None and type(embeddings) is nn.Embedding:
            rows, size = embeddings.weight.shape
            with torch.device("meta"):
                scaled = Embedding(rows, size, embed_scale=scale, padding_idx=embeddings.padding_idx)
            scaled.weight = embeddings.weight
            embeddings = scaled
        self.decoder.embed_tokens = embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, embeddings: nn.Module) -> None:
        """Makes `embeddings` the head, tied if its weight is the table's Parameter. Updates the config.

        The parameters of a plain `nn.Linear` move to the existing head, which has the fused loss.
        """
        head, table = self.lm_head, self.decoder.embed_tokens.weight
        tied = getattr(embeddings, "weight", None) is table
        if type(embeddings) is not nn.Linear or not isinstance(head, LMHead):
            self.lm_head = embeddings
        else:
            head.bias, head.out_features = embeddings.bias, embeddings.out_features
            if tied:
                head.tie(self.decoder)
            else:
                head.weight = embeddings.weight  # type: ignore[misc]  # nn.Module takes a Parameter before the property
        self.config.tie_word_embeddings = tied

    @torch.no_grad()
    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resizes the token table, the head and the config's vocab_size. Returns the table.

        new_num_tokens: rows are added or dropped at the end; None keeps their number. pad_to_multiple_of: rounds up.
        mean_resizing: new rows are drawn around the mean of the old ones, with 1e-9 of their covariance, so that the
            output hardly changes; else normal, std `initializer_range`. An untied head is resized in the same way.
        The Parameter objects stay the same. Create the optimizer afterwards: its state has the old shape.

        Raises InputError for a number below 1, for tables that are sharded, quantised or wrapped, and for a table with
        rows beyond the vocabulary.
        """
        table, head = self.decoder.embed_tokens, cast(Any, self.lm_head)
        if new_num_tokens is None and pad_to_multiple_of is None:
            return table
        for name, number in (("new_num_tokens", new_num_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise InputError(f"{name}={number!r} must be a positive number of tokens, or None")
        tied = isinstance(head, LMHead) and head.is_tied
        for name, module in (("embed_tokens", table), ("lm_head", head)):
            kind, weight = (nn.Embedding if module is table else LMHead | nn.Linear), getattr(module, "weight", None)
            if not isinstance(module, kind) or type(weight) is not nn.Parameter or weight.dim() != 2:
                raise InputError(
                    f"{name} is a {type(module).__name__} whose weight is a {type(weight).__name__}; resize the tables "
                    "before they are sharded, quantised or wrapped in an adapter"
                )
        if len(table.weight) != len(head.weight):
            raise InputError(
                f"embed_tokens has {len(table.weight)} rows and lm_head {len(head.weight)}: the rows beyond the "
                "vocabulary belong to images, and new tokens would take their ids. This model cannot be resized"
            )
        rows = len(table.weight) if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            rows = -(-rows // pad_to_multiple_of) * pad_to_multiple_of
        std = None if mean_resizing else self.config.initializer_range
        for parameter in (table.weight,) if tied else (table.weight, head.weight, head.bias):
            if parameter is not None and len(parameter) != rows:
                parameter.grad = None
                parameter.data = _resized(parameter.data, rows, std)
        table.num_embeddings = head.out_features = rows
        if table.padding_idx is not None and table.padding_idx >= rows:
            table.padding_idx = None
        self.config.vocab_size = self.vocab_size = rows
        return table

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters, a tied table counted once."""
        embedding = self.decoder.embed_tokens.weight if exclude_embeddings else None
        return sum(
            p.numel() for p in self.parameters() if (p.requires_grad or not only_trainable) and p is not embedding
        )

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the parameters, a tied table counted once, and with `return_buffers` of the buffers."""
        buffers = self.buffers() if return_buffers else ()
        return sum(tensor.nbytes for tensor in (*self.parameters(), *buffers))

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Saves fewer activations in training and recomputes them in the backward; see recompute.py.

        recompute, in the dict: "block", the default, saves the input of each block alone. "mlp" saves everything
            outside the MLPs or experts: more memory than "block", less to recompute. "none".
        offload: saved activations stay in pinned host memory until the backward needs them; default False.
        blocks: recompute in this number of first blocks; default all. The activations of the last blocks are freed
            before the gradients of the first ones need memory, so that leaving some of them out may cost none.
        every_n_layers: among these, recompute in every n-th block, from the first on; default 1.
        Other options go to torch.utils.checkpoint, for "block".
        The blocks of a vision tower are all recomputed, unless blocks is 0.

        Raises InputError for an unknown value or option.
        """
        self._set_checkpointing(dict(gradient_checkpointing_kwargs or {}))

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Calls `gradient_checkpointing_enable`, which TRL wraps, under its newer name."""
        here = {"every_n_layers": every_n_layers, "offload": offload}
        self.gradient_checkpointing_enable(here | dict(activation_checkpointing_kwargs or {}))

    def gradient_checkpointing_disable(self) -> None:
        self._set_checkpointing("none")

    activation_checkpointing_disable = gradient_checkpointing_disable

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.decoder.checkpointing.enabled

    gradient_checkpointing = is_gradient_checkpointing

    def _set_checkpointing(self, settings: str | Mapping[str, Any]) -> None:
        policy = Checkpointing.of(settings, len(self.decoder.layers))
        for owner in [module for module in self.model.modules() if "checkpointing" in vars(module)]:
            owner.checkpointing = policy if owner is self.decoder else policy.for_all()  # type: ignore[assignment]
            for stack in [module for module in owner.modules() if isinstance(module, nn.ModuleList)]:
                owner.checkpointing.prepare(stack)  # type: ignore[operator, union-attr]

    def enable_input_require_grads(self) -> None:
        """Makes the embedding's output require a gradient, which adapters under checkpointing may need."""
        self.decoder.embed_tokens.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))

    def prepare_inputs_for_generation(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, **inputs}

    def add_model_tags(self, tags: list[str] | str) -> None:
        self.model_tags += [tags] if isinstance(tags, str) else tags


def _resized(old: Tensor, rows: int, std: float | None) -> Tensor:
    """`old` [V] or [V, H] with `rows` rows. New rows are drawn with `std`, or if that is None around the mean, as in
    transformers, after https://nlp.stanford.edu/~johnhew/vocab-expansion.html."""
    more = rows - len(old)
    if more <= 0:
        return old[:rows].clone()
    if std is not None:
        return torch.cat([old, old.new_empty(more, *old.shape[1:]).normal_(0.0, std)])
    mean = old.float().mean(0)
    if old.dim() == 1:
        return torch.cat([old, old.new_empty(more).normal_(mean.item(), 1e-9 * old.float().std().item())])
    centered = old.float() - mean
    covariance = 1e-9 * (centered.T @ centered / len(old))
    if constraints.positive_definite.check(covariance):
        new = MultivariateNormal(mean, covariance_matrix=covariance).sample((more,))
    else:  # fewer rows than columns, or equal rows
        new = mean.expand(more, -1)
    return torch.cat([old, new.to(old.dtype)])
