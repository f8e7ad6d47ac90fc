"""The stack that every language model of the zoo shares: embedding, rotary tables, blocks, final norm.

`model.model` is what transformers calls the base model, a `BaseModel`: a `Decoder`, or where a model also reads images,
one with a vision tower whose `language_model` is the `Decoder`.
"""

import copy
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.arch.block import ResidualBlock
from ligermodels.arch.config import ModelConfig, RoutedConfig
from ligermodels.arch.hooks import for_user_hooks, is_plain
from ligermodels.arch.inputs import TextInputs, check_inputs
from ligermodels.arch.output import CausalLMOutput
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import Batch, Embedding, RMSNorm, RotaryEmbedding
from ligermodels.layers.base import Layer
from ligermodels.layers.batch import NextToken
from ligermodels.layers.linear import has_hooks
from ligermodels.layers.parallel import MeshGroup
from ligermodels.layers.state import KV_CACHE_DTYPES, Cache, State, check_cache_dtype
from ligermodels.libraries import integration
from ligermodels.training.recompute import Checkpointing, must_not_sync, run_block

MANY_TOKENS = 2**20
"""Caches of up to this number of tokens are allocated without comparing their size with the memory first."""


class BaseModel(nn.Module):
    """A model without its head: `forward` checks the arguments, `run` of the subclass computes."""

    always_runs_tower: bool = False
    """Whether a vision tower also runs for a batch without images, on an empty image whose result is multiplied by 0:
    under FSDP, all ranks must gather its weights together, whatever their batches are. Its gradients are then 0, and an
    optimizer decays it; False where no rank has an image leaves it alone."""
    run: Callable[..., CausalLMOutput]
    run_options: ClassVar[frozenset[str]] = frozenset()
    """The keywords of `run`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        parameters = inspect.signature(cls.run).parameters.values()
        keywords = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        cls.run_options = frozenset(keywords | Decoder.run_options if passes_on else keywords)

    def forward(
        self,
        input_ids: Tensor | TextInputs | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """The last hidden state, and where asked for the cache, the hidden states and the router logits.

        Arguments as in `CausalLM.forward`, all but those of the head: TRL and PEFT call this in its place. Those that
        ask a head for less, such as logits_to_keep, have no effect.
        input_ids: also the `TextInputs` of a caller that has checked the other arguments.
        """
        if not isinstance(input_ids, TextInputs):
            input_ids, options = check_inputs(
                self,
                input_ids=input_ids,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **options,
            )
        return self.run(input_ids, **options)


class Decoder(BaseModel):
    """Token ids to the last hidden state.

    block: (config, layer) -> a `ResidualBlock`. norm: keyword arguments of the final RMSNorm beside size and eps.
    embedding_scale: multiplies the embedding's rows. extra_rows: rows of the embedding beyond `vocab_size`.
    position_axes: how many positions a token may have. ropes: rotary embeddings by name, for attention that reads none
    of the config's.
    cp, tp: the groups of ranks of context and tensor parallelism. Every rank gets all tokens, and returns the last
    hidden state of its part of the sequence.
    """

    cp: MeshGroup | None = None
    tp: MeshGroup | None = None
    first_reader: int | None = None
    """The first block from which on no block has keys of its own. Where the last states of a text are wanted alone
    (`TextInputs.last`), those tokens alone run from there on, over the keys of all."""
    param_dtype: torch.dtype | None = None
    """The dtype of the weights in the blocks under FSDP's mixed precision; None: as they are stored."""
    _tied_head: Any = None
    """A weak reference to the head that is tied to the table, which `LMHead.tie` sets."""

    def __init__(
        self,
        config: ModelConfig,
        block: Callable[[Any, int], nn.Module],
        *,
        norm: Mapping[str, Any] | None = None,
        embedding_scale: float | None = None,
        extra_rows: int = 0,
        position_axes: int = 1,
        ropes: Mapping[str, RotaryEmbedding] | None = None,
    ):
        super().__init__()
        self.config = config
        self.position_axes = position_axes
        self.checkpointing = Checkpointing()
        size = config.hidden_size
        self.embed_tokens = Embedding(
            config.vocab_size + extra_rows, size, embed_scale=embedding_scale, padding_idx=config.padding_idx
        )
        self.layers = nn.ModuleList(block(config, layer) for layer in range(config.num_hidden_layers))
        for layer in self.layers:
            if not isinstance(layer, ResidualBlock):
                raise InputError(
                    f"a {type(layer).__name__} cannot be a layer of a Decoder: its class must inherit from "
                    "ligermodels.arch.block.ResidualBlock instead of nn.Module"
                )
        self.norm = RMSNorm(size, eps=config.rms_norm_eps, **(norm or {}))
        head_dims: dict[str, int] = {}
        for i in range(config.num_hidden_layers):
            name, head_dim = config.rope(i), config.layer(i).head_dim
            if head_dims.setdefault(name, head_dim) != head_dim:
                raise ConfigError(
                    f"{config.model_type}: blocks with a head_dim of {head_dims[name]} and of {head_dim} read one "
                    f"rope, {name!r}, whose tables have one size: config.rope(layer) has to name two"
                )
        if missing := {"full", *head_dims} - config.ropes.keys():
            raise ConfigError(
                f"{config.model_type}: rope_parameters has ropes of {', '.join(config.ropes)}, and not of "
                f"{', '.join(missing)}"
            )
        tables = {
            name: self._rotary(settings, head_dims.get(name, config.head_dim))
            for name, settings in config.ropes.items()
        }
        self.rotary_emb = tables.pop("full")
        self.ropes = nn.ModuleDict({**tables, **(ropes or {})})
        for name, other in self.ropes.items():
            if other.rope_type in ("dynamic", "longrope"):
                raise ConfigError(
                    f"rope {name!r} has rope_type={other.rope_type!r}, which chooses frequencies by the length of a "
                    'text: only the tables of the config ("full") can'
                )

    def _rotary(self, rope: Mapping[str, Any], head_dim: int) -> RotaryEmbedding:
        """The tables of a rope's settings."""
        rope = dict(rope)
        if self.position_axes == 1:  # the sections of M-RoPE make no difference: a token has one position
            rope = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
        return RotaryEmbedding(
            head_dim,
            sections=rope.pop("mrope_section", None),
            interleaved=rope.pop("mrope_interleaved", False),
            theta=rope["rope_theta"],
            scaling=rope,
            max_position_embeddings=self.config.max_position_embeddings,
            partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "embed_tokens" and (peft := integration("peft")) is not None:
            peft.untie_for_modules_to_save(self, value)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Without the reference to the tied head: a copied head sets its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_tied_head"}

    def run(
        self,
        inputs: TextInputs,
        *,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        output_experts: bool = False,
        mtp: nn.Module | None = None,
    ) -> CausalLMOutput:
        """`forward` for checked inputs. mtp: a `MultiTokenPrediction`, whose states are `mtp_hidden_states` of the
        output; those of the last token of a text mean nothing."""
        if output_router_logits is None:
            output_router_logits = getattr(self.config, "output_router_logits", False)
        elif output_router_logits and not isinstance(self.config, RoutedConfig):
            raise InputError(f"output_router_logits=True, but {self.config.model_type} has no router that returns them")
        if output_experts and not isinstance(self.config, RoutedConfig):
            raise InputError(f"output_experts=True, but {self.config.model_type} has no router that records them")
        cache, tokens, residual = inputs.cache, inputs.tokens, None
        if inputs.cu_seqlens is not None:
            tokens = tokens.reshape(1, -1, *tokens.shape[2:])
        batch, x = self._batch(tokens, inputs), self._embedded(tokens, inputs)
        shape = (*inputs.tokens.shape[:2], x.shape[-1]) if self.cp is None else x.shape
        following = None if mtp is None else self._following(tokens, inputs, x)
        if self.tp is not None:
            x = self.tp.scatter(x, 1)
        hidden_states: list[Tensor] = []
        router_logits: list[Tensor] = []
        experts: list[Tensor | None] = []
        records = output_experts or (cache is not None and "experts" in cache.values)
        carry = self.first_carry(tokens, inputs, x)
        run, cut = self.runner(tokens, inputs, x), self._cut(inputs)
        if cache is not None and inputs.decode_step is None:
            cache.begin()
        for i, layer in enumerate(self.layers):
            if i == cut:
                x, residual = x[:, -inputs.last :], None if residual is None else residual[:, -inputs.last :]
                carry, batch = self.carry_of_last(carry, inputs.last), _of_last_tokens(batch, inputs.last)
                shape = x.shape
            if output_hidden_states:
                hidden_states.append((x if residual is None else x + residual).reshape(shape))
            is_plain_block = isinstance(layer, ResidualBlock) and not has_hooks(layer)
            block, carries = (layer, layer.carries) if is_plain_block else for_user_hooks(layer)
            more = (self.inputs_of(i, carry) | _routing(i, inputs, records),) if carries else ()
            x, residual, *added = run(i, block, x, residual, batch, None if cache is None else cache[i], *more)
            if added:
                new = dict(added[0])
                routed, chosen, carry = new.pop("router_logits", ()), new.pop("experts", ()), carry | new
                router_logits += routed if output_router_logits else ()
                experts.append(chosen[0] if chosen else None)
        if isinstance(self.norm, Layer) and is_plain(self.norm):
            x, _ = self.norm(x, residual)
        else:  # a user's hook, wrapper or norm takes and returns the hidden state
            x = self.norm(x if residual is None else x + residual)
        last = {"last_hidden_state": x}
        if mtp is not None:
            last["mtp_hidden_states"] = mtp(following, last["last_hidden_state"], batch)
        if self.tp is not None:
            last = {name: self.tp.all_gather(x, 1) for name, x in last.items()}
        output = CausalLMOutput({name: x.reshape(shape) for name, x in last.items()})
        if inputs.last:
            output["last_hidden_state"] = output["last_hidden_state"][:, -inputs.last :]
        if records:
            some = next(x for x in experts if x is not None)
            output["experts"] = torch.stack([torch.full_like(some, -1) if x is None else x for x in experts])
        if cache is not None:
            if "experts" in cache.values:
                cache.record(output["experts"].unflatten(1, shape[:2]), inputs.decode_step)
            if inputs.decode_step is None:
                cache.advance(inputs.tokens.shape[1])
            output["past_key_values"] = cache if cache.foreign is None else cache.foreign
        if output_hidden_states:
            output["hidden_states"] = (*hidden_states, output["last_hidden_state"])
        if output_router_logits:
            output["router_logits"] = tuple(router_logits)
        return output

    def new_cache(self, rows: int, max_length: int, *, kv_cache_dtype: str | None = None, whole: bool = False) -> Cache:
        """An empty cache for `rows` sequences of up to `max_length` tokens, beyond which it grows.

        kv_cache_dtype: "fp8" takes half the memory. whole: layers with a window store all tokens too, as the
        source of `Cache.copy_rows_from` must. Raises InputError where it is larger than the device's memory, see
        `check_cache_size`, and for fp8 on a GPU before Ada.
        """
        kind = "auto" if kv_cache_dtype is None else kv_cache_dtype
        if kind not in KV_CACHE_DTYPES:
            raise InputError(f"kv_cache_dtype={kv_cache_dtype!r:.80} must be one of {', '.join(KV_CACHE_DTYPES)}")
        check_cache_dtype(kind, self.embed_tokens.weight.device)
        self.check_cache_size(rows, max_length, kind)
        with torch.inference_mode(False):  # the cache may leave the mode
            states = self._new_states(rows, max_length, self.embed_tokens.weight.device, kind, whole)
        rotary = self.rotary_emb
        return Cache(states, rows, kind, rotary.original_length if rotary.rope_type == "longrope" else math.inf)

    def check_cache_size(self, rows: int, max_length: int, kv_cache_dtype: str = "auto") -> None:
        """Raises InputError for texts whose ids and cache are larger than the device's memory. Few tokens are left to
        the allocator."""
        if rows * max_length <= MANY_TOKENS:
            return
        device = self.embed_tokens.weight.device
        least, next_one = (
            sum(x.nbytes for state in self._new_states(rows, length, "meta", kv_cache_dtype) for x in state.buffers)
            for length in (MANY_TOKENS, MANY_TOKENS + 1)
        )
        need = least + (next_one - least) * (max_length - MANY_TOKENS) + 8 * rows * max_length
        if need > (total := total_memory(device)):
            raise InputError(
                f"{rows} x {max_length} tokens need a cache of {need / 1e9:,.0f} GB, and the memory of {device} is "
                f"{total / 1e9:,.0f} GB: lower max_new_tokens, or the number of rows"
            )

    def _new_states(
        self, rows: int, max_length: int, device: torch.device | str, kind: str, whole: bool = False
    ) -> list[State]:
        options = dict(kv_cache_dtype=kind, dtype=self.compute_dtype, device=device, whole=whole)
        mixers = map(_mixer, self.layers)
        states = (None if mixer is None else mixer.new_state(rows, max_length, **options) for mixer in mixers)
        return [state or State() for state in states]

    def first_carry(self, tokens: Tensor, inputs: TextInputs, x: Tensor) -> dict[str, Any]:
        """What the first block gets that carries. tokens: ids or embeddings, packed; x: their embeddings, a rank's."""
        return {}

    def inputs_of(self, layer: int, carry: dict[str, Any]) -> dict[str, Any]:
        """What block `layer` gets of all that was added before it."""
        return carry

    def carry_of_last(self, carry: dict[str, Any], count: int) -> dict[str, Any]:
        """`carry` where the last `count` tokens of each row run alone from here on, over the keys of all."""
        return carry

    def _cut(self, inputs: TextInputs) -> int | None:
        """The block from which on the last tokens run alone. None: all tokens run through all blocks, as they also do
        where rows are packed, and where a hook of a user gets the states of these blocks."""
        first = self.first_reader
        if first is None or not 0 < inputs.last < inputs.tokens.shape[1] or inputs.cu_seqlens is not None:
            return None
        readers = [module for layer in [*self.layers][first:] for module in layer.modules()]
        return first if is_plain(self.norm, *readers) else None

    def runner(self, tokens: Tensor, inputs: TextInputs, x: Tensor) -> Callable[..., Any]:
        """What runs each block, see `Checkpointing.start`. A family overrides it that adds something between blocks."""
        return run_block if inputs.cache is not None else self.checkpointing.start(x, len(self.layers))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return self.param_dtype or self.embed_tokens.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        self.embed_tokens = embeddings  # type: ignore[assignment]

    def _embedded(self, tokens: Tensor, inputs: TextInputs) -> Tensor:
        """The embeddings of this rank's part of `tokens`, which are ids, or embeddings already."""
        tokens = tokens if self.cp is None else self.cp.shard(tokens, 1)
        return self.embed_tokens(tokens) if inputs.inputs_embeds is None else tokens

    def _following(self, tokens: Tensor, inputs: TextInputs, x: Tensor) -> Tensor:
        """The embeddings of the tokens after those of this rank, whose own are x; the last one means nothing."""
        x = x.roll(-1, 1) if self.cp is None else self._embedded(tokens.roll(-1, 1), inputs)
        return x if self.tp is None else self.tp.scatter(x, 1)

    def own_tokens(self, states: Tensor) -> Tensor:
        """This rank's part of `states` [B, S, hidden_size] of all tokens."""
        states = states if self.cp is None else self.cp.shard(states, 1)
        return states if self.tp is None else self.tp.scatter(states, 1)

    def _batch(self, tokens: Tensor, inputs: TextInputs) -> Batch:
        """The inputs of the blocks besides x: rotary tables and masks."""
        length, past, cu_seqlens = tokens.shape[1], inputs.past_length, inputs.cu_seqlens
        position_ids = inputs.position_ids
        embeddings: list[tuple[str, Any]] = [("full", self.rotary_emb), *self.ropes.items()]
        if position_ids is None and cu_seqlens is None and past == 0:
            rotary = {name: embedding.tables(length, tokens.device) for name, embedding in embeddings}
        else:
            if position_ids is None:
                position_ids = torch.arange(past, past + length, device=tokens.device)[None]
                if cu_seqlens is not None:
                    # Whatever the bounds are, this reads within them; torch.repeat_interleave writes beyond its memory.
                    sequence = torch.searchsorted(cu_seqlens, position_ids[0].int(), right=True) - 1
                    position_ids = position_ids - cu_seqlens[sequence]
            elif cu_seqlens is not None:
                axes = position_ids.shape[:-2]
                position_ids = position_ids.expand(*axes, *inputs.tokens.shape[:2]).reshape(*axes, 1, -1)
            rotary = {name: embedding(position_ids) for name, embedding in embeddings}
        if self.cp is not None:
            for name, (cos, sin) in rotary.items():
                rotary[name] = self.cp.shard(cos, 1).contiguous(), self.cp.shard(sin, 1).contiguous()
        key_mask = None if inputs.attention_mask is None else inputs.attention_mask.bool()
        token_mask = None if key_mask is None else key_mask[:, -length:]
        if key_mask is not None and past == 0 and not must_not_sync(key_mask) and _pads_only_after(key_mask):
            key_mask = None  # no token before the padding sees it: attention is causal
        if inputs.decode_step is not None:
            starts, ends = inputs.decode_step
            return Batch(rotary=rotary, next_token=NextToken(starts=starts, ends=ends))
        return Batch(
            rotary=rotary, key_mask=key_mask, token_mask=token_mask, cu_seqlens=cu_seqlens,
            max_seqlen=inputs.max_seqlen, past_length=past, cp=self.cp,
        )  # fmt: skip


def _of_last_tokens(batch: Batch, count: int) -> Batch:
    """`batch` for the last `count` tokens of each row, which see the keys of all."""
    batch = copy.copy(batch)
    batch.rotary = {
        name: (cos[:, -count:].contiguous(), sin[:, -count:].contiguous()) for name, (cos, sin) in batch.rotary.items()
    }
    batch.token_mask = None if batch.token_mask is None else batch.token_mask[:, -count:]
    return batch


def total_memory(device: torch.device) -> float:
    """The bytes of a GPU or of the host; infinity where they are not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return math.inf


def _pads_only_after(mask: Tensor) -> bool:
    """True if every row of mask [B, S] begins with a token, and none has one after a gap. Synchronises.

    A row without tokens is the left padding of a prompt in chunks, which a recurrent mixer must not take for tokens.
    """
    return bool((mask[:, 1:] <= mask[:, :-1]).all() & mask[:, 0].all())


def _routing(layer: int, inputs: TextInputs, records: bool) -> dict[str, Any]:
    """The entries of `carry` for block `layer` that `Routed` reads; none unless experts are given or recorded."""
    replayed = {} if inputs.experts is None else {"replayed": inputs.experts[layer]}
    return replayed | ({"records": True} if records else {})


def _mixer(layer: nn.Module) -> Any:
    """The outermost module in a layer of the stack that makes a state; None where nothing in it reads other tokens.

    Raises InputError for a module that reads them, since its forward takes a batch, and makes no state.
    """
    mixer = next((module for module in layer.modules() if hasattr(module, "new_state")), None)
    if mixer is None:
        blocks = [block for block in layer.modules() if isinstance(block, ResidualBlock)]
        for module in {module for block in blocks for module in block.modules()} - {*blocks}:
            if "batch" in inspect.signature(type(module).forward).parameters:
                name = f"{type(module).__module__}.{type(module).__qualname__}"
                raise InputError(
                    f"a {name} cannot be cached: its forward takes a batch, and it has no method new_state(), which "
                    "makes what it stores of the tokens before (or returns None: nothing); or pass use_cache=False"
                )
    return mixer
