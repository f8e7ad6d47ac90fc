"""`CausalLM`, the base class of every language model of the zoo: decoder, head and loss.

An architecture names its config class and its block, and what else differs from `Decoder`'s defaults. Loading and
saving are in pretrained.py; trainers.py has what trainers (transformers, TRL, PEFT, accelerate) call by name.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ligermodels.arch.config import ModelConfig
from ligermodels.arch.decoder import Decoder
from ligermodels.arch.fusion import fusion_report
from ligermodels.arch.inputs import IGNORE_INDEX, ForwardInputs, Targets, check_inputs
from ligermodels.arch.output import CausalLMOutput, GenerationConfig
from ligermodels.arch.pretrained import Pretrained
from ligermodels.arch.trainers import TrainerInterface
from ligermodels.generation import generate, generate_batch
from ligermodels.generation.graphs import KeptCaches
from ligermodels.kernels.loss.cross_entropy import cross_entropy
from ligermodels.layers import LMHead, load_balancing_loss
from ligermodels.layers.head import capped, takes_labels, unwrapped, warn_unfused_head
from ligermodels.layers.state import Cache
from ligermodels.libraries import integration

__all__ = ["CausalLM", "CausalLMOutput", "GenerationConfig"]


class CausalLM(Pretrained, TrainerInterface):
    """A decoder-only language model. `from_hub` loads one, `from_config` draws random weights."""

    block_class: ClassVar[type[nn.Module]]
    """Called with (config, layer); see `Decoder`."""
    parallel: Any = None  # transformers evaluates the annotations of classes around ours
    """A `ligermodels.parallel.Parallel`, which `parallelize` sets: how the model is sharded over GPUs."""
    extra_inputs: ClassVar[frozenset[str]] = frozenset()
    """Names of the arguments of forward beyond those of `CausalLM.forward`, such as pixel_values."""
    _no_split_modules: ClassVar[list[str]]
    """Names of the classes of blocks, for accelerate and FSDP: a block stays on one device."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "block_class" in vars(cls):
            cls._no_split_modules = [cls.block_class.__name__]
        parameters, shared = (inspect.signature(forward).parameters for forward in (cls.forward, CausalLM.forward))
        cls.extra_inputs = frozenset(
            name
            for name in parameters.keys() - shared.keys()
            if parameters[name].kind is not inspect.Parameter.VAR_KEYWORD
        )

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.name_or_path = config._name_or_path  # PEFT looks for it in __dict__
        self.vocab_size = config.vocab_size
        self.generation_config = GenerationConfig()
        self.warnings_issued: dict[str, bool] = {}
        self.model_tags: list[str] = []
        self.kept_caches = KeptCaches()
        self.mtp = None
        self.model = self.make_model(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        self.tie_weights()

    @classmethod
    def make_model(cls, config: Any) -> nn.Module:
        """The model without its head; for models that read images, a module with a `language_model`."""
        return Decoder(config, cls.block_class)

    @property
    def decoder(self) -> Decoder:
        """The text model: `model`, or `model.language_model` where the model also reads images."""
        return getattr(self.model, "language_model", self.model)  # type: ignore[return-value, arg-type]

    def tie_weights(self, *args: Any, **options: Any) -> None:
        """Ties the head to the embedding if the config says so, unless an adapter wraps the head."""
        if self.config.tie_word_embeddings and isinstance(self.lm_head, LMHead):
            self.lm_head.tie(self.decoder)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int = 0,
        *,
        ignore_index: int = IGNORE_INDEX,
        return_logits: bool | None = None,
        return_logprobs: bool = False,
        loss_function: Callable[..., Tensor] | None = None,
        skip_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> CausalLMOutput:
        """Logits, or with `labels` the loss.

        input_ids: [B, S], or inputs_embeds: [B, S, hidden_size] in their place.
        attention_mask: [B, past + S], 1 at tokens, 0 at padding on either side. Leave it out where nothing is padded:
            reading it costs a host synchronisation.
        position_ids: [B, S] or [1, S], or [axes, B or 1, S] where positions have several axes (multimodal); default
            0, 1, ... after the cached tokens. Without a mask and a cache, ids of one axis that restart mark packed
            sequences: no token sees another sequence. Finding the restarts costs a host synchronisation (and breaks
            the graph of torch.compile). `cu_seqlens` saves it.
        labels: [B, S], the ids themselves (the shift by one happens here), -100 where nothing is to be predicted. The
            fused linear cross entropy then runs, and logits are None, unless `return_logits=True`, or in evaluation
            (`eval()` and no gradients), where trainers ask for predictions; `return_logits=False` leaves them out
            there. Where tokens are padded on the left, give the first token of a row the label -100: else the last
            position of the padding, which sees nothing, has to predict it (in transformers as well, where the loss then
            depends on the implementation of attention).
        num_items_in_batch: the loss is the sum over tokens divided by this, where given, instead of the mean: the
            count of labels over all micro-batches of a step (under `parallelize` of all ranks, `parallel.count`). A
            device scalar costs no synchronisation.
        past_key_values, use_cache: a cache to read and extend; `use_cache` creates one where none is given, which grows
            as it is extended. None means the config's `use_cache` in evaluation (`eval()`) without labels, as long as
            nothing is packed, recomputed in a backward, or split over GPUs, and else False. Gradients reach the new
            tokens alone, not the cached ones. Where `decoder.rotary_emb.needs_recompute(past, past + S)` (longrope),
            empty it and pass the whole text, as `generate` does: the cached keys were rotated by other frequencies.
        logits_to_keep: compute the logits, or with return_logits=False the last hidden state, of the last n positions
            only; 0: of all.
        ignore_index: a label that counts as -100 does.
        return_logits: False without labels skips the head, and `last_hidden_state` is all there is.
        return_logprobs: with labels, returns `logprobs` in place of the loss: at each position the log probability of
            the label after it, 0 where nothing is to be predicted. Not under context or tensor parallelism.
        loss_function: with labels, computed in place of the cross entropy; see `LMHead.forward`. Excludes logits.
        skip_logits: with labels, the opposite of `return_logits`, as Trainer passes it.
        output_hidden_states: adds `hidden_states` and `last_hidden_state`.

        By keyword alone:

        shift_labels: [B, S], labels of the next tokens, shifted by the caller, in place of `labels`. Trainer expects
            each parameter of forward with "label" in its name in every batch, so that this cannot be one.
        cu_seqlens: int32 [N + 1], the boundaries of the packed sequences in the rows, which follow each other.
            max_seqlen: the length of the longest one.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: cu_seqlens and max_seqlen as the collators of
            transformers and TRL name them, for queries and for keys, which must be equal.
        output_router_logits: for mixtures of experts, adds `router_logits` and `aux_loss`, which is added to the loss
            as well, times the config's `router_aux_loss_coef`, where it has one; default: the config's
            `output_router_logits`.
        experts: for mixtures of experts, integers [L, B * S, top_k], the experts that each token takes in each of the
            L blocks, -1 for the router's choice; their weights, with gradients, are those of this forward's logits.
        output_experts: adds `experts`, those that the routers choose; blocks without a router have -1.
        output_attentions, return_dict: for callers that always pass them; attention weights are never in memory.
        cache: past_key_values, by the name that transformers has for it since 5.24.
        cache_position: those of the tokens after the cached ones; others raise.
        seq_idx, token_type_ids, length and others of `inputs.NO_EFFECT`: ignored.
        Images and their sizes; see the model's own forward.

        Raises InputError for unknown arguments, and for arguments that do not fit together.
        """
        shift_labels = others.pop("shift_labels", None)
        shifted = shift_labels is not None
        labels = shift_labels if shifted else labels
        if skip_logits is not None and return_logits is None and labels is not None:
            return_logits = not skip_logits
        # With transformers' classes around ours, self.config is not the config of self.model.
        if use_cache is None and (labels is not None or not getattr(self.config, "use_cache", True)):
            use_cache = False
        text, options = check_inputs(
            self.model, input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask,
            position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache, **others,
        )  # fmt: skip
        inputs = ForwardInputs(
            text, labels, num_items_in_batch, logits_to_keep, ignore_index, return_logits, return_logprobs,
            loss_function, output_hidden_states,
        )  # fmt: skip
        inputs.check(self)
        targets = None
        if labels is not None:  # before the blocks: the count of labels is on the host when the head asks for it
            targets = self._targets(labels, inputs, shifted=shifted, ignore_index=ignore_index)
            if self._trains_mtp(inputs):
                options["mtp"] = self.mtp
        output = self.model(inputs.of_decoder, output_hidden_states=output_hidden_states, **options)
        return self._with_head(output, inputs, targets)

    def _targets(self, labels: Tensor, inputs: ForwardInputs, **options: Any) -> Targets:
        """The labels of the next tokens, and what their losses are divided by."""
        targets = Targets(labels, inputs.text.cu_seqlens, self.decoder.cp, **options)
        targets.num_items_in_batch = inputs.num_items_in_batch
        if self.parallel is not None and targets.num_items_in_batch is None:
            targets.num_items_in_batch = self.parallel.total(targets.labels)
        return targets

    def _trains_mtp(self, inputs: ForwardInputs) -> bool:
        """Whether a call with labels computes the loss of `mtp` beside the cross entropy."""
        has_cross_entropy = inputs.loss_function is None and not inputs.return_logprobs
        trains = self.training and self.mtp is not None and bool(self.mtp.loss_weight)
        return trains and has_cross_entropy and inputs.text.cache is None

    def _with_head(self, output: CausalLMOutput, inputs: ForwardInputs, targets: Targets | None) -> CausalLMOutput:
        """The output of the blocks with what the head makes of it: logits, loss or log probabilities."""
        parallel, cp = self.parallel, self.decoder.cp
        evaluates = not self.training and not torch.is_grad_enabled()
        wants_logits = inputs.return_logits or (inputs.return_logits is None and (targets is None or evaluates))
        keeps = inputs.output_hidden_states or (targets is None and not wants_logits)
        x = output["last_hidden_state"] if keeps else output.pop("last_hidden_state")
        computed: dict[str, Any] = {}
        if targets is not None and inputs.return_logprobs:
            computed = {"logprobs": self._logprobs(x, targets)}
        elif targets is not None:
            with_logits = bool(wants_logits) and inputs.loss_function is None
            computed = self._loss(x, targets, with_logits=with_logits, loss_function=inputs.loss_function)
            if "mtp_hidden_states" in output:
                computed["mtp_loss"] = self._mtp_loss(output.pop("mtp_hidden_states"), inputs, targets)
                computed["loss"] = computed["loss"] + self.mtp.loss_weight * computed["mtp_loss"]
        elif wants_logits:
            computed["logits"] = self.logits_of(x[:, -inputs.logits_to_keep :] if inputs.logits_to_keep else x)
        for name in ("loss", "mtp_loss") if parallel is not None else ():
            if name in computed:
                computed[name] = parallel.data.all_reduce(computed[name])
        if cp is not None and "logits" in computed:
            logits = cp.all_gather_replicated(computed["logits"], 1)
            computed["logits"] = logits.reshape(*inputs.text.tokens.shape[:2], -1)
        weight = getattr(self.config, "router_aux_loss_coef", None)
        if "router_logits" in output and weight is not None:
            mask = inputs.text.attention_mask
            mask = mask if mask is None or cp is None else cp.shard(mask, 1)
            output["aux_loss"] = load_balancing_loss(
                output["router_logits"],
                top_k=cast(Any, self.decoder.config).num_experts_per_tok,
                attention_mask=None if mask is None else mask[:, -inputs.text.tokens.shape[1] :],
                data=None if parallel is None else parallel.data,
            )
            if "loss" in computed:
                computed["loss"] = computed["loss"] + weight * output["aux_loss"]
        return CausalLMOutput({**computed, **output})

    def _loss(
        self, x: Tensor, targets: Targets, *, with_logits: bool, loss_function: Callable[..., Tensor] | None
    ) -> dict[str, Any]:
        """The loss of the last hidden state, and with `with_logits` the logits."""
        head = unwrapped(self.lm_head)
        if takes_labels(head) and not with_logits:
            count = targets.num_items_in_batch
            options: dict[str, Any] = dict(num_items_in_batch=count, num_valid=targets.count())
            if loss_function is not None:
                options["loss_function"] = loss_function
            return {"loss": head(x, labels=targets.labels, softcap=self._softcap, **options)}
        if not takes_labels(head):  # an adapter wraps the head, and computes all logits
            warn_unfused_head(self.lm_head, x)
        logits = self.logits_of(x)
        loss = cross_entropy(logits, targets.labels, num_items_in_batch=targets.num_items_in_batch)
        return {"loss": loss, "logits": logits} if with_logits else {"loss": loss}

    def _mtp_loss(self, x: Tensor, inputs: ForwardInputs, targets: Targets) -> Tensor:
        """The loss of `mtp`, whose states x predict the token after the next one."""
        ahead = self._targets(targets.of_all_tokens, inputs)
        return self._loss(x, ahead, with_logits=False, loss_function=None)["loss"]

    def _logprobs(self, x: Tensor, targets: Targets) -> Tensor:
        """The log probability of each label, [B, S]."""
        head = unwrapped(self.lm_head)
        if takes_labels(head):
            options: dict[str, Any] = dict(return_logprobs=True, num_valid=targets.count())
            return head(x, labels=targets.labels, softcap=self._softcap, **options)
        warn_unfused_head(self.lm_head, x)
        return -cast(Tensor, cross_entropy(self.logits_of(x), targets.labels, reduction="none"))

    def logits_of(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of last hidden states [..., hidden_size]."""
        return capped(unwrapped(self.lm_head)(hidden), self._softcap)

    @property
    def _softcap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    generate = generate
    generate_batch = generate_batch

    def release(self) -> None:
        """Frees the caches and CUDA graphs that `generate` keeps for its next call."""
        self.kept_caches.entries.clear()

    fusion_report = fusion_report

    def new_cache(self, rows: int, max_length: int, **options: Any) -> Cache:
        """An empty cache for `rows` sequences of up to `max_length` tokens; see `Decoder.new_cache`."""
        return self.decoder.new_cache(rows, max_length, **options)

    @property
    def device(self) -> torch.device:
        """The device of the embedding, or the one that accelerate moves it to when it is offloaded."""
        table: Any = self.decoder.embed_tokens
        accelerate = integration("accelerate") if table.weight.is_meta else None
        return (accelerate and accelerate.execution_device(table)) or table.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.embed_tokens.weight.dtype
