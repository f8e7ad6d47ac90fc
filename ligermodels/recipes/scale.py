"""A training step on any number of GPUs, estimated: its memory, the bytes of its collectives, and its time.

A step is one forward and backward of `batch_tokens` on each group of ranks that share a batch, and the optimizer's.

    compute:   FLOP of matmuls and of attention / the FLOP/s that each reaches in a real step. Adapters read and write
               inputs and outputs of their layers four times, and what is in 4 bits is dequantised for each matmul.
    FSDP:      (F - 1) / F of the bytes of a block, gathered before its forward and its backward, and of its gradients
               (fp32), reduced after its backward. Beside the compute of another block, only the rest is exposed; the
               first gather and the last reduction are exposed whole. Compute is slower by the copies to and from their
               buffers, 8 bytes for each parameter and as much for each gradient, and by 15 % of their time, since they
               take multiprocessors. What is in 4 bits is gathered so.
    replicas:  an all-reduce of this rank's gradients, which only the backward of the same block hides.
    ep:        per layer of experts 3 gathers and 2 reductions of the other ranks' [tokens, hidden] in 16 bits, and one
               more of each where the block is recomputed. All exposed. FSDP gathers a rank's experts over dp_shard.
    tp:        per block 4 gathers and 4 reductions of [batch tokens, hidden] in 16 bits. All exposed.
    cp:        per block an all-to-all of q, k, v and the output, forward and backward. All exposed.

F: ranks that share the parameters. A collective of n bytes takes n / (bytes/s of a GPU in its group) and a latency for
each rank. A group inside a node has the speed of its links. One over nodes has at most that of all network cards of a
node, each of which carries a part of every ring.

Sources: the ring algorithms and their bus bandwidth,
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; `HARDWARE` is fitted to benchmarks/results.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ligermodels.errors import InputError
from ligermodels.layers.base import Layer
from ligermodels.layers.moe import all_experts
from ligermodels.parallel.experts import check_experts
from ligermodels.parallel.tensor import check_context, check_tensor
from ligermodels.processes import Processes
from ligermodels.recipes import memory
from ligermodels.recipes.options import TrainOptions

MEASURED = 4
"""The largest number of GPUs on which steps were measured."""
_RECOMPUTED = {"none": 0.0, "mlp": 0.15, "block": 1 / 3}
"""FLOP beyond those of a step that recomputes nothing, as a share of them (training/recompute.py)."""

_SMALL_HEADS = 0.8
"""What attention reaches with heads of 64 dims, of what it reaches with 128."""
_EXPERTS = 0.7
"""What the matmuls of experts reach, with the sort of their rows, of what dense ones reach."""


@dataclass(frozen=True)
class Hardware:
    """A cluster. memory: bytes of a GPU. flops, attention: FLOP/s that a real step reaches in its matmuls, and in
    attention, in 16 bits. bandwidth: bytes/s of a GPU's memory. inside, between: bytes/s that a GPU sends to others of
    its node, and over its network card. latency: seconds of a collective for each rank of its group."""

    memory: float
    flops: float
    attention: float
    bandwidth: float
    inside: float = 180e9
    between: float = 40e9
    latency: float = 3e-6
    gpus_per_node: int = 8


HARDWARE = {
    "h200": Hardware(memory=139 * memory.GIB, flops=630e12, attention=460e12, bandwidth=4.0e12),
    "h100": Hardware(memory=79 * memory.GIB, flops=630e12, attention=460e12, bandwidth=2.8e12),
}
"""Measured on both: free memory, and the 8B on one GPU. `inside`: 2 and 4 GPUs of one host, while they compute.
`between` is 80 % of 400 Gbit/s, and `latency` a usual figure: neither was measured."""


class Mesh(NamedTuple):
    """The sizes of a mesh's dimensions, as `make_mesh` names them."""

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def shards(self) -> int:
        """The number of ranks that share the parameters by FSDP, and experts by number."""
        return self.dp_shard * self.ep * self.cp

    @property
    def size(self) -> int:
        """The number of GPUs."""
        return self.dp_replicate * self.shards * self.tp

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in zip(self._fields, self, strict=True) if size > 1]
        return ", ".join(parts) or "one GPU"


@dataclass(frozen=True)
class Step:
    """A step on a mesh. bytes: what each GPU receives, by collective. seconds: of compute and of what is exposed."""

    mesh: Mesh
    options: TrainOptions
    need: dict[str, int]
    bytes: dict[str, float]
    compute: float
    exposed: float
    tokens: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        """Of each GPU."""
        return self.tokens / self.seconds


def flops_per_token(sketch: Any, options: TrainOptions) -> tuple[float, float, float]:
    """FLOP of a token's forward and backward, without recomputation, in dense matmuls, in those of experts, and in
    causal attention over rows of `max_length`. A matmul has 6 for each weight that the token meets, 4 where it is
    frozen.

    Of experts, a token meets the chosen ones. An embedding is read, not multiplied. The scans of recurrent layers are
    not counted, and attention within a window is counted as if it saw the whole row.
    """
    config = sketch.config.get_text_config()
    experts, top_k = all_experts(sketch), max(getattr(module, "top_k", 0) for module in sketch.decoder.modules())
    chosen = sum(memory.count(module) * top_k // module.num_experts for module in experts)
    blocks = memory.count(sketch.decoder.layers) - sum(memory.count(module) for module in experts)
    heads = [layer.heads[0] for layer in sketch.decoder.modules() if isinstance(layer, Layer) and layer.heads]
    attention = 6 * sum(heads) * config.head_dim * (options.max_length or 0)
    each = 4.0 if options.lora_r else 6.0
    return each * (blocks + config.vocab_size * config.hidden_size), each * chosen, float(attention)


def meshes(sketch: Any, gpus: int, hardware: Hardware, asked: Mapping[str, int] | None = None) -> Iterator[Mesh]:
    """The meshes of this number of GPUs that fit the model's layers: FSDP over all or over a node; ep or tp within a
    node, and cp up to 32, in powers of two. asked: as of `best`; its number of replicas is tried too."""
    inside = [2**i for i in range(hardware.gpus_per_node.bit_length())]
    for ep, cp, tp in [*itertools.product((1,), (1, 2, 4, 8, 16, 32), inside), *((ep, 1, 1) for ep in inside[1:])]:
        if gpus % (ep * cp * tp):
            continue
        try:
            if ep > 1:
                check_experts(sketch, ep)
            if tp > 1:
                check_tensor(sketch, tp)
            if cp > 1:
                check_context(sketch, cp, tp)
        except InputError:
            continue
        data, nodes = gpus // (ep * cp * tp), gpus // hardware.gpus_per_node
        copies = nodes > 1 and data % nodes == 0 and ep * cp * tp <= hardware.gpus_per_node
        for replicas in {1, *([nodes] if copies else []), (asked or {}).get("dp_replicate", 1)}:
            if data % replicas == 0:
                yield Mesh(replicas, data // replicas, ep, cp, tp)


def options_on(mesh: Mesh, options: TrainOptions) -> TrainOptions:
    """The options of a run on a mesh. Raises InputError for what it refuses, such as adapters under tp."""
    return dataclasses.replace(
        options, dp_replicate=mesh.dp_replicate, ep=mesh.ep, cp=mesh.cp, tp=mesh.tp,
        accumulation=mesh.size // (mesh.cp * mesh.tp),
    )  # fmt: skip


def step_on(mesh: Mesh, sketch: Any, sizes: memory.Sizes, options: TrainOptions, hardware: Hardware) -> Step:
    """The step on a mesh, with the precision and the recomputation that fit, or that need the least memory."""
    options = options_on(mesh, options)
    processes = Processes(torch.device("cuda"), size=mesh.size, ranks_per_batch=mesh.cp * mesh.tp)
    precision, activations = memory.choose(sizes, options, processes, int(hardware.memory))
    options = dataclasses.replace(options, precision=precision, activations=activations)
    need = memory.estimate(sizes, options, processes)

    assert options.batch_tokens is not None
    tokens = options.batch_tokens / (mesh.cp * mesh.tp)
    matmuls, experts, attention = flops_per_token(sketch, options)
    matmuls += experts / _EXPERTS
    small = _SMALL_HEADS if sketch.config.get_text_config().head_dim < 128 else 1.0
    work = tokens * (matmuls / hardware.flops + attention / (small * hardware.attention))
    if options.lora_r:
        read = 8 * tokens * sizes.trained / options.lora_r  # an adapter has r parameters for each input and output
        packed, bits = memory.quantized(sizes, options)
        read += 2 * (bits / 8 + 2) * packed  # dequantised in the forward and in the backward
        work += read / mesh.tp / hardware.bandwidth
    forward, backward = work / 3, work * (2 / 3 + _RECOMPUTED[activations])
    update = 2 * sum(need[name] for name in ("weights", "gradients", "optimizer")) / hardware.bandwidth
    sent, slower, exposed = _of_fsdp(mesh, sizes, options, hardware, forward, backward)
    for name, number, size, group in _of_batches(mesh, sketch, sizes, tokens, activations):
        sent[name] = number * size
        exposed += number * (size / _speed(group, hardware) + hardware.latency * group)
    update = 0.0 if options.lora_r else update
    return Step(mesh, options, need, sent, forward + backward + slower + update, exposed, tokens)


def _of_fsdp(
    mesh: Mesh, sizes: memory.Sizes, options: TrainOptions, hardware: Hardware, forward: float, backward: float
) -> tuple[dict[str, float], float, float]:
    """({collective: bytes}, seconds by which compute is slower, exposed seconds) of FSDP and of replicas.

    forward, backward: seconds of compute.
    """
    ranks, blocks = mesh.shards, sizes.blocks
    if ranks * mesh.dp_replicate == 1:
        return {}, 0.0, 0.0
    experts = sizes.stacked if sizes.trained > sizes.stacked else 0  # of what is trained
    packed, bits = memory.quantized(sizes, options)
    fewer = (2 - bits / 8) * packed
    gathered = 2 * _moved(mesh, sizes.parameters, sizes.stacked) - fewer * (ranks - 1) / ranks
    reduced = 4 * _moved(mesh, sizes.trained, experts)
    everyone = 8 * sizes.trained / (ranks * mesh.tp) * (mesh.dp_replicate - 1) / mesh.dp_replicate
    speed = _speed(ranks * mesh.tp, hardware)  # tp ranks are beside each other, and use the same links
    wait = hardware.latency * ranks
    gather, reduce = gathered / blocks / speed + wait, reduced / blocks / speed + wait
    if mesh.dp_replicate > 1:
        reduce += everyone / blocks / hardware.between + hardware.latency * mesh.dp_replicate
    exposed = gather + reduce
    exposed += max(0.0, blocks * gather - forward) + max(0.0, blocks * (gather + reduce) - backward)
    copied = sizes.parameters
    if mesh.ep > 1:  # a rank alone with its experts gathers none
        copied -= sizes.stacked - (sizes.stacked // mesh.ep if mesh.dp_shard > 1 else 0)
    copies = 4 * (2 * copied - fewer) + 8 * min(copied, sizes.trained)
    slower = copies / mesh.tp / hardware.bandwidth + 0.15 * blocks * (2 * gather + reduce)
    return {"gathers": 2 * gathered, "reductions": reduced, "replicas": everyone}, slower, exposed


def _moved(mesh: Mesh, parameters: int, experts: int) -> float:
    """How many of the parameters a rank gets from others in a gather. `experts` of them are those of experts."""
    alone = mesh.dp_shard * mesh.cp
    rest = (mesh.shards - 1) / mesh.shards * (parameters - experts)
    return (rest + (alone - 1) / alone * experts / mesh.ep) / mesh.tp


def _of_batches(
    mesh: Mesh, sketch: Any, sizes: memory.Sizes, tokens: float, activations: str
) -> Iterator[tuple[str, int, float, int]]:
    """(name, number in a step, bytes of one, ranks of the group) of the collectives of activations."""
    config, other = sketch.config.get_text_config(), (mesh.tp - 1) / mesh.tp
    if mesh.ep > 1:
        number = len(all_experts(sketch)) * (7 if activations == "block" else 5)
        yield "expert parallel", number, 2 * tokens * config.hidden_size * (mesh.ep - 1), mesh.ep
    if mesh.tp > 1:
        yield "tensor parallel", 8 * sizes.blocks, 2 * tokens * mesh.tp * config.hidden_size * other, mesh.tp
    if mesh.cp > 1:
        heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
        sides = 2 * tokens * heads * config.head_dim / mesh.tp * (mesh.cp - 1) / mesh.cp
        yield "context parallel", 8 * sizes.blocks, sides / 4, mesh.cp * mesh.tp


def _speed(ranks: int, hardware: Hardware) -> float:
    """Bytes/s of a GPU in a collective of this number of neighbouring ranks."""
    if ranks <= hardware.gpus_per_node:
        return hardware.inside
    return min(hardware.inside, hardware.between * hardware.gpus_per_node)


def fits(step: Step, hardware: Hardware) -> bool:
    """Whether the memory of a GPU is enough for the step."""
    return memory.fits(step.need, int(hardware.memory))


def best(
    sketch: Any, sizes: memory.Sizes, options: TrainOptions, gpus: int, hardware: Hardware,
    asked: Mapping[str, int] | None = None,
) -> Step:  # fmt: skip
    """The fastest step that fits on so many GPUs; where none does, the one that needs the least memory.

    asked: sizes of the mesh's dimensions, by name. Raises InputError if no mesh of these GPUs has them.
    """
    wanted, every = asked or {}, list[Mesh]()
    for mesh in meshes(sketch, gpus, hardware, wanted):
        with contextlib.suppress(InputError):
            options_on(mesh, options)
            every.append(mesh)
    fitted = [mesh for mesh in every if all(getattr(mesh, name) == size for name, size in wanted.items())]
    if not fitted:
        sizes_asked = ", ".join(f"{name}={size}" for name, size in wanted.items())
        known = {name: sorted({getattr(mesh, name) for mesh in every}) for name in wanted}
        alone = "; ".join(f"{name} {', '.join(map(str, sizes))}" for name, sizes in known.items())
        raise InputError(
            f"no mesh of {gpus} GPUs for {type(sketch).__name__} has {sizes_asked}: the product of all sizes must be "
            f"{gpus}; ep must divide its experts, and tp and cp its heads; ep and tp stay inside a node, cp is at most "
            f"32, all are powers of two; adapters exclude tp, and 4 bits ep. Sizes that fit, each alone: {alone}"
        )
    steps = [step_on(mesh, sketch, sizes, options, hardware) for mesh in fitted]
    fitting = [step for step in steps if fits(step, hardware)]
    if fitting:
        return max(fitting, key=lambda step: step.tokens_per_second)
    return min(steps, key=lambda step: sum(step.need.values()))
