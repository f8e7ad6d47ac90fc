"""Self-attention with packed projections, rotary positions and an optional window; causal, or of all to all."""

from torch import Tensor, nn

from ligermodels.cache import LayerCache
from ligermodels.errors import InputError
from ligermodels.kernels._recipes import carry
from ligermodels.kernels.attention import attention
from ligermodels.kernels.rope import rope
from ligermodels.layers.batch import Batch
from ligermodels.layers.linear import Linear, PackedLinear, is_plain


class Attention(nn.Module):
    """Self-attention: [B, S, hidden_size] -> [B, S, hidden_size].

    forward(x, batch, cache=None): `cache` is one layer of a `KVCache`; its keys and values come first, and it
    takes up the new ones. q, k and v stay in qkv_proj's output from the projection to the attention: nothing
    is copied.

    num_kv_heads: num_heads / num_kv_heads query heads share one key head. window: tokens that a query sees,
    counting itself; None is all. softcap: scores become softcap * tanh(scores / softcap). scale: multiplies
    them, default head_dim ** -0.5. causal=False: a token sees all of its row, or of its packed sequence, less
    what `batch.padding` hides; there is no cache. How many dims of a head rotate is for the tables of the batch to
    say; without tables none does.
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
    ):
        super().__init__()
        if num_heads % num_kv_heads:
            raise InputError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.softcap = softcap
        self.scale = scale
        self.causal = causal
        parts = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        self.qkv_proj = PackedLinear(hidden_size, parts, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=o_bias)

    def forward(self, x: Tensor, batch: Batch, cache: LayerCache | None = None) -> Tensor:
        self._check(batch, cache)
        q, k, v = self._qkv(x, batch)
        key_mask = batch.key_mask
        if cache is not None:
            k, v = cache.update(k, v)
            if key_mask is not None:  # over all tokens seen; a cache with a window returns only the last
                key_mask = key_mask[:, cache.length - k.shape[1] :]
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
            padding=batch.padding,
            turns=is_plain(self.o_proj),
        )
        return self.o_proj(carry(out, out.flatten(2)))

    def _qkv(self, x: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """q, k, v [B, S, heads, head_dim], rotated where the batch has tables."""
        qkv_proj = self.qkv_proj
        qkv = qkv_proj(x)
        if batch.cos is None or batch.sin is None:
            parts = qkv.split(list(qkv_proj.parts.values()), dim=-1)
            return tuple(part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return rope(
            qkv,
            batch.cos,
            batch.sin,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            # The output of a plain linear is ours alone; a hook or an adapter may have kept it.
            inplace=is_plain(qkv_proj),
        )

    def _check(self, batch: Batch, cache: LayerCache | None) -> None:
        if batch.padding is not None and self.causal:
            raise InputError(
                "attention: batch.padding is for attention of all to all, and this layer is causal; build it with "
                "causal=False, or say with batch.key_mask which keys nobody sees"
            )
        if cache is None:
            return
        if not self.causal:
            raise InputError("attention that is not causal cannot be cached: its first token sees the last one")
        if batch.cu_seqlens is not None:
            raise InputError("packed sequences cannot go into a KV cache; pad them into a batch instead")
        if cache.window is not None and (self.window is None or self.window > cache.window):
            raise InputError(
                f"attention with window={self.window} would miss keys in a KV cache with window={cache.window}; "
                "make the cache with the windows of the model's layers"
            )

    def extra_repr(self) -> str:
        parts = [f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"]
        options = {"window": self.window, "softcap": self.softcap, "scale": self.scale}
        parts += [] if self.causal else ["causal=False"]
        return ", ".join(parts + [f"{name}={value}" for name, value in options.items() if value is not None])
