"""Self-attention with rotary positions and an optional window; causal, or of all to all."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._recompute import attach_to_view
from ligermodels.kernels.attention.attention import attention, engine
from ligermodels.kernels.attention.decode_attention import HeadNorms
from ligermodels.kernels.attention.decode_keys_as_values import rotating_dims, whole_keys
from ligermodels.kernels.attention.rope import rope, rope_qk
from ligermodels.kernels.linear.glu import glu
from ligermodels.kernels.linear.linear import linears
from ligermodels.layers.base import Draw, FusionContext, FusionPart, Shard, normal
from ligermodels.layers.batch import Batch
from ligermodels.layers.fusion import linears_part
from ligermodels.layers.linear import (
    JointProjections,
    apply_linears,
    is_plain_call,
    operands_of,
    run_linear,
    warn_unfused,
)
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.parallel import MeshGroup, local_shard, replicated
from ligermodels.layers.state import KeyValues


class Attention(JointProjections):
    """Self-attention: [B, S, hidden_size] -> [B, S, hidden_size].

    forward(x, batch, cache=None): `cache` is one layer of a `Cache`; its keys and values come first, and the new
    ones are appended; with `batch.next_token`, at a column that is read from the device. If q_proj, k_proj and v_proj
    are fusable, they are one op, and q, k and v stay in its output up to the attention: nothing is copied.

    num_kv_heads: num_heads / num_kv_heads query heads share one key head. window: the number of tokens that a query
    sees, counting itself; None is all. softcap: scores become softcap * tanh(scores / softcap). scale: multiplies the
    scores, default head_dim ** -0.5. causal=False: a token sees its whole row, or its packed sequence; there is no
    cache. rope: the name in `batch.rotary` of the tables that rotate
    q and k, which say how many dims of a head do; None: nothing rotates. qk_norm: keyword arguments of the RMSNorms
    q_norm and k_norm of each head of q and k, before it rotates; None: no norm. output_gate: q_proj has 2 * head_dim
    rows a head, a query and a gate; the head's output is multiplied by sigmoid(gate) before o_proj. projections: the
    names of the linear modules, the output's last. With two names q, k and v are the rows of one weight, in this order.
    v_norm: keyword arguments of the RMSNorm v_norm of each head of v. keys_as_values: there is no v_proj, and v is k
    before its norm and rotation. rotating: with keys_as_values and two norms that differ in k_norm's weight alone, the
    number of dims of a head that the tables rotate; the cache then stores v and these dims of k, if every token sees
    all, since the others are those of v times the weight. gives_keys: forward returns (y, keys), which later layers can
    read in place of their own; the cache stores k whole. reads_keys: the layer has q_proj alone, and forward(x, batch,
    cache, keys) reads those of an earlier one, of the same heads and window; it stores nothing.
    sinks: a learned score per query head, which joins the softmax without a key and a value, as in gpt-oss.
    tp: the ranks over which the heads are sharded (tensor parallel); x is then a rank's shard [B, S/n, hidden_size].
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        o_bias: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        causal: bool = True,
        rope: str | None = "full",
        qk_norm: Mapping[str, Any] | None = None,
        v_norm: Mapping[str, Any] | None = None,
        output_gate: bool = False,
        keys_as_values: bool = False,
        rotating: int | None = None,
        gives_keys: bool = False,
        reads_keys: bool = False,
        sinks: bool = False,
        projections: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    ):
        super().__init__()
        if window is not None and window < 1:
            raise InputError(f"Attention: window={window}; expected 1 or more tokens, the query's included, or None")
        if num_heads % num_kv_heads:
            raise InputError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.softcap = softcap
        self.scale = scale
        self.causal = causal
        self.rope = rope
        self.output_gate = output_gate
        self.keys_as_values, self.gives_keys, self.reads_keys = keys_as_values, gives_keys, reads_keys
        *self.joint_names, self.output_name = projections
        self.joint_names = self.joint_names[: len(self._rows)]
        rows = self._rows if len(projections) == 4 else (sum(self._rows),)
        for name, out_features in zip(self.joint_names, rows, strict=True):
            self.add_module(name, nn.Linear(hidden_size, out_features, bias=qkv_bias))
        self.add_module(self.output_name, nn.Linear(num_heads * head_dim, hidden_size, bias=o_bias))
        self.q_norm = None if qk_norm is None else RMSNorm(head_dim, **qk_norm)
        self.k_norm = None if qk_norm is None or reads_keys else RMSNorm(head_dim, **qk_norm)
        self.v_norm = None if v_norm is None or reads_keys else RMSNorm(head_dim, **v_norm)
        if rotating is not None and not (
            keys_as_values and qk_norm and {**qk_norm, "elementwise_affine": False} == v_norm and rope is not None
            and not qk_norm.get("offset") and rotating % 2 == 0 and 0 < rotating <= head_dim
        ):  # fmt: skip
            raise InputError(
                f"rotating={rotating} needs keys_as_values, a rope that rotates an even number of dims of a head, and "
                "a v_norm like qk_norm, without an offset and a weight"
            )
        if sinks and rotating is not None:
            raise InputError(f"rotating={rotating} makes keys of values, which decodes without sinks; leave it out")
        self.sinks = nn.Parameter(torch.empty(num_heads)) if sinks else None
        self.rotating = None if gives_keys or not causal or window or softcap or rotating == head_dim else rotating
        self.join_weights()
        self.reset_parameters()

    def forward(self, x: Tensor, batch: Batch, cache: KeyValues | None = None, keys: Any = None) -> Any:
        self._check(batch, cache, keys)
        o_proj, cp = self.output_module, batch.cp
        output = operands_of([o_proj])
        tables = None if self.rope is None else batch.rotary[self.rope]
        token = None if cache is None else batch.next_token
        x = x if self.tp is None else self.tp.all_gather(x, 1)
        # The cache normalises and rotates the token that it stores.
        weight = None if token is None else self._weight_of_keys(cache, past=None)
        norms = None if token is None or weight is not None else self._norms()
        q, k, v, gate = self._qkv(x, tables if token is None or self.reads_keys else None, normed=norms is None)
        if cp is not None:
            q, k, v = (part if part is None else cp.to_heads(part) for part in (q, k, v))
        sinks = self._sinks(cp)
        key_mask, together = batch.key_mask, batch.together
        if cache is not None and token is not None:
            state = keys if self.reads_keys else cache
            options: Any = dict(window=self.window, softcap=self.softcap, scale=self.scale)
            if sinks is not None:
                options["sinks"] = sinks
            if weight is not None:
                options["weight"] = weight
            if norms is not None:
                options["norms"] = norms
            out = state.attend(q, k, v, token, tables, **options)
            if gate is not None:
                out = glu(gate, out, activation="sigmoid")
            y = run_linear(o_proj, out.flatten(2), output)
            return (y, state) if self.gives_keys else y
        if self.reads_keys:
            k, v = keys
        elif cache is not None:
            k, v = self._append(k, v, cache, batch.past_length)
        if cache is not None:  # masks are over all tokens so far, and a window leaves the last
            key_mask = None if key_mask is None else key_mask[:, -k.shape[1] :]
            together = None if together is None else together[:, -k.shape[1] :]
        out = attention(
            q,
            k,
            v,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            key_mask=key_mask,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            head_chunks=output is not None and cp is None and gate is None,
            together=together,
            sinks=sinks,
        )
        if cp is not None:
            out = cp.to_tokens(out)
        if gate is not None:
            out = glu(gate, out, activation="sigmoid")
        y = run_linear(o_proj, attach_to_view(out, out.flatten(2)), output)
        y = y if self.tp is None else self.tp.reduce_scatter(y, 1)
        return (y, (k, v)) if self.gives_keys else y

    def new_state(self, rows: int, max_length: int, *, whole: bool, **options: Any) -> KeyValues | None:
        """Keys and values of up to `max_length` tokens; with a window of the last ones, unless `whole`; None where the
        layer reads those of an earlier one."""
        if self.reads_keys:
            return None
        window = None if whole else self.window
        key_dim = None if options.get("kv_cache_dtype") == "fp8" else self.rotating
        return KeyValues(rows, max_length, self.num_kv_heads, self.head_dim, key_dim=key_dim, window=window, **options)

    def _append(self, k: Tensor, v: Tensor, cache: Any, past: int) -> tuple[Tensor, Tensor]:
        """Stores k and v, and returns all keys and values that these tokens may see."""
        weight = self._weight_of_keys(cache, past)
        if weight is None:
            return cache.append(k, v, past)
        stored, values = cache.append(rotating_dims(k, cast(int, self.rotating)), v, past)
        if past == 0:
            return k, values
        earlier = whole_keys(stored[:, : -k.shape[1]], values[:, : -k.shape[1]], weight)
        return torch.cat([earlier, k], 1), values

    def _weight_of_keys(self, cache: Any, past: int | None) -> Tensor | None:
        """What makes keys of the values in the cache; None where it stores whole keys, as in fp8, a cache of
        transformers, and where a hook or a wrapper changes what a norm returns. past: None: the cache is not empty."""
        if self.rotating is None or not isinstance(cache, KeyValues) or cache.is_fp8:
            return None
        plain = all(type(norm) is RMSNorm and is_plain_call(norm) for norm in (self.k_norm, self.v_norm))
        is_whole = not plain if past == 0 else cache.key_dim == self.head_dim
        if is_whole:
            return None
        if not plain:
            raise InputError(
                "attention: the cache has keys that are made of values by k_norm's weight, and since then k_norm or "
                "v_norm got a hook or a wrapper: call cache.reset() and pass the whole text"
            )
        return cast(Tensor, cast(RMSNorm, self.k_norm).weight)

    def _norms(self) -> HeadNorms | None:
        """q_norm and k_norm, for an op that computes them too; None where there are none, or their calls are more."""
        norms: Any = self.q_norm, self.k_norm
        if not all(type(norm) is RMSNorm and is_plain_call(norm) for norm in norms):
            return None
        (q, *of_q), (k, *of_k) = (
            (replicated(norm.weight, norm.tp), norm.eps, norm.offset, norm.cast_before_weight) for norm in norms
        )
        is_plain = all(type(weight) in (Tensor, nn.Parameter) for weight in (q, k))
        return HeadNorms(q, k, *of_q) if is_plain and of_q == of_k else None

    def _sinks(self, cp: MeshGroup | None) -> Tensor | None:
        """The sinks of the query heads that this rank computes."""
        sinks = local_shard(self.sinks, self.tp)
        return sinks if sinks is None or cp is None else cp.shard(sinks, 0)

    def init_weights(self, draw: Draw) -> None:
        draw(self.sinks, normal(draw.std))

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_heads, self.num_kv_heads

    def shards(self) -> Mapping[str, Shard]:
        joint = len(self.joint_names) < len(self._rows)
        what = f"{self.num_heads} heads and {self.num_kv_heads} key heads" + " in one weight" * joint
        output = {self.output_name: Shard("rows", self.num_heads, what)}
        if self.sinks is not None:
            output["sinks"] = Shard("columns", self.num_heads, what)
        if joint:
            return {self.joint_names[0]: Shard("columns", self.num_kv_heads, what, self._rows), **output}
        q, *keys = self.joint_names
        of_keys = dict.fromkeys(keys, Shard("heads", self.num_kv_heads, what))
        return {q: Shard("columns", self.num_heads, what), **of_keys, **output}

    def set_tp(self, tp: MeshGroup) -> None:
        super().set_tp(tp)
        self.num_heads //= tp.size
        self.num_kv_heads = max(self.num_kv_heads // tp.size, 1)

    def fusion_parts(self, at: FusionContext) -> Iterable[FusionPart]:
        yield linears_part(self, self.joint_names, at)
        q = torch.empty(1, 1, 1, self.head_dim, dtype=at.dtype, device=at.device)
        name, why = engine(q, softcap=self.softcap, window=self.window, sinks=self.sinks is not None)
        yield FusionPart("scores", name, not name.startswith("attention_reference"), why)

    def saved_per_token(self, policy: str) -> int:
        """q, k, v, and the output, which o_proj reads; with norms also their inputs; with a gate of the output the
        gate, and the product, which o_proj then reads. The keys of an earlier layer are counted there."""
        queries = self.num_heads * self.head_dim
        keys = 0 if self.reads_keys else self.num_kv_heads * self.head_dim
        normed = (queries + keys) * (self.q_norm is not None)
        normed += keys * (self.v_norm is not None and not self.keys_as_values)
        return 2 * queries + 2 * keys + normed + 2 * queries * self.output_gate

    @property
    def _rows(self) -> tuple[int, ...]:
        """The numbers of outputs of q, with its gate, of k and of v, as far as they are projected; under tensor
        parallel a rank's."""
        keys = self.num_kv_heads * self.head_dim
        rows = self.num_heads * self.head_dim * (1 + self.output_gate), keys, keys
        return rows[: 1 if self.reads_keys else 2 if self.keys_as_values else 3]

    def _qkv(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, normed: bool = True) -> Sequence[Any]:
        """q, k, v [B, S, heads, head_dim], rotated by the tables, if there are any, and the output gate or None. k and
        v are None if they are those of an earlier layer. normed: by q_norm and k_norm, if there are any."""
        inputs = self.joint_modules
        separate = torch.compiler.is_compiling() and len(inputs) > 1  # the compiler fuses what follows each
        operands = None if separate else operands_of(inputs)
        fused = operands is not None
        if not fused and len(inputs) > 1:
            warn_unfused(self, self.joint_names, x)
        if operands is not None or len(inputs) == 1:
            qkv = inputs[0](x) if operands is None else linears(x, operands)
            plain = self.q_norm is None and self.v_norm is None and not self.output_gate
            if tables is not None and plain and len(self._rows) == 3:
                # Only a fused output may be overwritten: a hook or an adapter may have kept that of a module.
                options: Any = dict(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, inplace=fused)
                return *rope(qkv, *tables, **options), None
            projected: Sequence[Tensor] = qkv.split(self._rows, dim=-1)
        else:
            projected = apply_linears(inputs, x)
        q, *keys = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        gate = None
        if self.output_gate:
            q, gate = q.unflatten(2, (-1, 2)).unbind(3)
        q = self.q_norm(q) if normed and self.q_norm is not None else q
        if not keys:
            q = q if tables is None else rope_qk(q, q.detach()[:, :, :0], *tables)[0]
            return q, None, None, gate
        k, v = keys[0], keys[-1]
        k = self.k_norm(k) if normed and self.k_norm is not None else k
        v = v if self.v_norm is None else self.v_norm(v)
        if tables is not None:
            q, k = rope_qk(q, k, *tables)
        return q, k, v, gate

    def _check(self, batch: Batch, cache: KeyValues | None, keys: Any) -> None:
        if self.rope is not None and self.rope not in batch.rotary:
            raise InputError(
                f"attention: batch.rotary has no tables {self.rope!r}, by which this layer rotates; pass them, as in "
                f"Batch(rotary={{{self.rope!r}: RotaryEmbedding(...)(positions)}}), or build it with rope=None"
            )
        if self.reads_keys != (keys is not None):
            raise InputError(
                "attention: this layer reads the keys of an earlier one, and none were given: its block runs in its "
                "model, not alone"
                if self.reads_keys
                else "attention: this layer has keys, and takes no others"
            )
        if cache is None:
            return
        if not self.causal:
            raise InputError("attention that is not causal cannot be cached: its first token sees the last one")
        if batch.cu_seqlens is not None:
            raise InputError("packed sequences cannot go into a KV cache; pad them into a batch instead")
        if self.reads_keys:
            return  # the earlier layer has checked its state
        if cache.window is not None and (self.window is None or self.window > cache.window):
            raise InputError(
                f"attention with window={self.window} would miss keys in a KV cache with window={cache.window}; "
                "make the cache with the windows of the model's layers"
            )

    def extra_repr(self) -> str:
        parts = [f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"]
        options = {"window": self.window, "softcap": self.softcap, "scale": self.scale}
        parts += [f"rope={self.rope!r}"] * (self.rope != "full") + ["causal=False"] * (not self.causal)
        parts += ["sinks=True"] * (self.sinks is not None)
        return ", ".join(parts + [f"{name}={value}" for name, value in options.items() if value is not None])
