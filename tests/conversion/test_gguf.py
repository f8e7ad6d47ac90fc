"""GGUF files, read back by the gguf package: every tensor and key by formulas of this file, and what is refused.

Where xllamacpp, a build of llama.cpp, is installed, its logits and token ids are compared too.
"""

import json
import math
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligermodels import cli
from ligermodels.arch import ARCHS
from ligermodels.checkpoint.files import read_json
from ligermodels.checkpoint.gguf import writer as gguf_writer
from ligermodels.checkpoint.gguf.writer import GgufTarget
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion import MismatchError
from ligermodels.errors import ConfigError, InputError
from ligermodels.text import Tokenizer
from tests.conversion.gguf_files import (
    SIZES,
    add_tokenizer,
    fields_of,
    small_model,
    tensors_of,
    to_gguf,
    tokenizer_folder,
)
from tests.text import folders

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
GEMMA = {"head_dim": 8, "tie_word_embeddings": True}
MODELS = {
    "llama": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 64}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "head_dim": 8}),
    "gemma": ("gemma", GEMMA),
    "gemma2": ("gemma2", {**GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "qwen2": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "phi3": ("phi3", {"sliding_window": 300}),
    "phi3, long": (
        "phi3",
        {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64, "rope_scaling": LONGROPE},
    ),
}
TEXTS = (*folders.TEXTS, "the the", "the  the", "a\n\n\nb", "314 it's I'LL", "</s>the")


OF_FAMILY = {"llama": "llama 3", "mistral": "mistral 0.3", "gemma": "gemma 1", "gemma2": "gemma 2", "qwen2": "qwen 2"}
OF_FAMILY |= {"mixtral": "mixtral", "phi3": "llama 2", "qwen3": "qwen 2"}


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """(name of a model, dtype) -> a folder that transformers wrote, with eight rows more than there are tokens."""
    transformers = pytest.importorskip("transformers")
    built = {}

    def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        if (name, dtype) not in built:
            family, fields = MODELS[name]
            rows = Tokenizer.from_folder(tokenizer_folder(OF_FAMILY[family])).vocab_size + 8
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = transformers.AutoConfig.for_model(family, **SIZES, vocab_size=rows, **fields)
                torch.manual_seed(0)
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.5))
            folder = tmp_path_factory.mktemp("model") / "tiny"
            model.save_pretrained(folder)
            add_tokenizer(folder, OF_FAMILY[family])
            built[name, dtype] = folder
        return built[name, dtype]

    return build


# Tensors and keys

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_proj": "ffn_gate",
    "mlp.gate_up_proj": "ffn_up", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp", "input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip

EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def swapped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2 j + s of each head is row j + s D / 2 of the source's head."""
    size = len(x) // heads
    rows = [h * size + j + s * size // 2 for h in range(heads) for j in range(size // 2) for s in (0, 1)]
    return x[rows]


def expected(folder: Path, family: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    config, source = read_json(folder / "config.json"), {}
    for path in folder.glob("*.safetensors"):
        source |= load_file(path)
    found, experts = {}, {}
    for name, x in source.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w\d)\.weight", name):
            experts.setdefault(f"blk.{match[1]}.{EXPERTS[match[3]]}.weight", {})[int(match[2])] = x.to(dtype)
            continue
        after = "post_attention_norm" if family == "gemma2" else "ffn_norm"
        ours = name.replace("post_attention_layernorm", after)
        for theirs, its in NAMES.items():
            ours = re.sub(rf"\b{re.escape(theirs)}\b", its, ours)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            x = x.float() + 1
        if family in ("llama", "mistral", "mixtral") and ("q_proj" in name or "k_proj" in name):
            x = swapped(x, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        found[ours] = x.float() if x.dim() == 1 or "gate_inp" in ours else x.to(dtype)
    return found | {name: torch.stack([parts[e] for e in sorted(parts)]) for name, parts in experts.items()}


def divisor(rope: dict, i: int, dim: int) -> float:
    """Llama 3.1's rule as its code has it: by the wavelength of frequency i."""
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelength = 2 * math.pi * rope["theta"] ** (2 * i / dim)
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return rope["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def wanted_fields(name: str, rows: int) -> dict:
    family, fields = MODELS[name]
    arch = {"mistral": "llama", "mixtral": "llama"}.get(family, family)
    size = fields.get("head_dim") or 8
    own = {
        "vocab_size": rows, "context_length": 256, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": size,
        "attention.value_length": size, "rope.dimension_count": 6 if name == "phi3, long" else size,
    }  # fmt: skip
    own["rope.freq_base"] = 500000.0 if name == "llama" else 1000000.0 if family == "mixtral" else 10000.0
    own["attention.layer_norm_rms_epsilon"] = {"mixtral": 1e-5, "phi3": 1e-5}.get(family, 1e-6)
    own |= {
        "llama, tied": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        "mistral, window": {"attention.sliding_window": 64},
        "mixtral": {"expert_count": 3, "expert_used_count": 2},
        "gemma2": {
            "attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        "qwen2": {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 1.0,
        },
        "phi3": {"attention.sliding_window": 300, "rope.scaling.original_context_length": 4096},
        "phi3, long": {
            "attention.sliding_window": 0, "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)),
        },
    }.get(name, {})  # fmt: skip
    return {f"{arch}.{key}": value for key, value in own.items()} | {
        "general.architecture": arch, "general.type": "model", "general.name": "tiny",
        "general.quantization_version": 2,
    }  # fmt: skip


@pytest.mark.parametrize("name, dtype", [*((name, "keep") for name in MODELS), ("llama", "fp32"), ("mixtral", "fp16")])
def test_tensors_and_keys(tmp_path, model_of, name, dtype):
    folder, family = model_of(name), MODELS[name][0]
    report = to_gguf(folder, tmp_path / "out.gguf", dtype=dtype, verify="bytes")
    assert report.details["verified"] == "bytes" and report.ok
    found = tensors_of(tmp_path / "out.gguf")
    wanted = expected(folder, family, {"keep": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[dtype])
    assert report.tensors == len(found)
    if name == "llama":
        divisors = [divisor(LLAMA3 | {"theta": 500000.0}, i, 8) for i in range(4)]
        torch.testing.assert_close(found.pop("rope_freqs.weight"), torch.tensor(divisors))
    if name == "phi3, long":
        for length in ("long", "short"):
            wanted[f"rope_factors_{length}.weight"] = torch.tensor(LONGROPE[f"{length}_factor"])
    assert found.keys() == wanted.keys()
    assert ("output.weight" in found) is not (name == "llama, tied" or family.startswith("gemma"))
    for tensor in wanted:
        assert same_bits(found[tensor], wanted[tensor]), tensor
    fields = {k: v for k, v in fields_of(tmp_path / "out.gguf").items() if not k.startswith("tokenizer.")}
    wanted = wanted_fields(name, read_json(folder / "config.json")["vocab_size"])
    wanted["general.file_type"] = {"keep": 32, "fp32": 0, "fp16": 1}[dtype]
    assert fields == {k: pytest.approx(v, rel=1e-6) if isinstance(v, float) else v for k, v in wanted.items()}


# The pipeline


def test_phi_3_in_the_name():
    """llama.cpp looks for Phi-3's special tokens in models with this name, and ends where there are none."""
    assert [gguf_writer._named(name, False) for name in ("My-Phi3", "tuned")] == ["My-phi", "tuned"]
    assert [gguf_writer._named(name, True) for name in ("my-phi-3", "tuned")] == ["my-phi-3", "tuned (Phi-3)"]


@pytest.mark.parametrize("folders, name", [
    ("Tiny-1B", "Tiny-1B"), ("runs/chat/model", "chat"), ("Tiny-1B.Q4_0.gguf", "Tiny-1B.Q4_0"),
    ("hub/models--someone--Tiny-1B/snapshots/0123456789abcdef", "Tiny-1B"),
])  # fmt: skip
def test_the_name_of_a_model(tmp_path, monkeypatch, folders, name):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / folders
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch() if place.suffix == ".gguf" else place.mkdir()
    assert gguf_writer.model_name(folders) == gguf_writer.model_name(place) == name
    (tmp_path / "tuned" / "adapter").mkdir(parents=True)
    assert gguf_writer.model_name(place, "tuned/adapter") == f"{name}-tuned"
    assert gguf_writer.model_name("someone/Tiny-1B-Instruct") == "Tiny-1B-Instruct"


def test_the_command(tmp_path, model_of, capsys):
    command = ["convert", str(model_of("llama")), str(tmp_path / "new" / "out.gguf"), "--json"]
    assert cli.main([*command, "--dry-run"]) == 0 and not (tmp_path / "new").exists()
    planned = json.loads(capsys.readouterr().out)
    assert cli.main([*command, "--verify", "bytes"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and (report["tensors"], report["bytes"]) == (planned["tensors"], planned["bytes"])
    assert left(tmp_path / "new") == ["out.gguf"] and (report["to"], report["name"]) == ("gguf", "tiny")
    assert set(report["dtypes"]) == {"bfloat16", "float32"}  # the norms
    assert cli.main(command) == 2 and "--overwrite" in capsys.readouterr().err
    assert cli.main([*command, "--overwrite", "--dtype", "fp16"]) == 0
    assert fields_of(tmp_path / "new" / "out.gguf")["general.file_type"] == 1
    assert cli.main([*command[:-1], "--overwrite", "--name", "Tiny"]) == 0 and "name: Tiny\n" in capsys.readouterr().out
    assert fields_of(tmp_path / "new" / "out.gguf")["general.name"] == "Tiny"


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("where, level", [("a tensor", "bytes"), ("a key", "keys")])
def test_a_file_that_is_not_what_was_to_be_written(tmp_path, model_of, monkeypatch, where, level):
    write = GgufTarget.write

    def one_bit_wrong(self, folder):
        write(self, folder)
        content = bytearray((folder / "model.gguf").read_bytes())
        at = content.index(b"llama.context_length") + 24 if where == "a key" else len(content) - 100
        content[at] ^= 1
        (folder / "model.gguf").write_bytes(content)

    monkeypatch.setattr(GgufTarget, "write", one_bit_wrong)
    target = tmp_path / "out.gguf"
    target.write_bytes(b"old")
    with pytest.raises(MismatchError, match="values differ" if where == "a tensor" else "context_length"):
        to_gguf(model_of("llama"), target, overwrite=True, verify=level)
    assert target.read_bytes() == b"old" and left(tmp_path) == ["out.gguf"]


# Models that are refused

ROPE = {"factor": 2.0, "original_max_position_embeddings": 64}

REFUSED = {
    "another activation": ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    "exact gelu": ("gemma2", {"hidden_activation": "gelu", **GEMMA, "query_pre_attn_scalar": 8}, "hidden_act gelu"),
    "a head of Gemma's own": ("gemma", {"tie_word_embeddings": False, "head_dim": 8}, "a head of its own"),
    "biases in Gemma": ("gemma", {**GEMMA, "attention_bias": True}, "attention_bias"),
    "another scale": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 144}, "query_pre_attn_scalar 144"),
    "no cap": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None}, "softcapping null"),
    "another order": (
        "gemma2",
        {**GEMMA, "query_pre_attn_scalar": 8, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
    "a head size in Phi-3": ("phi3", {"head_dim": 16}, "head_dim 16"),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
    "llama3 in Qwen": ("qwen2", {"rope_scaling": LLAMA3}, "rope_type llama3"),
    "longrope in Llama": (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, **ROPE}},
        "rope_type longrope",
    ),
    "a factor of YaRN's": ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor 1.5"),
    "a ramp of YaRN's": ("qwen2", {"rope_scaling": {**YARN, "truncate": False}}, "truncate false"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_does_not_compute(tmp_path, case):
    family, fields, message = REFUSED[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = small_model(tmp_path / "source", "llama 3", family, **{"num_hidden_layers": 2, **fields})
        with pytest.raises(ConfigError, match=f"llama.cpp does not compute .*{message}"):
            to_gguf(source, tmp_path / "out.gguf", dry_run=True)


FIXTURES = [
    path
    for path in sorted((Path(__file__).parents[1] / "fixtures" / "configs").glob("*.json"))
    if read_json(path)["model_type"] in gguf_writer.FAMILIES
]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_every_released_model_is_computed(path):
    """Nothing is refused; a warning names the windows of Mistral 0.1 and Phi-3."""
    model = ARCHS[read_json(path)["model_type"]].from_config(read_json(path), device="meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gguf_writer.check(model, path.stem)
    windows = ("Mistral-7B-v0.1", "Phi-3-mini-4k-instruct", "Phi-3-medium-4k-instruct")
    assert any("window" in str(warning.message) for warning in caught) == (path.stem in windows)


LOSSES = {
    "llama": (), "gemma": ("as 1 + weight in fp32",), "gemma2": ("as 1 + weight in fp32",), "phi3": (),
    "phi3, long": ("by its context size",), "qwen2": ("ignores the NFC",),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_a_line_on_stderr(tmp_path, model_of, capsys, name):
    source = shutil.copytree(model_of(name), tmp_path / "source")
    if name == "qwen2":
        state = read_json(source / "tokenizer.json") | {"normalizer": {"type": "NFC"}}
        (source / "tokenizer.json").write_text(json.dumps(state))
    sampling = ({"temperature": 0.6, "top_k": 7}, ("temperature, top_k of generation_config.json",))
    for settings, named in (sampling, ({"eos_token_id": 2, "top_p": None}, ())):
        (source / "generation_config.json").write_text(json.dumps(settings))
        assert cli.main(["convert", str(source), str(tmp_path / "out.gguf"), "--to", "gguf", "--overwrite"]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
        assert len(lines) == len(LOSSES[name] + named)
        assert all(any(words in line for line in lines) for words in LOSSES[name] + named)


@pytest.mark.parametrize(
    "target, options, message",
    [
        ("out.gguf", {"verify": "logits"}, "run in llama.cpp"),
        ("out.gguf", {"max_shard_size": "1GB"}, "not for gguf"),
        ("", {}, r"give its name, such as .*model\.gguf"),
    ],
)
def test_options(tmp_path, model_of, target, options, message):
    with pytest.raises(InputError, match=message):
        to_gguf(model_of("llama"), tmp_path / target, **options)


def test_a_missing_package_and_an_unknown_family(tmp_path, model_of, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"pip install 'ligermodels\[gguf\]'"):
        patch.setitem(sys.modules, "gguf", None)
        to_gguf(model_of("llama"), tmp_path / "out.gguf")
    monkeypatch.delitem(gguf_writer.FAMILIES, "llama")
    with pytest.raises(ConfigError, match=r"is a llama, and GGUF files are written for mistral, .* alone"):
        to_gguf(model_of("llama"), tmp_path / "out.gguf")


def test_float64_is_cast_only_when_asked(tmp_path, model_of):
    source = shutil.copytree(model_of("llama", torch.float32), tmp_path / "source")
    content = load_file(source / "model.safetensors")
    save_file({name: x.double() for name, x in content.items()}, source / "model.safetensors")
    with pytest.raises(InputError, match="--dtype fp32"):
        to_gguf(source, tmp_path / "out.gguf")
    to_gguf(source, tmp_path / "out.gguf", dtype="fp32")
    assert all(x.dtype == torch.float32 for x in tensors_of(tmp_path / "out.gguf").values())


# llama.cpp itself

ASKED = """
import json, os, sys, urllib.request
from pathlib import Path
import torch
import xllamacpp
import ligermodels
from tests.conversion.test_gguf import TEXTS
folder, file, force = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.port = file, 256, 1, False, 0
params.use_jinja = params.fit_params = False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
def ask(path, **body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))
model, worst = ligermodels.load(folder, dtype="float32").eval(), 0.0
for length in json.loads(sys.argv[4]):
    ids = (torch.arange(length) * 37 % 300 + 10).tolist()
    # A token is forced, since no probabilities are told of one that is half a character; they are those before that.
    answer = ask("/completion", prompt=ids, n_predict=1, n_probs=200, temperature=-1, logit_bias=[[force, 1000.0]])
    told = answer["completion_probabilities"][0]["top_logprobs"]
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    worst = max(worst, *(abs(float(ours[token["id"]]) - token["logprob"]) for token in told))
tokenizer = ligermodels.Tokenizer.from_folder(folder)
cut = {text: ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"] for text in TEXTS}
print(json.dumps([worst, [text for text in TEXTS if cut[text] != tokenizer.encode(text)]]), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_llama_cpp_says(tmp_path, model_of, name):
    pytest.importorskip("xllamacpp")
    folder = model_of(name, torch.float32)
    to_gguf(folder, tmp_path / "out.gguf")
    force = Tokenizer.from_folder(folder).encode("the the", add_special_tokens=False)[-1]
    # The context of 256 is beyond the length up to which the short frequencies hold, whatever the text's own.
    lengths = [65, 100] if name == "phi3, long" else [1, 2, 7, 100]
    command = [sys.executable, "-c", ASKED, str(folder), str(tmp_path / "out.gguf"), str(force), str(lengths)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert found.returncode == 0, found.stderr
    worst, odd = json.loads(found.stdout.splitlines()[-1])
    assert worst < (5e-3 if name.startswith("gemma") else 1e-4)  # GELU is a table of fp16 there
    # Its tokenizer.json has no dummy prefix before a text that begins with a space, nor after a special token.
    assert odd == (["▁already▁there", "</s>the"] if name == "mistral" else []), odd
