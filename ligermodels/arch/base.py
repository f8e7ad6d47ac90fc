"""What every language model of the zoo shares: the loop over its blocks, the head, loading and saving.

An architecture builds `embed_tokens`, `rotary`, `layers`, `norm` and `lm_head` and names its config class and its
weight table; nothing else. Trainers (transformers, TRL, PEFT, accelerate) are met by duck typing: their names for
things are kept here, and none of them is imported.
"""

import functools
import inspect
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ligermodels import checkpoint, hub, saving, weights
from ligermodels.arch.config import DTYPES, ModelConfig, RoutedConfig, check_generation_config
from ligermodels.arch.inputs import check_inputs, same_bounds
from ligermodels.cache import KVCache
from ligermodels.errors import ConfigError, InputError
from ligermodels.generate import generate
from ligermodels.kernels.cross_entropy import cross_entropy
from ligermodels.layers import (
    Batch,
    CrossStates,
    Experts,
    LayerNorm,
    LMHead,
    RMSNorm,
    RotaryEmbedding,
    TiedLMHead,
    load_balancing_loss,
)
from ligermodels.layers.pictures import PatchEmbedding
from ligermodels.recompute import Checkpointing, is_captured, must_not_wait, plain

IGNORE_INDEX = -100


class Attributes(dict):
    """A dict whose `fields` are attributes too, None where absent."""

    fields: ClassVar[frozenset[str]] = frozenset()

    def __getattr__(self, name: str) -> Any:
        if name in type(self).fields:
            return self.get(name)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class CausalLMOutput(Attributes):
    """What a forward returns. Fields that were not computed are absent as keys and None as attributes.

    loss: scalar fp32. logits: [B, S, V]. past_key_values: the KVCache. last_hidden_state: [B, S, hidden_size],
    after the final norm. hidden_states: the input of each block and the last hidden state. Of mixtures of experts:
    router_logits: [B * S, experts] of each block. aux_loss: scalar, how unevenly the tokens were spread.
    """

    fields = frozenset(
        {"loss", "logits", "past_key_values", "last_hidden_state", "hidden_states", "router_logits", "aux_loss"}
    )


class GenerationConfig(Attributes):
    """generation_config.json as it was read."""

    fields = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})


# FSDP and torch.compile find the tensors in an output through pytree, which does not look into dict subclasses.
pytree.register_pytree_node(
    CausalLMOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: CausalLMOutput(zip(keys, values, strict=True)),
    serialized_type_name="ligermodels.CausalLMOutput",
)


class CausalLM(nn.Module):
    """A decoder-only language model. Built empty by a subclass; made by `from_hub` or `from_config`."""

    config_class: ClassVar[type[ModelConfig]]
    WEIGHTS: ClassVar[Mapping[str, str | tuple[str, ...]]]
    """Our parameter names -> the Hugging Face names stored on disk; see weights.py."""
    ALSO_READ: ClassVar[tuple[Mapping[str, str | tuple[str, ...]], ...]] = ()
    """Tables of other layouts that load; `WEIGHTS` is what is written."""
    IGNORE: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)
    """Names on disk that hold nothing to load."""

    # Read by transformers' Trainer, accelerate, TRL and PEFT.
    loss_type = "ForCausalLM"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    main_input_name = "input_ids"
    _no_split_modules: ClassVar[tuple[str, ...]]
    _position_axes: ClassVar[int] = 1
    """How many positions a token may have; `rotary` says what it makes of several."""

    embed_tokens: nn.Embedding
    rotary: RotaryEmbedding
    layers: nn.ModuleList
    norm: nn.Module
    lm_head: nn.Module

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.generation_config = GenerationConfig()
        self.source_folder: Path | None = None
        self.checkpointing = Checkpointing()
        self.warnings_issued: dict[str, bool] = {}
        self.model_tags: list[str] = []

    @classmethod
    def from_config(
        cls,
        config: ModelConfig | Mapping[str, Any],
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        seed: int = 0,
        activation_checkpointing: str | Mapping[str, Any] = "none",
    ) -> Self:
        """A model with random weights, from a config or the contents of a config.json.

        `dtype="auto"` is the config's own; `device="meta"` builds shapes only. activation_checkpointing: "none", "mlp"
        or "block", or the dict of `gradient_checkpointing_enable`.
        Raises ConfigError if the config cannot work, InputError for other words of activation_checkpointing.
        """
        if not isinstance(config, ModelConfig):
            config = cls.config_class.from_hf(config)
        model = cls._on_meta(config, dtype, activation_checkpointing)
        device = torch.device(device or torch.get_default_device())
        if device.type != "meta":
            model.to_empty(device=device)
            model.init_weights(seed)
        return model

    @classmethod
    def from_hub(
        cls,
        id_or_folder: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        progress: bool = True,
        allow_pickle: bool = False,
        activation_checkpointing: str | Mapping[str, Any] = "none",
    ) -> Self:
        """The model of a repository on the Hub, or of a folder in its layout, ready for inference (`eval()`).

        revision: branch, tag or commit. token: True takes the one that is logged in. A complete copy in the cache
        needs neither network nor token. dtype: "auto" is config.json's own. Weights are read from safetensors, one
        tensor at a time, straight to `device`; pickled ones only with `allow_pickle=True`. activation_checkpointing:
        as in `from_config`.
        Raises HubError, ConfigError, CheckpointError or InputError.
        """
        folder = hub.resolve(
            id_or_folder,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_pickle=allow_pickle,
        )
        with checkpoint.unreplaced(folder):
            config = cls.config_class.from_hf(checkpoint.read_json(folder / "config.json"))
            model = cls._on_meta(config, dtype, activation_checkpointing)
            opened = checkpoint.open_checkpoint(folder, allow_pickle=allow_pickle)
            if (folder / "generation_config.json").is_file():
                values = checkpoint.read_json(folder / "generation_config.json", lenient=True)
                check_generation_config(str(folder / "generation_config.json"), values)
                model.generation_config.update(values)
        with opened as reader:
            weights.load(
                model,
                cls.WEIGHTS,
                reader,
                device=device or torch.get_default_device(),
                progress=progress,
                ignore=cls.IGNORE,
                tied=model.tied_weights,
                also=cls.ALSO_READ,
            )
        model.source_folder = folder
        return model.eval()

    @classmethod
    def _on_meta(
        cls, config: ModelConfig, dtype: torch.dtype | str, activation_checkpointing: str | Mapping[str, Any]
    ) -> Self:
        """The model without memory, in its final dtype."""
        if isinstance(dtype, str):
            if dtype not in ("auto", *DTYPES):
                raise ConfigError(f"dtype={dtype!r} is not supported; supported: 'auto', {', '.join(DTYPES)}")
            dtype = config.torch_dtype if dtype == "auto" else DTYPES[dtype]
        with torch.device("meta"):
            model = cls(config)
        model.config.dtype = str(dtype).removeprefix("torch.")
        model._keep_less(activation_checkpointing)
        return model.to(dtype)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Draws every parameter anew.

        | parameter                     | distribution                            |
        |-------------------------------|-----------------------------------------|
        | weights of linears, experts,  | normal, mean 0, std `initializer_range` |
        | embeddings                    |                                         |
        | biases, row of the pad token  | 0                                       |
        | norm weights                  | 1 - offset, so that the scale is 1      |
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | PatchEmbedding):
                module.weight.normal_(0.0, self.config.initializer_range, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx].zero_()
            elif isinstance(module, Experts):
                for weight in module.parameters(recurse=False):
                    weight.normal_(0.0, self.config.initializer_range, generator=generator)
            elif isinstance(module, RMSNorm) and module.weight is not None:
                module.weight.fill_(1.0 - module.offset)
            elif isinstance(module, LayerNorm):
                module.reset_parameters()

    def save_pretrained(self, folder: str | Path, *, max_shard_size: int | str = "5GB") -> Path:
        """Writes a checkpoint in Hugging Face's layout, which transformers loads. Returns the folder.

        Holds config.json, generation_config.json, safetensors in shards of at most `max_shard_size`, and the
        tokenizer and template files of the checkpoint that this model came from. Written beside `folder` and
        renamed when complete: an interruption leaves the old contents.
        """
        self.config.dtype = str(self.dtype).removeprefix("torch.")  # the model may have been cast since
        files: dict[str, Any] = {"config.json": checkpoint.json_bytes(self.config.to_hf())}
        if self.generation_config:
            files["generation_config.json"] = checkpoint.json_bytes(dict(self.generation_config))
        if self.source_folder is not None:
            files = {**checkpoint.companion_files(self.source_folder), **files}
        return saving.write_checkpoint(
            folder,
            weights.export(self, self.WEIGHTS),
            files=files,
            max_shard_size=max_shard_size,
            expected_bytes=sum(parameter.nbytes for parameter in self.parameters()),
        )

    def push_to_hub(self, repo: str, *, max_shard_size: int | str = "5GB", **options: Any) -> str:
        """Saves the model and uploads it to `repo` ("owner/name"). Returns the URL of the commit.

        options: private, revision, create_pr, commit_message, token; see hub.push.
        """
        with tempfile.TemporaryDirectory() as folder:
            saved = self.save_pretrained(Path(folder) / "model", max_shard_size=max_shard_size)
            return hub.push(saved, repo, **options)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool | None = False,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int = 0,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        return_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        cross: CrossStates | None = None,
    ) -> CausalLMOutput:
        """Logits, or with `labels` the loss.

        input_ids: [B, S], or inputs_embeds: [B, S, hidden_size] in their place.
        attention_mask: [B, past + S], 1 at tokens, 0 at padding on either side. Leave it out where nothing is padded:
            looking into it costs a host synchronisation.
        position_ids: [B, S] or [1, S], or [axes, B or 1, S] where positions have several axes (multimodal); default
            0, 1, ... behind what the cache holds. Without a mask and a cache, ids of one axis that restart mark a
            packed batch: no token sees another sequence. Finding the restarts costs a host synchronisation (and
            breaks the graph of torch.compile); `cu_seqlens`, int32 [N + 1], the boundaries of the sequences in a
            batch of one row, with `max_seqlen`, the longest one's length, saves it.
        labels: [B, S], the ids themselves (the shift by one happens here), -100 where nothing is to be predicted. The
            fused linear cross entropy then runs, and logits are None unless `return_logits=True`.
        num_items_in_batch: the loss is the sum over tokens divided by this, where given, instead of the mean: the
            count of labels over all micro-batches of a step. A device scalar costs no synchronisation.
        past_key_values, use_cache: a cache to read and extend; `use_cache` makes one where none is given. Where
            `rotary.switches(past, past + S)` (longrope, at its original length), empty it and pass the whole text, as
            `generate` does: the cached keys were turned by other frequencies.
        logits_to_keep: compute the logits of the last n positions only; 0 keeps all.
        return_logits: False without labels skips the head, and `last_hidden_state` is all there is.
        output_hidden_states: adds `hidden_states` and `last_hidden_state`.
        output_router_logits: for mixtures of experts, adds `router_logits` and `aux_loss`, which is added to the loss
            as well, times the config's `router_aux_loss_coef`; default is the config's `output_router_logits`.
        output_attentions, return_dict: for callers that always pass them; attention weights are never built.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: cu_seqlens and max_seqlen as the collators of
            transformers and TRL name them, queries and keys apart; here they are the same. seq_idx, which comes
            with them, says nothing more.
        cross: of models with cross-attention, what their own forward found in the pictures.

        Raises InputError where arguments do not fit together.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds, and not both")
        if output_attentions:
            raise InputError("output_attentions=True is not supported: the attention weights are never in memory")
        if return_dict is False:
            raise InputError("return_dict=False is not supported: the output is a dict with attributes")
        if cu_seqlens is None and (cu_seq_lens_q is not None or cu_seq_lens_k is not None):
            cu_seqlens, max_seqlen = same_bounds(cu_seq_lens_q, cu_seq_lens_k), max_length_q
        check_inputs(
            self,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            past_key_values=past_key_values,
            num_items_in_batch=num_items_in_batch,
            logits_to_keep=logits_to_keep,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if x.dim() != 3:
            raise InputError(f"ids have shape {tuple(x.shape[:-1])}, expected [batch, sequence]")
        batch_size, length = x.shape[:2]
        if labels is not None and labels.shape != (batch_size, length):
            raise InputError(
                f"labels have shape {tuple(labels.shape)}, expected that of the ids, {(batch_size, length)}"
            )
        axes = () if position_ids is None or position_ids.dim() < 3 else (self._position_axes,)
        if position_ids is not None and not (
            position_ids.dim() == 2 + len(axes)
            and position_ids.shape[:-2] == axes
            and position_ids.shape[-2] in (1, batch_size)
            and position_ids.shape[-1] == length
        ):
            raise InputError(
                f"position_ids have shape {tuple(position_ids.shape)}, expected {(*axes, batch_size, length)} or "
                f"{(*axes, 1, length)}"
            )
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache(batch_size, length)
        alone = attention_mask is None and past_key_values is None
        if cu_seqlens is None and position_ids is not None and not axes and alone:
            cu_seqlens, max_seqlen = packed_sequences(position_ids.expand(batch_size, length))
        if cu_seqlens is not None:
            if past_key_values is not None or attention_mask is not None:
                raise InputError("packed sequences (cu_seqlens) go with neither attention_mask nor past_key_values")
            x = x.reshape(1, batch_size * length, -1)
            if position_ids is not None:
                position_ids = position_ids.expand(*axes, batch_size, length).reshape(*axes, 1, -1)
        batch = self._batch(x, attention_mask, position_ids, cu_seqlens, max_seqlen, past_key_values, cross)
        targets = None if labels is None else _Targets(labels, cu_seqlens)

        hidden_states: list[Tensor] | None = [] if output_hidden_states else None
        routing = self._routing(output_router_logits)
        router_logits: list[Tensor] = []
        x = self.hidden(x, batch, past_key_values, hidden_states, None if routing is None else router_logits)
        x = x.reshape(batch_size, length, -1)
        output = CausalLMOutput()
        if targets is not None:
            if self._fused_head and not return_logits:
                output["loss"] = self.lm_head(
                    x, labels=targets.labels, num_items_in_batch=num_items_in_batch, num_valid=targets.count()
                )
            else:
                # An adapter around the head must not be passed by: its logits are made in full.
                logits = self.lm_head(x)
                output["loss"] = cross_entropy(logits, targets.labels, num_items_in_batch=num_items_in_batch)
                if return_logits:
                    output["logits"] = logits
        elif return_logits is not False:
            output["logits"] = self.lm_head(x[:, -logits_to_keep:] if logits_to_keep else x)
        if routing is not None:
            tokens = None if attention_mask is None else attention_mask[:, -length:]
            balance = load_balancing_loss(router_logits, top_k=routing.num_experts_per_tok, attention_mask=tokens)
            if "loss" in output:
                output["loss"] = output["loss"] + routing.router_aux_loss_coef * balance
            output["router_logits"], output["aux_loss"] = tuple(router_logits), balance
        if past_key_values is not None:
            output["past_key_values"] = past_key_values
        if hidden_states is not None:
            hidden_states = [state.reshape(batch_size, length, -1) for state in hidden_states]
            output["hidden_states"] = (*hidden_states, x)
        if output_hidden_states or return_logits is False:
            output["last_hidden_state"] = x
        return output

    def hidden(
        self,
        x: Tensor,
        batch: Batch,
        past_key_values: KVCache | None = None,
        hidden_states: list[Tensor] | None = None,
        router_logits: list[Tensor] | None = None,
    ) -> Tensor:
        """The last hidden state [B, S, hidden_size] for embeddings of that shape: all blocks and the final norm.

        `hidden_states`, where given, collects the input of each block; `router_logits` what a block returns
        besides x and residual.
        """
        residual = None
        run = plain if past_key_values is not None else self.checkpointing.start(x, len(self.layers))
        for i, layer in enumerate(self.layers):
            if hidden_states is not None:
                hidden_states.append(x if residual is None else x + residual)
            cache = None if past_key_values is None else past_key_values[i]
            x, residual, *routed = run(i, layer, x, residual, batch, cache)
            if router_logits is not None:
                router_logits += routed
        return self.norm(x, residual)[0]

    def _routing(self, asked: bool | None) -> RoutedConfig | None:
        """The numbers that the balancing loss needs, where router logits are wanted."""
        if not isinstance(self.config, RoutedConfig):
            if asked:
                raise InputError(f"output_router_logits=True, but {type(self).__name__} has no router")
            return None
        return self.config if (self.config.output_router_logits if asked is None else asked) else None

    def _batch(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        past_key_values: KVCache | None,
        cross: CrossStates | None,
    ) -> Batch:
        """What the attention layers need to know besides x: rotation tables and who may see whom."""
        batch_size, length = x.shape[:2]
        past = 0 if past_key_values is None else past_key_values.length
        if position_ids is None and cu_seqlens is None and past == 0:
            cos, sin = self.rotary.count(length, x.device)
        else:
            if position_ids is None:
                position_ids = torch.arange(past, past + length, device=x.device)[None]
                if cu_seqlens is not None:
                    # Whatever the bounds are, this reads within them; torch.repeat_interleave writes beyond its memory.
                    sequence = torch.searchsorted(cu_seqlens, position_ids[0].int(), right=True) - 1
                    position_ids = position_ids - cu_seqlens[sequence]
            cos, sin = self.rotary(position_ids)
        key_mask = None
        if attention_mask is not None:
            if attention_mask.shape != (batch_size, past + length):
                raise InputError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, expected "
                    f"[{batch_size}, {past + length}]: one entry for each cached and each new token"
                )
            key_mask = attention_mask.bool()
            if past == 0 and not must_not_wait(key_mask) and _pads_only_behind(key_mask):
                key_mask = None  # no real token looks ahead, so padding behind it is out of sight already
        return Batch(cos=cos, sin=sin, key_mask=key_mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, cross=cross)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for `batch_size` sequences of up to `max_length` tokens."""
        return KVCache(
            self.config.num_hidden_layers,
            batch_size,
            max_length,
            self.config.num_key_value_heads,
            self.config.head_dim,
            windows=[self.config.window(layer) for layer in range(self.config.num_hidden_layers)],
            dtype=self.dtype,
            device=self.device,
        )

    generate = generate

    @property
    def own_inputs(self) -> set[str]:
        """What forward takes beyond the arguments of every language model: pictures. Also for `generate`."""
        own, shared = (inspect.signature(cls.forward).parameters for cls in (type(self), CausalLM))
        return {name for name in own.keys() - shared.keys() if own[name].kind is not inspect.Parameter.VAR_KEYWORD}

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def tied_weights(self) -> dict[str, str]:
        """Name on disk of a tensor that has no parameter of its own -> the parameter whose copy it must be."""
        return {"lm_head.weight": "embed_tokens.weight"} if isinstance(self.lm_head, TiedLMHead) else {}

    @property
    def _fused_head(self) -> bool:
        return isinstance(self.lm_head, LMHead | TiedLMHead)

    @property
    def base_model(self) -> functools.partial:
        """The model without its head: called like the model, its output has `last_hidden_state`."""
        return functools.partial(self, return_logits=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters, a tied table counted once."""
        embedding = self.embed_tokens.weight if exclude_embeddings else None
        return sum(
            p.numel() for p in self.parameters() if (p.requires_grad or not only_trainable) and p is not embedding
        )

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Keeps less in training and computes it again in the backward; `recompute.py` says what, and what it saves.

        recompute, in the dict: "block", the default, keeps only the sum that enters each block. "mlp" keeps all but
            what is inside of the gated units or experts: more memory than "block", less to compute again. "none".
        offload: what is kept waits in pinned memory of the host until the backward needs it; default False.
        blocks: that many of the first blocks only; default all. What the last blocks keep is freed before the
            gradients of the first ones need memory, so that leaving some of them out may cost none.
        every_n_layers: of these, only every n-th block, from the first on; default 1.
        Everything else goes to torch.utils.checkpoint, for "block".
        A tower for pictures follows, with all of its blocks, unless blocks is 0.

        Raises InputError for another word, number or option.
        """
        self._keep_less(dict(gradient_checkpointing_kwargs or {}))

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """`gradient_checkpointing_enable` under its newer name."""
        here = {"every_n_layers": every_n_layers, "offload": offload}
        self._keep_less(here | dict(activation_checkpointing_kwargs or {}))

    def gradient_checkpointing_disable(self) -> None:
        self._keep_less("none")

    activation_checkpointing_disable = gradient_checkpointing_disable

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.checkpointing.enabled

    gradient_checkpointing = is_gradient_checkpointing

    def _keep_less(self, settings: str | Mapping[str, Any]) -> None:
        self.checkpointing = Checkpointing.of(settings, len(self.layers))
        self.checkpointing.prepare(self.layers)
        if (tower := getattr(self, "vision", None)) is not None:
            tower.checkpointing = self.checkpointing.for_all()
            for blocks in tower.children():
                if isinstance(blocks, nn.ModuleList):
                    tower.checkpointing.prepare(blocks)

    def enable_input_require_grads(self) -> None:
        """Makes the embedding's output require a gradient, as adapters under checkpointing may need."""
        self.embed_tokens.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))

    def prepare_inputs_for_generation(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, **inputs}

    def add_model_tags(self, tags: list[str] | str) -> None:
        self.model_tags += [tags] if isinstance(tags, str) else tags


def packed_sequences(position_ids: Tensor) -> tuple[Tensor | None, int | None]:
    """(cu_seqlens, max_seqlen) of the sequences that position_ids [B, S] mark by restarting; (None, None) if none does.

    Rows are taken one behind the other. A host synchronisation: the number of sequences is read. Raises InputError
    while a CUDA graph is captured, which cannot wait for it.
    """
    if is_captured(position_ids):
        raise InputError(
            "position_ids may mark packed sequences, which the host cannot look for while a CUDA graph is captured; "
            "give cu_seqlens and max_seqlen as well, or leave position_ids out where nothing is packed"
        )
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    bounds = starts.flatten().nonzero().flatten().tolist()
    if len(bounds) == len(position_ids):
        return None, None
    bounds.append(position_ids.numel())
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    return torch.tensor(bounds, dtype=torch.int32, device=position_ids.device), longest


def _pads_only_behind(mask: Tensor) -> bool:
    """True if no row of mask [B, S] has a token behind a gap. A host synchronisation."""
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


class _Targets:
    """`labels` [B, S], the label of the next token at each position, and how many of them count.

    Nothing is to be predicted at the end of a row or of a packed sequence. The loss leaves out the rows without a
    label, and a matrix product needs its size on the host: the number is on its way there while the forward runs.
    The copy is queued before the first block, so that the wait for it ends long before the device runs out of work.
    """

    def __init__(self, labels: Tensor, cu_seqlens: Tensor | None):
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if cu_seqlens is not None:
            targets = targets.flatten().index_fill(0, cu_seqlens[1:].long() - 1, IGNORE_INDEX).view_as(labels)
        self.labels = targets
        self._count: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if not targets.is_cuda or must_not_wait(targets):  # in the latter case all rows are computed
            return
        count = (targets != IGNORE_INDEX).sum()
        self._count = torch.empty_like(count, device="cpu", pin_memory=True)
        self._count.copy_(count, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def count(self) -> int | None:
        """How many labels count; None where that is not known, or cheaply found out by who asks (on the CPU)."""
        if self._count is None or self._copied is None:
            return None
        self._copied.synchronize()
        return int(self._count)
