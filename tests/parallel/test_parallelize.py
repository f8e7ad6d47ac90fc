"""`parallelize` promises the loss, the gradients and the logits of one process, however the model is spread.

Processes meet over gloo, on the CPU, in fp32: see runs.py, which also holds the tables of families and of splits. The
jobs of a group share their processes, since starting those takes longest.
"""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ligermodels.errors import InputError
from ligermodels.layers.base import REPLICATED, Layer
from ligermodels.parallel import make_mesh, parallelize
from ligermodels.parallel.tensor import check_tensor
from ligermodels.training import add_lora
from tests.parallel.ranks import one_rank
from tests.parallel.runs import ALIKE, ARCHS, FAMILIES, SUITES, make, run
from tests.quantized import quantized, with_quantized_experts

TOLERANCE = 5e-5
"""Of errors relative to a gradient's largest number: it is a sum of some hundred products that are rounded in another
order on each side, sqrt(300) * 2^-24 = 1e-6 on average, and of gates the small difference of larger numbers. The
largest that was seen is 2.3e-5, of gpt-oss' router bias, whose terms sum to zero over the experts of each token."""
MIXED = 3.0
"""In bf16: how far our gradients may be off those of fp32, in units of how far those of one process in bf16 are, plus
an ulp. The roundings are as many and as large, and others."""

IMAGES = {
    family: dict(kind="images")
    for family in (
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5_vl",
        "qwen3_5_moe_vl",
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "mllama",
    )
}
WITHOUT_TP = ("mllama", "qwen3_5_one_key_head")
PAIRS = ("fsdp2", "tp2", "cp2")
KINDS = ("packed", "restarting", "left", "right", "positions", "few", "long", "embeds")


def job(check, **options):
    """(name, check, options), as `run` takes them."""
    named = [str(value) for key, value in options.items() if key != "model"]
    if "model" in options:
        family, changes = options["model"]
        named = [family, *(f"{key}={value}" for key, value in changes.items()), *named]
    return "-".join([check, *named]), check, options


def gradients(family, split, **options):
    return job("gradients", family=family, split=split, **{**IMAGES.get(family, {}), **options})


def all_families(*splits, **options):
    pairs = [(family, split) for split in splits for family in FAMILIES]
    return [
        gradients(family, split, **options) for family, split in pairs
        if not ("tp" in split and family in WITHOUT_TP)
    ]  # fmt: skip


QUICK = [
    gradients("llama", "fsdp2"),
    gradients("llama", "tp2", recompute="block"),
    gradients("llama", "cp2", kind="packed"),
    gradients("llama_biased", "tp2"),
    gradients("qwen2", "cp2", recompute="mlp"),
    gradients("qwen3", "tp2"),
    gradients("phi3", "tp2", recompute="mlp"),
    gradients("phi3_biased", "tp2", kind="packed"),
    gradients("gemma2", "tp2", kind="restarting"),
    gradients("gemma2", "cp2", recompute="block"),
    gradients("mixtral", "fsdp2", recompute="block"),
    gradients("qwen3_5", "fsdp2", kind="restarting"),
    gradients("qwen3_5", "fsdp2", kind="left", recompute="block"),
    gradients("qwen3_5", "tp2", kind="packed"),
    gradients("qwen3_5", "cp2", kind="packed", recompute="block"),
    gradients("qwen3_5_one_key_head", "cp2", kind="left"),
    gradients("qwen3_5_mtp", "fsdp2", kind="restarting"),
    gradients("qwen3_5_mtp", "tp2", kind="packed"),
    gradients("qwen3_5_mtp", "cp2", kind="packed"),
    gradients("mixtral", "tp2"),
    gradients("mixtral", "cp2", kind="left"),
    gradients("llama", "fsdp2", kind="few"),
    gradients("gemma2", "fsdp2", offloads=True),
    gradients("qwen2_vl", "cp2"),
    gradients("qwen3_vl", "tp2"),
    *(gradients(family, split) for family in ("gemma3", "gemma4") for split in PAIRS),
    gradients("gemma4_unified", "fsdp2"),
    gradients("qwen3_vl_moe", "fsdp2"),
    gradients("qwen3_vl_moe", "tp2"),
    gradients("qwen3_5_moe_vl", "fsdp2"),
    gradients("qwen3_5_moe_vl", "tp2"),
    gradients("qwen3_5_moe_mtp", "fsdp2", kind="restarting"),
    gradients("qwen3_5_moe_mtp", "tp2", kind="packed"),
    gradients("qwen3_5_moe_mtp", "cp2", kind="packed", recompute="block"),
    gradients("toy", "fsdp2", recompute="block"),
    gradients("toy", "tp2", kind="packed"),
    gradients("toy", "cp2", kind="left"),
    job("mixed", family="toy", split="fsdp2", low=True, recompute="block"),
    job("mixed", family="toy", split="tp2", low=True),
    job("images_on_one_rank", family="qwen2_vl"),
    job("images_on_one_rank", family="qwen3_vl"),
    job("images_on_one_rank", family="mllama"),
    job("images_on_one_rank", family="gemma4"),
    job("accumulated", family="llama", split="fsdp2"),
    job("accumulated", family="llama", split="cp2"),
    job("logits", family="gemma2", split="tp2"),
    job("logits", family="gemma2", split="cp2", kind="restarting"),
    job("norm", family="llama", split="tp2"),
    job("mixed", family="llama", split="fsdp2", recompute="block"),
    job("mixed", family="mixtral_fp32", split="fsdp2", recompute="block"),
    job("mixed", family="mixtral_fp32", split="fsdp2", low=True),
    job("mixed", family="mixtral_fp32", split="tp2", low=True),
    gradients("mixtral_fp32", "fsdp2", recompute="block"),
    gradients("mixtral_fp32", "tp2"),
    gradients("mixtral_shared", "tp2", recompute="block"),
    gradients("mixtral_sigmoid", "fsdp2", recompute="block"),
    *(gradients("mixtral_biased", split, recompute="block") for split in ("fsdp2", "tp2")),
    *(job("balanced", family="mixtral_sigmoid", split=split) for split in ("fsdp2", "tp2", "cp2")),
    job("stepped", family="llama", split="tp2"),
    job("joint", family="llama_biased", split="tp2"),
    gradients("mixtral", "ep2"),
    gradients("mixtral_shared", "ep2", recompute="block"),
    gradients("mixtral_biased", "ep2", kind="left"),
    gradients("gemma4_experts", "ep2"),
    job("uneven", family="mixtral", split="ep2"),
    job("stepped", family="mixtral_shared", split="ep2"),
    job("uneven", family="mixtral", split="ep2", recompute="block"),
    job("balanced", family="mixtral_sigmoid", split="ep2"),
    job("mixed", family="mixtral_fp32", split="ep2", recompute="block"),
    *(gradients(family, split) for family in SUITES for split in ("fsdp2", "tp2")),
    gradients("gemma4_text", "cp2", kind="packed"),
    gradients("gemma4_experts", "tp2", recompute="block"),
]
TWO = [
    *all_families(*PAIRS),
    *(gradients(family, "cp2", recompute="mlp") for family in ("gemma2", "mixtral", "qwen2_vl")),
    *(gradients(family, split, recompute="block") for family in ("mixtral", "qwen2_vl") for split in ("tp2", "cp2")),
    gradients("mllama", "cp2", recompute="block"),
    *(gradients("gemma2", split, kind=kind) for split in ("tp2", "cp2") for kind in KINDS),
    *(gradients("mixtral", "tp2", kind=kind) for kind in KINDS),
    *(gradients("qwen2_vl", split, kind=kind) for split in ("tp2", "cp2") for kind in ("axes", "packed", "left")),
    *(gradients("qwen2", "fsdp2", kind=kind) for kind in ("restarting", "left", "right")),
    *(gradients("qwen3_5", split, kind=kind) for split in ("tp2", "cp2") for kind in KINDS),
    *(gradients("qwen3_5", split, recompute="mlp") for split in ("tp2", "cp2")),
    *(gradients("qwen3_5_mtp", split, kind=kind) for split in ("tp2", "cp2") for kind in ("few", "left", "embeds")),
    *(job("norm", family="qwen3_5", split=split) for split in PAIRS),
    *(job("logits", family="qwen3_5", split=split, kind="packed") for split in ("tp2", "cp2")),
    *(gradients("llama", split, trained="o_proj") for split in PAIRS),
    job("accumulated", family="qwen2", split="tp2"),
    *(job("logits", family="qwen2", split=split) for split in PAIRS),
    *(job("logits", family="llama", split=split, kind=kind) for split in ("tp2", "cp2") for kind in ("packed", "left")),
    *(job("norm", family="mixtral", split=split) for split in PAIRS),
    gradients("mixtral", "ep2", recompute="mlp"),
    gradients("mixtral", "ep2", recompute="block", offloads=True),
    gradients("mixtral", "ep2", trained="o_proj"),
    gradients("qwen3_5_moe_mtp", "ep2", kind="restarting"),
    gradients("qwen3_vl_moe", "ep2", kind="images"),
    *(gradients(family, "ep2") for family in SUITES if any("experts" in name for name in FAMILIES[family])),
    job("norm", family="mixtral", split="ep2"),
    job("mixed", family="mixtral", split="ep2", low=True),
    job("accumulated", family="mixtral_shared", split="ep2"),
    job("logits", family="mixtral_shared", split="ep2"),
    job("headless", family="llama", split="fsdp2"),
    job("custom", split="fsdp2"),
    *(job("images_on_one_rank", family=family, packed=True) for family in IMAGES),
    *(job("generated", family=family, split="fsdp2") for family in ("llama", "gemma2")),
    *(job("mixed", family="llama", split=split, recompute="block") for split in ("tp2", "cp2")),
    *(job("mixed", family="mixtral_fp32", split=split) for split in ("fsdp2", "tp2", "cp2")),
    job("norm", family="mixtral_fp32", split="fsdp2"),
    job("stepped", family="mixtral_fp32", split="tp2"),
    *(job("mixed", family=family, split="fsdp2", **IMAGES.get(family, {})) for family in ("mixtral", "qwen2_vl")),
]  # fmt: skip
TWO = [one for one in TWO if one not in QUICK]
FOUR = [
    *all_families("tp2-fsdp2", "cp2-fsdp2", "cp2-tp2", "tp4", "cp4", "hsdp2-fsdp2", "cp2-hsdp2"),
    *(gradients(family, "cp2-tp2", kind=kind) for family in ("mixtral", "qwen3_5") for kind in KINDS),
    *(gradients("mixtral", split, recompute="block") for split in ("ep2-fsdp2", "ep4", "ep2-hsdp2")),
    job("norm", family="mixtral", split="ep2-hsdp2"),
    job("mixed", family="mixtral_fp32", split="ep2-fsdp2", recompute="block"),
    gradients("gemma2", "cp2-tp2", recompute="block"),
    gradients("llama", "hsdp2-fsdp2", kind="few"),
    *(job("logits", family="gemma2", split=split) for split in ("cp2-tp2", "tp4", "cp4", "tp2-fsdp2")),
    *(job("norm", family="llama", split=split) for split in ("tp2-fsdp2", "cp2-tp2", "hsdp2-fsdp2")),
    *(job("accumulated", family="qwen2", split=split) for split in ("cp2-tp2", "cp2-fsdp2")),
    job("mixed", family="llama", split="cp2-tp2", recompute="block"),
    *(job("balanced", family="mixtral_sigmoid", split=split) for split in ("cp2-tp2", "cp2-hsdp2")),
    *(job("mixed", family="mixtral_fp32", split="tp2-fsdp2", low=low, recompute="block") for low in (False, True)),
]

THREE_HEADS = dict(num_attention_heads=3, num_key_value_heads=3, head_dim=8)
TWELVE_HEADS = dict(num_attention_heads=12, num_key_value_heads=3, head_dim=8)
REFUSED = [
    ("llama", "tp2", THREE_HEADS, r"tp=2: 3 heads and 3 key heads\. tp may be 3$"),
    ("llama", "tp2", TWELVE_HEADS, r"12 heads and 3 key heads\. tp may be 3, 6, 12$"),
    ("llama", "cp2", THREE_HEADS, r"cp=2 .* 3 heads and 3 key heads; cp may be 3$"),
    ("qwen3_5_one_key_head", "tp2", {}, r"tp=2: 1 key heads of linear attention\. use dp_shard and cp instead of tp"),
    (
        "qwen3_5",
        "cp2",
        dict(linear_num_key_heads=3, linear_num_value_heads=9),
        r"9 heads and 3 key heads; use dp_shard",
    ),
    ("llama", "tp2", dict(vocab_size=97), r"vocabulary of 97, .*pad_to_multiple_of=2"),
    ("llama", "tp2", dict(THREE_HEADS, intermediate_size=45), r"intermediate size of 45\. tp may be 3$"),
    ("mixtral", "tp2", dict(intermediate_size=47), r"intermediate size of 47"),
    ("mixtral", "tp2", dict(router_jitter_noise=0.1), r"router_jitter_noise to 0"),
    ("phi3", "tp2", dict(num_key_value_heads=1), r"tp=2: 8 heads and 1 key heads in one weight\. use dp_shard and cp"),
    ("mllama", "tp2", {}, r"CrossBlock\.shards\(\) does not name .*use dp_shard and cp instead of tp"),
    ("llama", "ep2", {}, r"ep=2 is for mixtures, and Llama has no experts: use dp_shard"),
    ("mixtral", "ep2", dict(num_local_experts=3), r"ep=2 does not divide 3 experts; ep may be 3$"),
    ("custom", "tp2", {}, r"no model of the zoo: of its mesh, cp and tp have to be 1"),
    ("llama", "fsdp", {}, r"dimensions \('fsdp',\); expected dp_shard"),
]
"""Family, split or the name of a mesh's only dimension, changes of the config, and what the error says."""
CALLS = {
    "length": r"15 tokens a row cannot be split over 2 ranks.*pad",
    "length of a packed row": r"15 tokens a row cannot be split",
    "length, without the head": r"15 cannot be split over 2 ranks",
    "cache": r"a cache.*dp_shard alone",
    "generate": r"a cache.*dp_shard alone",
    "output_hidden_states": r"output_hidden_states.*dp_shard alone",
    "logits_to_keep": r"logits_to_keep.*dp_shard alone",
    "return_logits": r"return_logits=False.*dp_shard alone",
    "ids": r"the table from 0 to 95",
    "parallelize": r"is sharded already",
}
MORE_CALLS = {
    "tp2": {**CALLS, "return_logprobs": r"return_logprobs is not supported under tensor parallel"},
    "cp2": CALLS,
    "fsdp2": {call: CALLS[call] for call in ("ids", "parallelize")},
}
REFUSALS = [
    *(job("refused", model=(family, changes), split=split) for family, split, changes, _ in REFUSED),
    *(job("calls_refused", split=split) for split in MORE_CALLS),
]


def test_every_family_is_spread():
    spread = {config.get("model_type", family) for family, config in FAMILIES.items()}
    assert ARCHS.keys() == spread | ALIKE.keys()


@pytest.mark.parametrize("size, jobs", [
    (2, QUICK), pytest.param(2, TWO, marks=pytest.mark.slow), pytest.param(4, FOUR, marks=pytest.mark.slow),
], ids=["two, quick", "two", "four"])  # fmt: skip
def test_processes_are_one(tmp_path, size, jobs):
    wrong = {}
    for name, of_ranks in run(size, tmp_path, jobs).items():
        limit = MIXED if name.startswith("mixed") else TOLERANCE
        assert all(of_ranks), name
        for rank, errors in enumerate(of_ranks):  # NaN is wrong too
            wrong |= {(name, rank, what): error for what, error in errors.items() if not error <= limit}
    assert not wrong, "\n".join(f"{' '.join(map(str, place))}: {error:.2g}" for place, error in wrong.items())


@pytest.mark.slow
def test_what_cannot_be_honoured_is_refused(tmp_path):
    found = run(2, tmp_path, REFUSALS)
    for (name, _, _), (*_, says) in zip(REFUSALS, REFUSED, strict=False):
        assert all(re.search(says, said) for said in found[name]), (name, found[name])
    for split, calls in MORE_CALLS.items():
        for said in found[job("calls_refused", split=split)[0]]:
            wrong = [(call, said.get(call)) for call, says in calls.items() if not re.search(says, said.get(call, ""))]
            assert not wrong, split


class Scaled(Layer):
    """A user's layer. named: what `shards` says."""

    def __init__(self, **named):
        super().__init__()
        self.scale, self.proj, self.named = nn.Parameter(torch.ones(32)), nn.Linear(32, 32), named

    def shards(self):
        return super().shards() | self.named


def with_mlp(mlp):
    model = make("llama")
    model.decoder.layers[1].mlp = mlp
    return model


def compiled_projection():
    model = make("llama")
    model.decoder.layers[0].mlp.down_proj = torch.compile(model.decoder.layers[0].mlp.down_proj)
    return model


NOT_SPLIT = {
    "no answer": (lambda: with_mlp(Scaled()), r"Scaled\.shards\(\) does not name scale, proj\.weight, proj\.bias\. "),
    "part of an answer": (
        lambda: with_mlp(Scaled(scale=REPLICATED)),
        r"Scaled\.shards\(\) does not name proj\.weight, proj\.bias\. use dp_shard and cp",
    ),
    "another name": (
        lambda: with_mlp(Scaled(scale=REPLICATED, projection=REPLICATED)),
        r"Scaled\.shards\(\) names projection, but a \S+\.Scaled has no such parameter",
    ),
    "inside of torch.compile": (lambda: with_mlp(torch.compile(Scaled())), r"tp=2: \S+\.Scaled\.shards\(\) does not"),
    "of torch": (
        lambda: with_mlp(nn.LayerNorm(32)),
        r"a torch\.\S+\.LayerNorm has parameters, but no method shards\(\)",
    ),
    "a compiled projection": (compiled_projection, r"a torch\.\S+\.OptimizedModule in place of a projection"),
    "4 bits": (lambda: quantized(make("phi3")), r"tp=2: a \S+\.QuantizedLinear in place of a projection\. use"),
    "experts in 4 bits": (
        lambda: with_quantized_experts(make("mixtral")),
        r"tp=2: a \S+\.QuantizedLinear in place of a projection\. use",
    ),
    "adapters of experts": (
        lambda: add_lora(make("mixtral"), targets=[], target_parameters=["experts.down_proj"]),
        r"a ligermodels\.layers\.lora\.Factor has parameters, but no method shards\(\)",
    ),
}


@pytest.mark.parametrize("case", NOT_SPLIT)
def test_what_tensor_parallel_cannot_split_is_named(case):
    made, says = NOT_SPLIT[case]
    with pytest.raises(InputError, match=says):
        check_tensor(made(), 2)


def test_tensor_parallel_asks_a_compiled_layer():
    check_tensor(with_mlp(torch.compile(make("llama").decoder.layers[0].mlp)), 2)


class Unread(Layer):
    keep_fp32 = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))


class WithMore(Unread):
    forward = nn.Linear.forward

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)


@pytest.mark.parametrize(
    "layer, says",
    [
        (
            Unread,
            r"layers\.1\.extra keeps its parameters in fp32, but a Unread has no forward.*give it one that returns",
        ),
        (WithMore, r"extra keeps .*, and modules inside of it have others in \{torch\.bfloat16\}.*out of WithMore"),
    ],
)
def test_a_layer_that_fsdp_could_not_keep_in_fp32_is_refused(tmp_path, layer, says):
    model = make("llama")
    model.decoder.layers[1].extra = layer()
    model.to(torch.bfloat16)
    with one_rank(tmp_path), pytest.raises(InputError, match=says):
        parallelize(model, make_mesh(device_type="cpu"))
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
