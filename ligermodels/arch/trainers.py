"""What trainers and adapters call a model by: the names of transformers' models, by duck typing.

transformers' Trainer, TRL, PEFT and accelerate ask for these; none of them is imported.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ligermodels.recompute import Checkpointing


class TrainerInterface(nn.Module):
    """The part of `CausalLM` that trainers read and call."""

    decoder: Any
    lm_head: nn.Module
    model: nn.Module

    loss_type = "ForCausalLM"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    main_input_name = "input_ids"
    base_model_prefix = "model"

    @property
    def base_model(self) -> nn.Module:
        """The model without its head: its output has `last_hidden_state`."""
        return self.model

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        self.decoder.embed_tokens = embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters, a tied table counted once."""
        embedding = self.decoder.embed_tokens.weight if exclude_embeddings else None
        return sum(
            p.numel() for p in self.parameters() if (p.requires_grad or not only_trainable) and p is not embedding
        )

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Saves fewer activations in training and recomputes them in the backward; recompute.py says which.

        recompute, in the dict: "block", the default, saves only the sum that enters each block. "mlp" saves all but
            what is inside the MLPs or experts: more memory than "block", less to recompute. "none".
        offload: what is saved waits in pinned host memory until the backward needs it; default False.
        blocks: that many of the first blocks only; default all. What the last blocks save is freed before the
            gradients of the first ones need memory, so that leaving some of them out may cost none.
        every_n_layers: of these, only every n-th block, from the first on; default 1.
        Everything else goes to torch.utils.checkpoint, for "block".
        A vision tower follows, with all of its blocks, unless blocks is 0.

        Raises InputError for an unknown value or option.
        """
        self._set_checkpointing(dict(gradient_checkpointing_kwargs or {}))

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """`gradient_checkpointing_enable` under its newer name."""
        here = {"every_n_layers": every_n_layers, "offload": offload}
        self._set_checkpointing(here | dict(activation_checkpointing_kwargs or {}))

    def gradient_checkpointing_disable(self) -> None:
        self._set_checkpointing("none")

    activation_checkpointing_disable = gradient_checkpointing_disable

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.decoder.checkpointing.enabled

    gradient_checkpointing = is_gradient_checkpointing

    def _set_checkpointing(self, settings: str | Mapping[str, Any]) -> None:
        blocks = self.decoder.layers
        self.decoder.checkpointing = Checkpointing.of(settings, len(blocks))
        self.decoder.checkpointing.prepare(blocks)
        towers = [module for module in self.model.modules() if "checkpointing" in vars(module)]
        for tower in towers:
            if tower is self.decoder:
                continue
            tower.checkpointing = self.decoder.checkpointing.for_all()
            for blocks in tower.modules():
                if isinstance(blocks, nn.ModuleList):
                    tower.checkpointing.prepare(blocks)

    def enable_input_require_grads(self) -> None:
        """Makes the embedding's output require a gradient, as adapters under checkpointing may need."""
        self.decoder.embed_tokens.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))

    def prepare_inputs_for_generation(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, **inputs}

    def add_model_tags(self, tags: list[str] | str) -> None:
        self.model_tags += [tags] if isinstance(tags, str) else tags
