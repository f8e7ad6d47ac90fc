"""The weight table on small models of our own: what round trips, and what is refused with which words."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ligermodels.checkpoint import weights
from ligermodels.checkpoint.reading import SafetensorsReader
from ligermodels.checkpoint.weights import TensorInfo, same_bits
from ligermodels.errors import CheckpointError

# Random bits, so that a lost one shows, hold NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*NaN or infinity")
VOCAB, HIDDEN, INTERMEDIATE, LAYERS, EXPERTS = 32, 16, 24, 2, 3


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INTERMEDIATE))


class Block(nn.Module):
    def __init__(self, stacked: bool):
        super().__init__()
        self.self_attn = nn.Module()
        for part, rows in (("q", 16), ("k", 8), ("v", 8)):
            self.self_attn.add_module(f"{part}_proj", nn.Linear(HIDDEN, rows))
        self.self_attn.o_proj = nn.Linear(16, HIDDEN, bias=False)
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.mlp = nn.Module()
        if stacked:
            self.mlp.experts = Experts()
        else:
            self.mlp.gate_up_proj = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
            self.mlp.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)


class Tiny(nn.Module):
    def __init__(self, tied: bool = False, stacked: bool = False):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.model.layers = nn.ModuleList(Block(stacked) for _ in range(LAYERS))
        self.model.norm = nn.RMSNorm(HIDDEN)
        if not tied:
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)


LAYER = "model.layers.{i}."
EXPERT = LAYER + "moe.experts.{e}."
TABLE = {  # names that differ on disk; some parts of them cut
    LAYER + "mlp.experts.gate_up_proj": (EXPERT + "w1.weight", EXPERT + "w3.weight"),
    LAYER + "mlp.experts.down_proj": EXPERT + "w2.weight",
    LAYER + "mlp.gate_up_proj.{w}": (LAYER + "mlp.gate_proj.{w}", LAYER + "mlp.up_proj.{w}"),
}
STACKED = {}  # names that do not
OTHERS = {**TABLE, LAYER + "{rest}": "decoder.blocks.{i}.{rest}"}  # the first that matches counts
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
Q = "model.layers.0.self_attn.q_proj.weight"


def on_meta(tied: bool = False, stacked: bool = False, dtype: torch.dtype = torch.float32) -> Tiny:
    with torch.device("meta"):
        return Tiny(tied, stacked).to(dtype)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit pattern, NaNs of all kinds, infinities and subnormals among them."""
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)


def random_tensors(model: nn.Module, dtype: torch.dtype = torch.float32, table=TABLE) -> dict[str, Tensor]:
    """What a checkpoint of `model` holds."""
    params = dict(model.named_parameters())
    return {r.source: random_bits(tuple(params[r.param][r.index].shape), dtype) for r in weights.regions(model, table)}


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


# Regions


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("table", [TABLE, STACKED, OTHERS], ids=["table", "identity", "others"])
def test_regions_tile_every_element_exactly_once(tied, stacked, table):
    model = Tiny(tied, stacked)
    counts = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    for region in weights.regions(model, table):
        counts[region.param][region.index] += 1
    assert all((count == 1).all() for count in counts.values())


def test_parts_are_joined_in_the_order_of_the_table(tmp_path):
    tensors, model = random_tensors(on_meta(stacked=True)), on_meta(stacked=True)
    weights.load(model, TABLE, save(tmp_path, tensors), device="cpu")
    expert = "model.layers.1.moe.experts"
    gate_up = [torch.cat([tensors[f"{expert}.{e}.{w}.weight"] for w in ("w1", "w3")]) for e in range(EXPERTS)]
    assert same_bits(model.model.layers[1].mlp.experts.gate_up_proj.detach(), torch.stack(gate_up))


# Loading


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_loaded_model(tmp_path, dtype):
    """It has the dtype asked for, whatever is on disk; frozen parameters stay frozen."""
    tensors = random_tensors(on_meta(), torch.bfloat16) | {"model.norm.weight": torch.randn(HIDDEN)}
    model = on_meta()
    model.model.norm.weight.requires_grad_(False)
    weights.load(model, TABLE, save(tmp_path, tensors), device="cpu", dtype=dtype)
    assert {param.dtype for param in model.parameters()} == {dtype or torch.float32}
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"].to(dtype or torch.float32))
    assert not any(x.is_meta for x in [*model.parameters(), *model.buffers()])
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == ["model.norm.weight"]


# Checking


def complaint(tensors: dict[str, Tensor], *, tied: bool = False, stacked: bool = False, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        weights.check(on_meta(tied, stacked), TABLE, headers_of(tensors), tied=TIED if tied else None, **options)
    return str(caught.value)


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


@pytest.mark.parametrize(
    "rename, words",
    [
        (lambda n: n.replace("q_proj.weight", "q_proj.weight.absmax"), "bitsandbytes"),
        (lambda n: n.replace("q_proj.weight", "q_proj.lora_A.weight"), "adapter"),
        (lambda n: n.replace("self_attn.q_proj", "attention.wq"), "Meta's or Mistral's"),
        (lambda n: "language_model." + n, "larger model that holds this one under 'language_model.'"),
        (lambda n: n.removeprefix("model."), "bare model, saved without its head: its names lack 'model.'"),
        (lambda n: n.replace("layers.1", "layers.5"), "6 layers on disk, 2 expected"),
        (lambda n: n.replace("lm_head", "score"), "set tie_word_embeddings"),
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
    assert same_bits(model.model.embed_tokens.weight.detach(), embedding)
    weights.check_tied(on_meta(tied=True), TABLE, reader, TIED)

    one_bit = head.view(torch.int16).clone()
    one_bit[-1, -1] ^= 1
    for name, wrong in [("bit", one_bit.view(torch.float16)), ("dtype", head.float())]:
        reader = save(tmp_path / name, {**tensors, "lm_head.weight": wrong})
        with pytest.raises(CheckpointError, match=r"differs from model\.embed_tokens.*config ties"):
            weights.load(on_meta(tied=True), TABLE, reader, device="cpu", tied=TIED)


# Other layouts on disk


@pytest.mark.parametrize("other", [STACKED, OTHERS], ids=["stacked", "others"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_layout_loads_and_is_relaid_to_the_same_bits(tmp_path, poison, dtype, other):
    tensors, also = random_tensors(on_meta(stacked=True), dtype), [STACKED, OTHERS]
    first, second = save(tmp_path / "a", tensors), save(tmp_path / "b", relaid(tensors, other), shards=3)
    assert set(first.headers) - set(second.headers) and set(second.headers) - set(first.headers)
    for reader, stored in ((first, TABLE), (second, other)):
        model = on_meta(stacked=True, dtype=dtype)
        weights.load(model, TABLE, reader, device="cpu", also=also)
        exported = dict(weights.export(model, TABLE))
        assert exported.keys() == tensors.keys() and all(same_bits(exported[name], tensors[name]) for name in tensors)
        for wanted, expected in ((TABLE, first), (other, second)):
            seen = weights.Renamed(on_meta(stacked=True), reader, stored, wanted)
            assert dict(seen.headers) == {name: expected.headers[name] for name in seen.headers}
            assert seen.headers.keys() == expected.headers.keys()
            assert all(same_bits(seen.read(name), expected.read(name)) for name in seen.headers)


# Giving out


class Quantised(Tensor):
    """Claims to be floats, as torchao's tensors do."""


def adapted(model: Tiny) -> None:
    model.model.layers[0].self_attn.q_proj.base_layer = nn.Linear(2, 2)


def offloaded(model: Tiny) -> None:
    model.model.norm.to("meta")


def codes(model: Tiny) -> None:
    model.lm_head.weight = nn.Parameter(torch.zeros(VOCAB, HIDDEN, dtype=torch.uint8), requires_grad=False)


def disguised(model: Tiny) -> None:
    model.lm_head.weight = nn.Parameter(torch.zeros(VOCAB, HIDDEN).as_subclass(Quantised))


def partitioned(model: Tiny) -> None:
    """As DeepSpeed's ZeRO-3 leaves a parameter."""
    model.lm_head.weight = nn.Parameter(torch.empty(0))
    model.lm_head.weight.ds_shape = torch.Size([VOCAB, HIDDEN])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (adapted, r"(?s)not the model's \(2\): \S+q_proj\.base_layer\.weight.*merge them first"),
        (offloaded, r"model\.norm\.weight has no memory in this process.*state_dict="),
        (codes, r"lm_head\.weight is quantised \(Tensor of torch\.uint8\)"),
        (disguised, r"lm_head\.weight is quantised \(Quantised of torch\.float32\)"),
        (partitioned, r"lm_head\.weight is \[0\], the model has \[32, 16\].*get_state_dict"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_given_out(spoil, words):
    model = Tiny()
    whole = model.state_dict()
    spoil(model)
    with pytest.raises(CheckpointError, match=words):
        weights.export(model, TABLE)
    if spoil in (offloaded, partitioned):
        assert len(list(weights.export(model, TABLE, whole))) == len(random_tensors(on_meta()))
