"""An architecture of one's own: attention and gated MLP side by side on one norm, in a tied language model.

No config, no registry: layers take numbers, and this is the whole model. It runs on the fused kernels on a
GPU and on their references on a CPU: `python examples/custom_architecture.py` teaches it to count.
"""

import torch

import ligermodels.layers as L


class Block(torch.nn.Module):
    def __init__(self, size, heads, kv_heads, window):
        super().__init__()
        self.norm = L.RMSNorm(size)
        head_dim = size // heads
        self.attn = L.Attention(size, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window)
        self.mlp = L.GatedMLP(size, 4 * size, activation="gelu_tanh")

    def forward(self, x, residual, batch):
        x, residual = self.norm(x, residual)  # adds x to the residual stream and normalises the sum
        return self.attn(x, batch) + self.mlp(x), residual


class Parallel(torch.nn.Module):
    def __init__(self, vocab, size=64, heads=4, kv_heads=2, depth=2, window=16):
        super().__init__()
        self.embed_tokens = L.Embedding(vocab, size)
        self.rotary = L.RotaryEmbedding(size // heads)
        self.layers = torch.nn.ModuleList(Block(size, heads, kv_heads, window) for _ in range(depth))
        self.norm = L.RMSNorm(size)
        self.lm_head = L.LMHead(size, vocab, tied_to=self)

    def forward(self, ids, labels=None):
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        batch = L.Batch(rotary={"full": self.rotary(positions)})
        x, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        x, _ = self.norm(x, residual)
        return self.lm_head(x, labels)  # logits, or the loss without the logits in memory


def train(steps=60, vocab=32, device="cpu"):
    """Losses of learning to count modulo `vocab` from any start."""
    torch.manual_seed(0)
    model = Parallel(vocab).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        numbers = (torch.randint(vocab, (8, 1)) + torch.arange(33)).remainder(vocab).to(device)
        loss = model(numbers[:, :-1], labels=numbers[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train(device="cuda" if torch.cuda.is_available() else "cpu")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
