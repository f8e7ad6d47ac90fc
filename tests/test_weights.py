"""The weight table on small models of our own: what round trips, and what is refused with which words."""

import itertools
import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ligermodels import weights
from ligermodels.checkpoint import NATIVE, SafetensorsReader
from ligermodels.errors import CheckpointError
from ligermodels.saving import write_checkpoint
from ligermodels.weights import TensorInfo, same_bits

# Random bits, so that a lost one shows, hold NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*NaN or infinity")
VOCAB, HIDDEN, INTERMEDIATE, LAYERS, EXPERTS = 32, 16, 24, 2, 3


class Packed(nn.Linear):
    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False):
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = {"gate": INTERMEDIATE, "up": INTERMEDIATE}
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INTERMEDIATE))


class Angles(nn.Module):
    """Rebuilds its buffer wherever it is moved, as RotaryEmbedding does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.angles = torch.arange(4.0, device=self.angles.device)
        return self


class Block(nn.Module):
    def __init__(self, stacked: bool):
        super().__init__()
        self.attn = nn.Module()
        self.attn.qkv_proj = Packed(HIDDEN, {"q": 16, "k": 8, "v": 8}, bias=True)
        self.attn.o_proj = nn.Linear(16, HIDDEN, bias=False)
        self.attn_norm = nn.RMSNorm(HIDDEN)
        self.mlp = nn.Module()
        if stacked:
            self.mlp.experts = Experts()
        else:
            self.mlp.gate_up_proj = Packed(HIDDEN, {"gate": INTERMEDIATE, "up": INTERMEDIATE})
            self.mlp.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)


class Tiny(nn.Module):
    def __init__(self, tied: bool = False, stacked: bool = False):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.rotary = Angles()
        self.layers = nn.ModuleList(Block(stacked) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        if not tied:
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)


HF = "model.layers.{i}."
TABLE = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "layers.{i}.attn_norm.weight": HF + "input_layernorm.weight",
    "layers.{i}.attn.qkv_proj.{w}": tuple(HF + f"self_attn.{part}_proj.{{w}}" for part in "qkv"),
    "layers.{i}.attn.o_proj.weight": HF + "self_attn.o_proj.weight",
    "layers.{i}.mlp.gate_up_proj.weight": (HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight"),
    "layers.{i}.mlp.down_proj.weight": HF + "mlp.down_proj.weight",
    "layers.{i}.mlp.experts.gate_up": (HF + "mlp.experts.{e}.w1.weight", HF + "mlp.experts.{e}.w3.weight"),
    "layers.{i}.mlp.experts.down": HF + "mlp.experts.{e}.w2.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
STACKED = {  # experts in one tensor each, as transformers 5 has them in memory
    **TABLE,
    "layers.{i}.mlp.experts.gate_up": HF + "mlp.experts.gate_up_proj",
    "layers.{i}.mlp.experts.down": HF + "mlp.experts.down_proj",
}
HALVES = {  # ours in other pieces: attention packed, experts under other names, gate and up of all experts apart
    **TABLE,
    "layers.{i}.attn.qkv_proj.{w}": HF + "attention.qkv.{w}",
    "layers.{i}.mlp.experts.gate_up": (HF + "mlp.experts.{e}.gate.weight", HF + "mlp.experts.{e}.up.weight"),
}
TIED = {"lm_head.weight": "embed_tokens.weight"}
Q = "model.layers.0.self_attn.q_proj.weight"


def on_meta(tied: bool = False, stacked: bool = False, dtype: torch.dtype = torch.float32) -> Tiny:
    with torch.device("meta"):
        return Tiny(tied, stacked).to(dtype)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit pattern, NaNs of all kinds, infinities and subnormals among them."""
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)


def random_tensors(model: nn.Module, dtype: torch.dtype = torch.float32, table=TABLE) -> dict[str, Tensor]:
    """What a checkpoint of `model` holds under Hugging Face's names."""
    return {name: random_bits(tuple(tensor.shape), dtype) for name, tensor in weights.export(model, table)}


def relaid(tensors: dict[str, Tensor], table) -> dict[str, Tensor]:
    """Tensors named by TABLE, in the layout of `table`."""
    model = Tiny(stacked=True).to(next(iter(tensors.values())).dtype)
    with torch.no_grad():
        for name, box in weights.export(model, TABLE):
            box.copy_(tensors[name])
    return {name: box.clone() for name, box in weights.export(model, table)}


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 1, seed: int = 0) -> SafetensorsReader:
    """A checkpoint whose tensors are spread over the shards without any order."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    random.Random(seed).shuffle(names)
    if shards == 1:
        save_file({name: tensors[name] for name in names}, folder / "model.safetensors")
    else:
        weight_map = {}
        for k in range(shards):
            file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
            save_file({name: tensors[name] for name in names[k::shards]}, folder / file)
            weight_map |= dict.fromkeys(names[k::shards], file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return SafetensorsReader(folder)


def headers_of(tensors: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_same_bits():
    a = torch.tensor([1.0, float("nan"), 0.0])
    assert same_bits(a, a.clone())
    assert not same_bits(a, torch.tensor([1.0, float("nan"), -0.0]))
    assert not same_bits(a, a.reshape(1, 3)) and not same_bits(a, a.view(torch.int32))


# Regions


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_regions_tile_every_element_exactly_once(tied, stacked):
    model = Tiny(tied, stacked)
    counts = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    for region in weights.regions(model, TABLE):
        counts[region.param][region.index] += 1
    assert all((count == 1).all() for count in counts.values())


def test_rows_are_stacked_in_the_order_of_the_table(tmp_path):
    tensors = random_tensors(on_meta(stacked=True))
    model = on_meta(stacked=True)
    weights.load(model, TABLE, save(tmp_path, tensors), device="cpu")
    block, layer = model.layers[1], "model.layers.1."
    qkv = torch.cat([tensors[f"{layer}self_attn.{part}_proj.bias"] for part in "qkv"])
    assert same_bits(block.attn.qkv_proj.bias.detach(), qkv)
    gate_up = torch.stack(
        [torch.cat([tensors[f"{layer}mlp.experts.{e}.{w}.weight"] for w in ("w1", "w3")]) for e in range(EXPERTS)]
    )
    assert same_bits(block.mlp.experts.gate_up.detach(), gate_up)


def test_a_parameter_needs_exactly_one_entry():
    with pytest.raises(ValueError, match=r"norm\.weight matches 0 entries"):
        weights.regions(on_meta(), {ours: theirs for ours, theirs in TABLE.items() if ours != "norm.weight"})
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.qkv_proj\.weight matches 2 entries"):
        weights.regions(on_meta(), {**TABLE, "layers.{i}.attn.qkv_proj.weight": "x"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight in two places"):
        weights.regions(on_meta(), {**TABLE, "lm_head.weight": "model.norm.weight"})


def test_patterns_match_whole_names():
    """`experts` must not find `shared_experts`, nor a dot any character."""
    model = nn.Module()
    model.shared_experts = nn.Linear(2, 2, bias=False)
    for ours in ("experts.weight", "shared_experts", "sharedXexperts.weight", "shared_experts.weigh."):
        with pytest.raises(ValueError, match="matches 0"):
            weights.regions(model, {ours: "x"})


def test_parts_must_make_up_the_parameter():
    model = on_meta()
    model.layers[0].attn.qkv_proj.parts = {"q": 16, "k": 8, "v": 7}
    with pytest.raises(AssertionError, match="has 32 rows"):
        weights.regions(model, TABLE)


# Loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 7])
def test_round_trip_returns_the_same_bits(tmp_path, poison, dtype, tied, stacked, shards):
    model = on_meta(tied, stacked, dtype)
    tensors = random_tensors(model, dtype)
    weights.load(model, TABLE, save(tmp_path / "a", tensors, shards, seed=shards), device="cpu")
    write_checkpoint(tmp_path / "b", weights.export(model, TABLE), max_shard_size=2000 * shards)
    back = SafetensorsReader(tmp_path / "b")
    assert back.headers.keys() == tensors.keys()
    assert all(same_bits(back.read(name), tensor) for name, tensor in tensors.items())


def test_tensors_are_read_once_in_file_order(tmp_path):
    reader = save(tmp_path, random_tensors(on_meta()), shards=3)
    order, read = [], reader.read
    reader.read = lambda name: order.append(name) or read(name)
    weights.load(on_meta(), TABLE, reader, device="cpu")
    assert order == list(reader.headers) and len(set(order)) == len(order)


def test_dtypes(tmp_path):
    tensors = random_tensors(on_meta(), torch.bfloat16)
    tensors[Q] = torch.randn(16, HIDDEN, dtype=torch.float16)
    tensors["model.norm.weight"] = torch.randn(HIDDEN)
    reader = save(tmp_path, tensors)
    for dtype, expected in [(None, torch.float32), (torch.float16, torch.float16)]:
        model = on_meta()
        weights.load(model, TABLE, reader, device="cpu", dtype=dtype)
        assert {param.dtype for param in model.parameters()} == {expected}
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"].half())
    model = on_meta()
    weights.load(model, TABLE, reader, device="cpu", dtype="stored")
    assert model.norm.weight.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    qkv = model.layers[0].attn.qkv_proj.weight
    assert qkv.dtype == torch.float32 and torch.equal(qkv[:16], tensors[Q].float())


def test_what_a_loaded_model_keeps_and_has(tmp_path):
    model = on_meta()
    model.norm.weight.requires_grad_(False)
    weights.load(model, TABLE, save(tmp_path, random_tensors(model)), device="cpu")
    assert not any(x.is_meta for x in [*model.parameters(), *model.buffers()])
    assert torch.equal(model.rotary.angles, torch.arange(4.0))
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == ["norm.weight"]
    model.lm_head.weight.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_a_model_with_memory_or_orphan_buffers_is_refused(tmp_path):
    reader = save(tmp_path, random_tensors(on_meta()))
    with pytest.raises(AssertionError, match="meta device; embed_tokens"):
        weights.load(Tiny(), TABLE, reader, device="cpu")
    model = on_meta()
    model.norm.register_buffer("steps", torch.empty(1, device="meta"))
    with pytest.raises(AssertionError, match="norm has buffers"):
        weights.load(model, TABLE, reader, device="cpu")


def test_progress_bar(tmp_path, capfd):
    reader = save(tmp_path, random_tensors(on_meta()))
    weights.load(on_meta(), TABLE, reader, device="cpu")
    weights.load(on_meta(), TABLE, reader, device="cpu", progress=False)
    assert capfd.readouterr() == ("", "")  # stderr is no terminal here
    weights.load(on_meta(), TABLE, reader, device="cpu", progress="force")
    assert "100%" in capfd.readouterr().err


MEMORY = """
    import sys, threading, torch
    from torch import nn
    from ligermodels import weights
    from ligermodels.checkpoint import SafetensorsReader

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2048, 6 * 2048, bias=False) for _ in range(3))
            for layer in self.layers:
                layer.parts = {"a": 4096, "b": 4096, "c": 4096}

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    def load():
        with torch.device("meta"):
            model = Model()
        reader = SafetensorsReader(sys.argv[1])
        if sys.argv[3] == "greedy":
            read, held = reader.read, {}
            reader.read = lambda name: held.setdefault(name, read(name).clone())
        weights.load(model, table, reader, device="cpu", dtype=getattr(torch, sys.argv[2]))
        return model

    table = {"layers.{i}.weight": tuple("layers.{i}.%s.weight" % part for part in "abc")}
    load()  # what torch imports on first use is not counted
    start = peak = anonymous()
    done = threading.Event()
    def watch():
        global peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load()
    end = anonymous()
    done.set()
    watcher.join()
    print(peak - start, end - start, sum(p.nbytes for p in model.parameters()))
"""


def load_in_a_process(folder: Path, dtype: str, how: str) -> list[int]:
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(folder), dtype, how]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=True)
    return [int(word) for word in result.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon")
def test_host_memory_beyond_the_model_is_below_the_largest_tensor(tmp_path):
    """302 MB in nine tensors. RssAnon leaves out the mapped pages of the files, which ru_maxrss counts."""
    largest = 4096 * 2048 * 4
    tensors = {f"layers.{i}.{part}.weight": torch.ones(4096, 2048) for i in range(3) for part in "abc"}
    save(tmp_path, tensors, shards=2)
    for dtype in ("float32", "bfloat16"):
        peak, end, model = load_in_a_process(tmp_path, dtype, "streaming")
        assert model == 9 * largest // (1 if dtype == "float32" else 2)
        assert end > 0.9 * model, "the model itself was not seen"
        assert peak < model + largest, f"{dtype}: peak {peak >> 20} MiB for a model of {model >> 20} MiB"
    peak, _, model = load_in_a_process(tmp_path, "bfloat16", "greedy")
    assert peak > model + 8 * largest, "negative control: holding on to what was read must show"


# Checking


def complaint(tensors: dict[str, Tensor], *, tied: bool = False, stacked: bool = False, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        weights.check(on_meta(tied, stacked), TABLE, headers_of(tensors), tied=TIED if tied else None, **options)
    return str(caught.value)


def test_what_fits_passes():
    for tied, stacked in itertools.product([False, True], repeat=2):
        headers = headers_of(random_tensors(on_meta(tied, stacked)))
        weights.check(on_meta(tied, stacked), TABLE, headers, tied=TIED if tied else None)
    headers["model.layers.0.self_attn.rotary_emb.inv_freq"] = TensorInfo(torch.float32, (4,))
    weights.check(on_meta(tied, stacked), TABLE, headers, tied=TIED, ignore=[r"rotary_emb\.inv_freq$"])
    headers["lm_head.weight"] = TensorInfo(torch.float32, (VOCAB, HIDDEN))
    weights.check(on_meta(tied, stacked), TABLE, headers, tied=TIED, ignore=[r"rotary_emb\.inv_freq$"])


def test_both_directions_and_counts():
    tensors = random_tensors(on_meta())
    for i in range(LAYERS):
        for part in "kv":
            del tensors[f"model.layers.{i}.self_attn.{part}_proj.bias"]
    tensors["model.extra"] = torch.zeros(1)
    message = complaint(tensors, where="some/folder")
    assert "some/folder does not match Tiny" in message
    assert "missing (4 of 25): model.layers.0.self_attn.k_proj.bias, " in message and ", ..." in message
    assert "unexpected (1): model.extra" in message


def test_every_single_absence_is_seen():
    tensors = random_tensors(on_meta())
    for name in tensors:
        assert f"missing (1 of 25): {name}" in complaint({n: t for n, t in tensors.items() if n != name})


def test_wrong_shapes():
    tensors = random_tensors(on_meta())
    tensors[Q] = torch.zeros(8, HIDDEN)
    message = complaint(tensors)
    assert f"wrong shape (1): {Q} is [8, 16], the model has [16, 16]" in message
    assert "config.json is another model's" in message
    tensors = random_tensors(on_meta())
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCAB + 8, HIDDEN)
    assert "vocabulary was resized" in complaint(tensors)
    tied = random_tensors(on_meta(tied=True)) | {"lm_head.weight": torch.zeros(VOCAB + 8, HIDDEN)}
    assert "lm_head.weight is [40, 16]" in complaint(tied, tied=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_only_floats_are_weights(dtype):
    message = complaint(random_tensors(on_meta()) | {Q: torch.zeros(16, HIDDEN, dtype=torch.uint8).to(dtype)})
    assert f"quantised (1): {Q} is {dtype}" in message


@pytest.mark.parametrize(
    "rename, words",
    [
        (lambda n: n.replace("q_proj.weight", "q_proj.qweight"), "GPTQ or AWQ"),
        (lambda n: n.replace("q_proj.weight", "q_proj.weight.absmax"), "bitsandbytes"),
        (lambda n: n.replace("q_proj.weight", "q_proj.weight_scale_inv"), "FP8"),
        (lambda n: n.replace("q_proj.weight", "q_proj.lora_A.weight"), "adapter"),
        (lambda n: n.replace("self_attn.q_proj", "attention.wq"), "Meta's or Mistral's"),
        (lambda n: n.replace("q_proj", "qkv_proj"), "Phi-3"),
        (lambda n: "language_model." + n, "larger model that holds this one behind 'language_model.'"),
        (lambda n: n.removeprefix("model."), "bare model, saved without its head: its names lack 'model.'"),
        (lambda n: n.replace("layers.1", "layers.5"), "6 layers on disk, 2 expected"),
        (lambda n: n.replace("lm_head", "score"), "set tie_word_embeddings"),
        (lambda n: n.replace("norm.weight", "ln.weight"), "another architecture's weights"),
    ],
)
def test_the_error_guesses_why(rename, words):
    message = complaint({rename(name): tensor for name, tensor in random_tensors(on_meta()).items()})
    assert words in message.split("Likely: ")[1]


# Tied embeddings


def test_a_tied_copy_must_equal_the_embedding(tmp_path):
    tensors = random_tensors(on_meta(tied=True), torch.float16)
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding.clone()
    reader = save(tmp_path / "same", {**tensors, "lm_head.weight": head})
    model = on_meta(tied=True, dtype=torch.float16)
    weights.load(model, TABLE, reader, device="cpu", tied=TIED)
    assert same_bits(model.embed_tokens.weight.detach(), embedding)
    assert "lm_head.weight" not in dict(weights.unpack(on_meta(tied=True), TABLE, reader, tied=TIED))

    one_bit = head.view(torch.int16).clone()
    one_bit[-1, -1] ^= 1
    for name, wrong in [("bit", one_bit.view(torch.float16)), ("dtype", head.float())]:
        reader = save(tmp_path / name, {**tensors, "lm_head.weight": wrong})
        for use in (
            lambda: weights.load(on_meta(tied=True), TABLE, reader, device="cpu", tied=TIED),  # noqa: B023
            lambda: list(weights.pack(on_meta(tied=True), TABLE, reader, tied=TIED)),  # noqa: B023
            lambda: list(weights.unpack(on_meta(tied=True), TABLE, reader, tied=TIED)),  # noqa: B023
        ):
            with pytest.raises(CheckpointError, match=r"differs from model\.embed_tokens.*config ties"):
                use()


def test_an_untied_model_without_a_head_is_refused():
    message = complaint(random_tensors(on_meta(tied=True)))
    assert "missing (1 of 25): lm_head.weight" in message and "set tie_word_embeddings" in message


# Native checkpoints


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_round_trip(tmp_path, poison, dtype, tied, stacked):
    tensors = random_tensors(on_meta(tied, stacked), dtype)
    source = save(tmp_path / "hf", tensors, shards=2)
    write_checkpoint(tmp_path / "native", weights.pack(on_meta(tied, stacked), TABLE, source), metadata=NATIVE)
    native = SafetensorsReader(tmp_path / "native")
    assert native.native and not source.native
    assert native.headers.keys() == dict(on_meta(tied, stacked).named_parameters()).keys()
    for reader in (source, native):
        back = dict(weights.unpack(on_meta(tied, stacked), TABLE, reader))
        assert back.keys() == tensors.keys() and all(same_bits(back[name], tensors[name]) for name in tensors)
        packed = dict(weights.pack(on_meta(tied, stacked), TABLE, reader))
        assert all(same_bits(packed[name], native.read(name)) for name in native.headers)
    model = on_meta(tied, stacked, dtype)
    weights.load(model, TABLE, native, device="cpu", tied=TIED if tied else None)
    assert all(same_bits(param.detach(), native.read(name)) for name, param in model.named_parameters())


def test_a_wrong_table_does_not_survive_the_comparison(tmp_path):
    """Negative control: gate and up exchanged have the right names and shapes, and other bits."""
    swapped = dict(TABLE)
    swapped["layers.{i}.mlp.gate_up_proj.weight"] = TABLE["layers.{i}.mlp.gate_up_proj.weight"][::-1]
    tensors = random_tensors(on_meta())
    model = on_meta()
    weights.load(model, swapped, save(tmp_path, tensors), device="cpu")
    back = dict(weights.export(model, TABLE))
    assert {name for name in tensors if not same_bits(back[name], tensors[name])} == {
        f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(LAYERS) for part in ("gate", "up")
    }


# Other layouts on disk


@pytest.mark.parametrize("other", [STACKED, HALVES], ids=["stacked", "halves"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_layout_loads_packs_and_unpacks_to_the_same_bits(tmp_path, poison, dtype, other):
    tensors = random_tensors(on_meta(stacked=True), dtype)
    first, second = save(tmp_path / "a", tensors), save(tmp_path / "b", relaid(tensors, other), shards=3)
    assert set(first.headers) - set(second.headers) and set(second.headers) - set(first.headers)
    ours = {name: x.detach() for name, x in weights.export(Tiny(stacked=True), weights.identity(on_meta(stacked=True)))}
    for reader in (first, second):
        model = on_meta(stacked=True, dtype=dtype)
        weights.load(model, TABLE, reader, device="cpu", also=[STACKED, HALVES])
        exported = dict(weights.export(model, TABLE))
        packed = dict(weights.pack(on_meta(stacked=True), TABLE, reader, also=[STACKED, HALVES]))
        unpacked = dict(weights.unpack(on_meta(stacked=True), TABLE, reader, also=[STACKED, HALVES]))
        assert packed.keys() == ours.keys() and exported.keys() == unpacked.keys() == tensors.keys()
        assert all(same_bits(exported[name], tensors[name]) for name in tensors)
        assert all(same_bits(unpacked[name], tensors[name]) for name in tensors)
        assert all(same_bits(packed[name], param.detach()) for name, param in model.named_parameters())
        back = dict(weights.unpack(on_meta(stacked=True), other, reader, also=[TABLE]))
        assert all(same_bits(back[name], second.read(name)) for name in second.headers)
    write_checkpoint(
        tmp_path / "native", weights.pack(on_meta(stacked=True), TABLE, second, also=[other]), metadata=NATIVE
    )
    native = SafetensorsReader(tmp_path / "native")
    for table in (TABLE, other):
        back = dict(weights.unpack(on_meta(stacked=True), table, native, also=[STACKED, HALVES]))
        wanted = first if table is TABLE else second
        assert back.keys() == wanted.headers.keys() and all(same_bits(back[n], wanted.read(n)) for n in back)


def test_parts_of_another_layout_are_packed_in_the_wider_dtype(tmp_path):
    tensors = relaid(random_tensors(on_meta(stacked=True), torch.bfloat16), HALVES)
    name = "model.layers.0.mlp.experts.1.up.weight"
    tensors[name] = torch.randn(INTERMEDIATE, HIDDEN)
    reader = save(tmp_path, tensors)
    back = dict(weights.unpack(on_meta(stacked=True), STACKED, reader, also=[HALVES]))
    packed = back["model.layers.0.mlp.experts.gate_up_proj"]
    assert packed.dtype == torch.float32 and torch.equal(packed[1, INTERMEDIATE:], tensors[name])
    assert back["model.layers.1.mlp.experts.gate_up_proj"].dtype == torch.bfloat16


def test_the_layout_that_fits_best_is_read():
    model, also = on_meta(stacked=True), [STACKED, HALVES]
    names = {table: set(dict(weights.export(model, which))) for table, which in enumerate([TABLE, *also])}
    for table, which in enumerate([TABLE, *also]):
        assert weights.layout(model, TABLE, names[table], also=also) is which
        partial = {name for name in names[table] if "layers.1" not in name}
        assert weights.layout(model, TABLE, partial, also=also) is which
    assert weights.layout(model, TABLE, names[1]) is TABLE
    assert weights.layout(model, TABLE, names[0] & names[1], also=also) is TABLE  # a draw
    assert weights.layout(model, TABLE, set(), also=also) is TABLE
    assert weights.layout(model, TABLE, names[1], native=True, also=also) == weights.identity(model)


def test_what_is_missing_is_named_as_the_layout_on_disk_names_it(tmp_path):
    tensors = relaid(random_tensors(on_meta(stacked=True)), STACKED)
    for name, shape, words in [
        ("model.layers.1.mlp.experts.down_proj", None, "missing (1 of 23): {name}"),
        ("model.layers.0.mlp.experts.gate_up_proj", (EXPERTS, HIDDEN, 2 * INTERMEDIATE), "{name} is [3, 16, 48], the"),
    ]:
        wrong = {key: x for key, x in tensors.items() if key != name or shape}
        if shape:
            wrong[name] = torch.zeros(shape)
        reader = save(tmp_path / name, wrong)
        with pytest.raises(CheckpointError) as caught:
            weights.load(on_meta(stacked=True), TABLE, reader, device="cpu", also=[STACKED])
        assert words.format(name=name) in str(caught.value) and ".w1." not in str(caught.value)
    mixed = {**random_tensors(on_meta(stacked=True)), **tensors}
    for name in [name for name in mixed if ("layers.0" in name) == (".w" in name) and "experts" in name]:
        del mixed[name]  # layer 0 stacked, layer 1 not: no table says that
    with pytest.raises(CheckpointError, match=r"missing \(9 of 37\).*\n.*unexpected \(2\): model.layers.0.mlp.experts"):
        weights.load(on_meta(stacked=True), TABLE, save(tmp_path / "mixed", mixed), device="cpu", also=[STACKED])


def test_a_tied_copy_is_compared_in_another_layout_too(tmp_path):
    model = on_meta(tied=True, stacked=True)
    tensors = random_tensors(model, table=STACKED)
    reader = save(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)})
    with pytest.raises(CheckpointError, match="config ties"):
        weights.load(model, TABLE, reader, device="cpu", tied=TIED, also=[STACKED])
