"""config.json and generation_config.json, bad in every way by name, for every family: each ends in a typed error."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import ligermodels
from ligermodels.arch import config as arch_config
from ligermodels.errors import CheckpointError, ConfigError
from tests.hostile.folders import INDEX, NORM, SHARDS, limited, make_good, spoiled
from tests.hostile.fuzz_configs import Fuzz, make_families

NAN, INF = float("nan"), float("inf")
FACTORS = [1.0] * 4  # one for each pair of a head's eight dims


def rope(**values: object) -> dict:
    """A rope dict in the older spelling, and nothing else that speaks of it."""
    return {"rope_parameters": None, "rope_theta": None, "rope_scaling": values}


def nested(depth: int) -> list:
    tree: list = []
    for _ in range(depth):
        tree = [tree]
    return tree


# Family -> name -> (what changes in config.json, words of the ConfigError); as a file and as a dict alike.
CHANGES: dict[str, dict[str, tuple[dict, str]]] = {
    "llama": {
        "vocab_size a list": (dict(vocab_size=[32]), "positive integer"),
        "vocab_size an object": (dict(vocab_size={"text": 32}), "positive integer"),
        "vocab_size null": (dict(vocab_size=None), "must be int"),
        "vocab_size infinite": (dict(vocab_size=INF), "positive integer"),
        "vocab_size 2^28 + 1": (dict(vocab_size=2**28 + 1), "too large"),
        "hidden_size NaN": (dict(hidden_size=NAN), "finite number"),
        "hidden_size negative": (dict(hidden_size=-16), "positive integer"),
        "intermediate_size zero": (dict(intermediate_size=0), "positive integer"),
        "intermediate_size a whole float": (dict(intermediate_size=24.0), "positive integer"),
        "layers true": (dict(num_hidden_layers=True), "positive integer"),
        "layers 2^10 + 1": (dict(num_hidden_layers=2**10 + 1), "too large"),
        "heads a string": (dict(num_attention_heads="2"), "positive integer"),
        "heads 2^63": (dict(num_attention_heads=2**63), "too large"),
        "heads that do not divide the width": (
            dict(num_attention_heads=3, num_key_value_heads=3, head_dim=None), "divide hidden_size"),
        "key heads more than heads": (dict(num_key_value_heads=4), "must divide"),
        "key heads zero": (dict(num_key_value_heads=0), "positive integer"),
        "head_dim odd by division": (
            dict(hidden_size=10, num_attention_heads=2, num_key_value_heads=1, head_dim=None), "must be even"),
        "head_dim an object": (dict(head_dim={}), "positive integer"),
        "max_position_embeddings 1e6": (dict(max_position_embeddings=1e6), "positive integer"),
        "max_position_embeddings 2^60": (dict(max_position_embeddings=2**60), "too large"),
        "rms_norm_eps negative": (dict(rms_norm_eps=-1e-5), "zero or more"),
        "rms_norm_eps infinite": (dict(rms_norm_eps=INF), "finite number"),
        "rms_norm_eps 100": (dict(rms_norm_eps=100), "at most 1"),
        "rms_norm_eps below fp32": (dict(rms_norm_eps=1e-300), "too small"),
        "rms_norm_eps true": (dict(rms_norm_eps=True), "finite number"),
        "initializer_range a list": (dict(initializer_range=[0.02]), "finite number"),
        "initializer_range -inf": (dict(initializer_range=-INF), "finite number"),
        "hidden_act null": (dict(hidden_act=None), "must be str"),
        "hidden_act a list": (dict(hidden_act=["silu"]), "must be str"),
        "hidden_act of a megabyte": (dict(hidden_act="x" * 10**6), "not supported"),
        "tie_word_embeddings 1": (dict(tie_word_embeddings=1), "must be bool"),
        "tie_word_embeddings a string": (dict(tie_word_embeddings="false"), "must be bool"),
        "use_cache a string": (dict(use_cache="yes"), "must be bool"),
        "mlp_bias 0": (dict(mlp_bias=0), "must be bool"),
        "attention_dropout NaN": (dict(attention_dropout=NAN), "finite number"),
        "bos_token_id a list": (dict(bos_token_id=[1]), "int or null"),
        "pad_token_id a string": (dict(pad_token_id="<pad>"), "int or null"),
        "pad_token_id true": (dict(pad_token_id=True), "int or null"),
        "eos_token_id 2^63": (dict(eos_token_id=2**63), "of them ids"),
        "eos_token_id lists of lists": (dict(eos_token_id=[[1], [2]]), "of them ids"),
        "eos_token_id an object": (dict(eos_token_id={"id": 1}), "int or list"),
        "eos_token_id 1.5": (dict(eos_token_id=1.5), "int or list"),
        "dtype a list": (dict(dtype=["float32"], torch_dtype=None), "must be str"),
        "dtype int8": (dict(dtype="int8", torch_dtype=None), "not supported"),
        "dtype a word": (dict(dtype="half", torch_dtype=None), "not supported"),
        "dtype with a prefix twice": (dict(dtype="torch.torch.float32"), "has dtype|not supported"),
        "both dtypes, at odds": (dict(dtype="float32", torch_dtype="torch.bfloat16"), "remove the"),
        "quantization_config of fp8": (dict(quantization_config={"quant_method": "fp8"}), "unquantised checkpoint"),
        "quantization_config a list": (dict(quantization_config=[1]), "unquantised checkpoint"),
        "quantization_config true": (dict(quantization_config=True), "unquantised checkpoint"),
        "quantization_config huge": (dict(quantization_config={"quant_method": ["x" * 10**6]}), "unquantised"),
        "nested 33 deep": (dict(extra=nested(33)), "more than 32 deep"),
        "nested 300 deep": (dict(extra=nested(300)), "more than 32 deep"),
        "a NaN far inside": (dict(extra=[{"scale": NAN}]), "scale=nan"),
        "a key that clears the screen": ({"\x1b[2J": 1}, "do not trust"),
        "a key of 10,000 letters": ({"x" * 10_000: 1}, "do not trust"),
        "an empty key": ({"": 1}, "do not trust"),
        "a key with a line end": ({"a\nb": 1}, "do not trust"),
        "a lone surrogate as a key": ({"\udfff": 1}, "lone surrogate"),
        "a model_type in capitals": (dict(model_type="LLAMA"), "model_type 'LLAMA'"),
        "a model_type null": (dict(model_type=None), "model_type None"),
        "rope_theta one": ({**rope(), "rope_scaling": None, "rope_theta": 1.0}, "above 1"),
        "rope_theta zero": ({**rope(), "rope_scaling": None, "rope_theta": 0}, "positive number"),
        "rope_theta a list": ({**rope(), "rope_scaling": None, "rope_theta": [1e4]}, "positive number"),
        "rope_theta true": ({**rope(), "rope_scaling": None, "rope_theta": True}, "positive number"),
        "rope_theta infinite": ({**rope(), "rope_scaling": None, "rope_theta": INF}, "positive number"),
        "rope_theta 1e300": ({**rope(), "rope_scaling": None, "rope_theta": 1e300}, "computed with"),
        "rope a string": ({**rope(), "rope_scaling": "linear"}, "expected an object"),
        "rope an empty list": ({**rope(), "rope_scaling": []}, "expected an object"),
        "rope false": ({**rope(), "rope_parameters": False}, "expected an object"),
        "rope in both spellings, at odds": (
            {"rope_scaling": {"type": "linear", "factor": 2.0},
             "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type twice"),
        "rope_theta in both spellings, at odds": (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta twice"),
        "rope of no name": (rope(type="", factor=2.0), "expected a string"),
        "rope of a number": (rope(rope_type=3, factor=2.0), "expected a string"),
        "rope in capitals": (rope(type="LINEAR", factor=2.0), "'LINEAR' is not"),
        "rope of a megabyte": (rope(type="x" * 10**6, factor=2.0), "not supported"),
        "rope of Qwen2-VL": (rope(type="mrope", mrope_section=[1, 1, 2]), "'mrope' is not"),
        "rope by layer type": (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_scaling": None,
             "rope_theta": None}, "full_attention of"),
        "linear without a factor": (rope(type="linear"), "needs factor"),
        "linear by zero": (rope(type="linear", factor=0), "positive number"),
        "linear by a string": (rope(type="linear", factor="2"), "positive number"),
        "linear by NaN": (rope(type="linear", factor=NAN), "finite number"),
        "linear by infinity": (rope(type="linear", factor=INF), "computed with"),
        "linear by a list": (rope(type="linear", factor=[2.0]), "positive number"),
        "linear by 10^400": (rope(type="linear", factor=10**400), "computed with"),
        "dynamic by a negative": (rope(type="dynamic", factor=-2.0), "positive number"),
        "dynamic of two dims": (
            {**rope(type="dynamic", factor=2.0), "head_dim": 2}, "4 or more"),
        "a key that its type has not": (rope(type="linear", factor=2.0, low_freq_factor=1.0), "no low_freq_factor"),
        "a rope of 10,000 keys": (rope(type="linear", factor=2.0, **{f"k{i}": 1 for i in range(10**4)}), "has 10002"),
        "a rope key with an escape": (rope(type="linear", factor=2.0, **{"\x1b]0;x\x07": 1}), "do not trust"),
        "llama3 with nothing": (rope(rope_type="llama3"), "needs factor"),
        "llama3 upside down": (
            rope(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0), "must be below"),
        "llama3 of a negative length": (
            rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                 original_max_position_embeddings=-1), "positive number"),
        "yarn cut by a number": (rope(rope_type="yarn", factor=2.0, truncate=3), "true or"),
        "yarn scaled by nothing": (rope(rope_type="yarn", factor=2.0, attention_factor=0), "positive number"),
        "yarn with a word for a number": (
            rope(rope_type="yarn", factor=2.0, mscale="x", mscale_all_dim=1), "must be a number"),
        "partial rotation": (rope(type="linear", factor=2.0, partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        "partial rotation true": (rope(type="linear", factor=2.0, partial_rotary_factor=True), "not supported"),
    },
    "mistral": {
        "window zero": (dict(sliding_window=0), "positive number"),
        "window negative": (dict(sliding_window=-1), "positive number"),
        "window true": (dict(sliding_window=True), "positive number"),
        "window 1.5": (dict(sliding_window=1.5), "positive number"),
        "window a string": (dict(sliding_window="4096"), "positive number"),
        "window 10^400": (dict(sliding_window=10**400), "at most 2.48"),
        "key heads by default, of few heads": (dict(num_key_value_heads=8), "must divide"),
    },
    "mixtral": {
        "experts zero": (dict(num_local_experts=0), "positive integer"),
        "experts a string": (dict(num_local_experts="8"), "positive integer"),
        "experts 2^12 + 1": (dict(num_local_experts=2**12 + 1), "too large"),
        "experts times layers": (dict(num_local_experts=2**12, num_hidden_layers=2**10), "too many"),
        "more experts a token than there are": (dict(num_experts_per_tok=3), "at most num_local_experts"),
        "experts a token null": (dict(num_experts_per_tok=None), "must be int"),
        "jitter one": (dict(router_jitter_noise=1.0), "below 1"),
        "jitter NaN": (dict(router_jitter_noise=NAN), "finite number"),
        "aux loss infinite": (dict(router_aux_loss_coef=INF), "finite number"),
        "router logits 1": (dict(output_router_logits=1), "must be bool"),
    },
    "gemma": {
        "hidden_activation unknown": (dict(hidden_activation="relu"), "not supported"),
        "hidden_activation a list": (dict(hidden_activation=["gelu"]), "str or null"),
        "hidden_act unknown": (dict(hidden_act="relu6"), "not supported"),
        "bidirectional": (dict(use_bidirectional_attention=True), "causal language model"),
        "bidirectional by a word": (dict(use_bidirectional_attention="all"), "bool or null"),
        "head_dim odd": (dict(head_dim=7), "must be even"),
        "tie_word_embeddings null": (dict(tie_word_embeddings=None), "must be bool"),
    },
    "gemma2": {
        "layer_types too short": (dict(layer_types=[]), "for each"),
        "layer_types too long": (dict(layer_types=["full_attention"] * 2), "for each"),
        "layer_types endless": (dict(layer_types=["full_attention"] * 10**5), "for each"),
        "layer_types of other words": (dict(layer_types=["chunked_attention"]), "must name"),
        "layer_types of numbers": (dict(layer_types=[1]), "must name"),
        "layer_types of lists": (dict(layer_types=[["full_attention"]]), "must name"),
        "layer_types a string": (dict(layer_types="full_attention"), "must be list"),
        "layers that slide without a window": (dict(sliding_window=None), "without a window"),
        "scale zero": (dict(query_pre_attn_scalar=0), "must be positive"),
        "scale below fp32": (dict(query_pre_attn_scalar=1e-320), "too small"),
        "scale null": (dict(query_pre_attn_scalar=None), "must be float"),
        "softcap zero": (dict(attn_logit_softcapping=0.0), "must be positive"),
        "softcap infinite": (dict(final_logit_softcapping=INF), "finite number"),
        "softcap true": (dict(final_logit_softcapping=True), "finite number"),
        "softcap a string": (dict(attn_logit_softcapping="50"), "finite number"),
    },
    "qwen2": {
        "layers that slide, and no window": (dict(layer_types=["sliding_attention"]), "no window"),
        "layer_types of the wrong length": (dict(layer_types=["full_attention"] * 3), "for each"),
        "window zero, in use": (dict(use_sliding_window=True, sliding_window=0), "positive number"),
        "use_sliding_window a number": (dict(use_sliding_window=1), "must be bool"),
        "max_window_layers negative": (dict(max_window_layers=-1), "zero or more"),
        "max_window_layers 2^60": (dict(max_window_layers=2**60), "too large"),
        "attention_dropout in use": (dict(attention_dropout=0.5), "not supported"),
    },
    "phi3": {
        "rope of another family": (rope(type="linear", factor=2.0), "default, longrope"),
        "longrope without the long": (rope(type="longrope", short_factor=FACTORS), "needs long_factor"),
        "longrope without the long, endless": (rope(type="su", short_factor=[1.0] * 10**4), "read are at most"),
        "longrope of a wrong length": (
            rope(type="su", short_factor=FACTORS, long_factor=FACTORS[1:]), "list of 4"),
        "longrope of zeros": (rope(type="longrope", short_factor=FACTORS, long_factor=[0.0] * 4), "list of 4"),
        "longrope of nulls": (rope(type="longrope", short_factor=FACTORS, long_factor=[None] * 4), "no number"),
        "longrope of lists": (rope(type="longrope", short_factor=[FACTORS] * 4, long_factor=FACTORS), "no number"),
        "longrope of true": (rope(type="longrope", short_factor=[True] * 4, long_factor=FACTORS), "list of 4"),
        "longrope a string": (rope(type="longrope", short_factor="1.0", long_factor=FACTORS), "list of 4"),
        "longrope a long string": (rope(type="longrope", short_factor="1" * 10**6, long_factor=FACTORS), "no number"),
        "an original length of one": (
            {**rope(type="longrope", short_factor=FACTORS, long_factor=FACTORS),
             "original_max_position_embeddings": 1}, "above 1"),
        "an original length NaN": (dict(original_max_position_embeddings=NAN), "finite number"),
        "two original lengths": (
            rope(type="longrope", short_factor=FACTORS, long_factor=FACTORS, original_max_position_embeddings=32),
            "top level"),
        "rotation of nothing": ({"partial_rotary_factor": 0.0, **rope()}, "above 0"),
        "rotation of too little": ({"partial_rotary_factor": 0.1, **rope()}, "rotate 0"),
        "rotation of an odd number": ({"partial_rotary_factor": 0.4, **rope()}, "rotate 3"),
        "rotation of more than all": ({"partial_rotary_factor": 1.5, **rope()}, "at most 1"),
        "rotation by a word": ({"partial_rotary_factor": "half", **rope()}, "above 0"),
        "dropout in use": (dict(resid_pdrop=0.1), "not supported"),
    },
}  # fmt: skip
CHANGED = {f"{family}: {name}": (family, *case) for family, cases in CHANGES.items() for name, case in cases.items()}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """{family: the folder of a tiny checkpoint}, each loaded once, so that what is imported late is there."""
    folders = make_families(tmp_path_factory.mktemp("families"))
    for folder in folders.values():
        ligermodels.load(folder, progress=False)
    return folders


def change(folder: Path, changes: dict, file: str = "config.json") -> dict:
    values = {**json.loads((folder / file).read_text()), **changes}
    (folder / file).write_text(json.dumps(values))
    return values


@pytest.mark.parametrize("name", list(CHANGED))
def test_a_bad_config_ends_in_a_typed_error(families, name):
    """Whether it comes from a file or as a dict, within the limits, in few words."""
    family, changes, words = CHANGED[name]
    with spoiled(families[family], lambda folder: change(folder, changes)) as folder:
        values = json.loads((folder / "config.json").read_text())
        for build in (
            lambda: ligermodels.load(folder, progress=False),
            lambda: ligermodels.arch.ARCHS[family].from_config(values, device="cpu"),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with limited(folder), pytest.raises(ConfigError, match=f"(?s){words}") as caught:
                    build()
            assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "gemma", "gemma2", "qwen2", "phi3"])
def test_a_config_that_lacks_a_field(families, family):
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        values = json.loads((families[family] / "config.json").read_text())
        del values[field]
        lacking = spoiled(families[family], lambda f, v=values: (f / "config.json").write_text(json.dumps(v)))
        refused = pytest.raises(ConfigError, match=f"{family}: config.json lacks {field}")
        with lacking as folder, limited(folder), refused:
            ligermodels.load(folder, progress=False)


Spoil = Callable[[Path], object]


def text(edit: Callable[[str], str | bytes], file: str = "config.json") -> Spoil:
    """`file` after an edit of its text."""

    def spoil(folder: Path) -> None:
        edited = edit((folder / file).read_text() if (folder / file).exists() else "{}")
        (folder / file).write_bytes(edited if isinstance(edited, bytes) else edited.encode())

    return spoil


def add(member: str) -> Spoil:
    """config.json with one more member, as it stands."""
    return text(lambda t: t.rstrip().removesuffix("}").rstrip() + f",\n{member}}}")


FILES: dict[str, tuple[Spoil, type, str]] = {
    "empty": (text(lambda t: ""), CheckpointError, "not JSON"),
    "white space": (text(lambda t: " \n\t"), CheckpointError, "not JSON"),
    "zeros": (text(lambda t: bytes(4096)), CheckpointError, "not JSON"),
    "every byte": (text(lambda t: bytes(range(256)) * 9), CheckpointError, "not JSON"),
    "Latin-1": (text(lambda t: (t.rstrip()[:-1] + ', "x": "\xe9"}').encode("latin-1")), CheckpointError, "not JSON"),
    "cut in half": (text(lambda t: t[: len(t) // 2]), CheckpointError, "not JSON"),
    "without its last bracket": (text(lambda t: t.rstrip()[:-1]), CheckpointError, "not JSON"),
    "twice over": (text(lambda t: t + t), CheckpointError, "not JSON"),
    "a list of it": (text(lambda t: f"[{t}]"), CheckpointError, "an object"),
    "a string": (text(lambda t: '"llama"'), CheckpointError, "an object"),
    "null": (text(lambda t: "null"), CheckpointError, "an object"),
    "YAML": (text(lambda t: "model_type: llama\nvocab_size: 32\n"), CheckpointError, "not JSON"),
    "Python": (text(lambda t: repr(json.loads(t))), CheckpointError, "not JSON"),
    "with a comment": (text(lambda t: "// model\n" + t), CheckpointError, "not JSON"),
    "git-lfs pointer": (text(lambda t: "version https://git-lfs.github.com/spec/v1\n"), CheckpointError, "git lfs"),
    "HTML page": (text(lambda t: "<!DOCTYPE html><html>"), CheckpointError, "HTML page"),
    "lists 10,000 deep": (add('"x": ' + "[" * 10_000 + "]" * 10_000), CheckpointError, "not JSON"),
    "objects 10,000 deep": (add('"x": ' + '{"x":' * 10_000 + "1" + "}" * 10_000), CheckpointError, "not JSON"),
    "a number of 5000 digits": (add('"x": ' + "9" * 5000), CheckpointError, "not JSON"),
    "a million keys": (add(",".join(f'"k{i}": 1' for i in range(10**6))), CheckpointError, "too large"),
    "a string of 30 MB": (add(f'"x": "{"y" * 30 * 2**20}"'), CheckpointError, "too large"),
    "1e999 for a number": (add('"rms_norm_eps": 1e999'), ConfigError, "finite number"),
    "NaN for a number": (add('"rms_norm_eps": NaN'), ConfigError, "finite number"),
    "escaped surrogate": (add('"x": "\\ud83d"'), ConfigError, "lone surrogate"),
    "an unknown family": (lambda f: change(f, {"model_type": "falcon"}), ConfigError, "the zoo"),
    "an unknown family with code of its own": (
        lambda f: change(f, {"model_type": "x", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}),
        ConfigError, "the zoo"),
    "a model of images": (
        lambda f: (f / "config.json").write_text(
            json.dumps({"model_type": "llama", "text_config": {"hidden_size": 16}, "vision_config": {}})),
        ConfigError, "text_config"),
    "an adapter's": (
        lambda f: (f / "config.json").write_text(json.dumps({"model_type": "llama", "peft_type": "LORA"})),
        ConfigError, "adapter or"),
    "a tokenizer's": (
        lambda f: (f / "config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"})),
        ConfigError, "model_type None"),
    "no family": (lambda f: (f / "config.json").write_text("{}"), ConfigError, "model_type None"),
}  # fmt: skip

GENERATION = "generation_config.json"
GENERATIONS: dict[str, tuple[Spoil, type, str]] = {
    "empty": (text(lambda t: "", GENERATION), CheckpointError, "not JSON"),
    "a list": (text(lambda t: "[]", GENERATION), CheckpointError, "an object"),
    "cut": (text(lambda t: '{"eos_token_id": [1', GENERATION), CheckpointError, "not JSON"),
    "binary": (text(lambda t: b"\xff\xfe\0", GENERATION), CheckpointError, "not JSON"),
    "UTF-16": (text(lambda t: "{}".encode("utf-16"), GENERATION), CheckpointError, "not JSON"),
    "with a byte order mark": (text(lambda t: b"\xef\xbb\xbf{}", GENERATION), CheckpointError, "not JSON"),
    "nested 10,000 deep": (text(lambda t: '{"x": ' + "[" * 10_000, GENERATION), CheckpointError, "not JSON"),
    "git-lfs pointer": (
        text(lambda t: "version https://git-lfs.github.com/spec/v1\n", GENERATION), CheckpointError, "git lfs"),
}  # fmt: skip

# What stands in generation_config.json -> words of the ConfigError.
BAD_GENERATION: dict[str, tuple[dict, str]] = {
    "eos a string": (dict(eos_token_id="</s>"), "eos_token_id='</s>' must"),
    "eos a float": (dict(eos_token_id=1.5), "list of ids"),
    "eos NaN": (dict(eos_token_id=NAN), "finite number"),
    "eos true": (dict(eos_token_id=True), "list of ids"),
    "eos 2^63": (dict(eos_token_id=2**63), "list of ids"),
    "eos an object": (dict(eos_token_id={"id": 1}), "list of ids"),
    "eos with a string": (dict(eos_token_id=[1, "2"]), "list of ids"),
    "eos lists in a list": (dict(eos_token_id=[[1]]), "list of ids"),
    "pad a list": (dict(pad_token_id=[0]), "a token id"),
    "pad a string": (dict(pad_token_id="<pad>"), "a token id"),
    "bos a float": (dict(bos_token_id=1.0), "a token id"),
    "nested 90 deep": (dict(x=nested(90)), "32 deep"),
    "a lone surrogate": (dict(x="\udc00"), "lone surrogate"),
    "a key with an escape": ({"\x1b[2J": 1}, "do not trust"),
}

COMBINED: dict[str, tuple[Spoil, type, str]] = {
    "a vocabulary of 2^28, which the shards have not": (
        lambda f: change(f, {"vocab_size": 2**28}), CheckpointError, "wrong shape"),
    "1024 layers, of which the shards have one": (
        lambda f: change(f, {"num_hidden_layers": 2**10}), CheckpointError, "1 layers on disk"),
    "a head of 65,536 dims": (lambda f: change(f, {"head_dim": 2**16}), CheckpointError, "wrong shape"),
    "tied, and the index names a head": (
        lambda f: change(f, {"tie_word_embeddings": True}), CheckpointError, "config ties"),
    "another family's, and shards of this one": (
        lambda f: change(f, {"model_type": "gemma2", "head_dim": 8}), CheckpointError, "missing"),
    "a mixture's, and shards of one expert": (
        lambda f: change(f, {"model_type": "mixtral", "num_local_experts": 2}), CheckpointError, "missing"),
    "biases that the shards have not": (
        lambda f: change(f, {"attention_bias": True}), CheckpointError, "missing.*q_proj.bias"),
    "no config.json, and an index": (lambda f: (f / "config.json").unlink(), CheckpointError, "is not there"),
    "an index in its place": (
        lambda f: (f / "config.json").write_bytes((f / INDEX).read_bytes()), ConfigError, "model_type None"),
    "it in the index's place": (
        lambda f: (f / INDEX).write_bytes((f / "config.json").read_bytes()), CheckpointError, "no weight_map"),
    "an index that names it": (
        text(lambda t: json.dumps({"weight_map": {NORM: "config.json"}}), INDEX), CheckpointError, "names 'config"),
    "an index without one shard, and a config for it": (
        text(lambda t: json.dumps(
            {"weight_map": {k: v for k, v in json.loads(t)["weight_map"].items() if v == SHARDS[0]}}), INDEX),
        CheckpointError, "missing"),
}  # fmt: skip
SPOILED = {
    **{f"file: {name}": ("single", *case) for name, case in FILES.items()},
    **{f"generation: {name}": ("single", *case) for name, case in GENERATIONS.items()},
    **{
        f"generation: {name}": (
            "single",
            lambda f, values=values: (f / GENERATION).write_text(json.dumps(values)),
            ConfigError,
            f"{GENERATION}.*{words}",
        )
        for name, (values, words) in BAD_GENERATION.items()
    },
    **{f"combined: {name}": ("sharded", *case) for name, case in COMBINED.items()},
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folders = make_good(tmp_path_factory.mktemp("good"))
    ligermodels.load(folders["single"], progress=False)
    return folders


@pytest.mark.parametrize("name", list(SPOILED))
def test_bad_files_and_combinations_end_in_a_typed_error(good, name):
    layout, spoil, error, words = SPOILED[name]
    with spoiled(good[layout], spoil) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with limited(folder), pytest.raises(error, match=f"(?s){words}") as caught:
            ligermodels.load(folder, progress=False)
        assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("model_type", [["llama"], {"name": "llama"}, 3, True, "x" * 10**6, "\x1b[2J"])
def test_a_model_type_that_is_no_word(good, model_type):
    with spoiled(good["single"], lambda f: change(f, {"model_type": model_type})) as folder:
        with limited(folder), pytest.raises(ConfigError, match="the zoo holds llama") as caught:
            ligermodels.load(folder, progress=False)
        assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_demands_for_code_are_not_met(families, tmp_path, monkeypatch):
    """auto_map, trust_remote_code and a module beside the weights: the model is built from this package's own code."""
    marker = tmp_path / "ran"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\nclass Model: pass\n"

    def spoil(folder: Path) -> None:
        for name in ("modeling_llama", "configuration_llama", "__init__", "ligermodels", "sitecustomize"):
            (folder / f"{name}.py").write_text(code)
        calls = {"AutoConfig": "configuration_llama.Config", "AutoModelForCausalLM": "evil/repo--modeling_llama.Model"}
        change(folder, {"auto_map": calls, "trust_remote_code": True, "architectures": ["Model"],
                        "custom_pipelines": {"x": {"impl": "modeling_llama.Model"}}})  # fmt: skip

    with spoiled(families["llama"], spoil) as folder:
        monkeypatch.chdir(folder)
        with pytest.warns(UserWarning, match="custom_pipelines, trust_remote_code"):
            model = ligermodels.load(folder, progress=False)
        assert type(model) is ligermodels.Llama and not marker.exists()
        saved = json.loads((model.save_pretrained(tmp_path / "out") / "config.json").read_text())
        assert "auto_map" not in saved and saved["architectures"] == ["LlamaForCausalLM"]
        assert not list((tmp_path / "out").glob("*.py"))


def test_odd_but_sound_configs_load(families):
    """What is unusual and has one meaning: other encodings of JSON, extra keys, ids that no text will have."""
    odd: dict[str, Spoil] = {
        "UTF-8 with a byte order mark": text(lambda t: b"\xef\xbb\xbf" + t.encode()),
        "UTF-16": text(lambda t: t.encode("utf-16")),
        "UTF-32": text(lambda t: t.encode("utf-32")),
        "21 MB of white space": text(lambda t: t + " " * 21 * 2**20),
        "190,000 keys": add(",".join(f'"k{i}": 1' for i in range(190_000))),
        "a string of 20 MB": add(f'"x": "{"y" * 20 * 2**20}"'),
        "an empty quantization_config": add('"quantization_config": {}'),
        "eos outside the vocabulary": add('"eos_token_id": [2, 99]'),
        "-1 for no eos and no pad": add('"eos_token_id": -1, "pad_token_id": -1'),
        "a list without eos": add('"eos_token_id": []'),
        "infinity where nothing is computed": add('"time_step_limit": [0.0, Infinity]'),
    }
    expected = ligermodels.load(families["llama"], progress=False).config
    for name, spoil in odd.items():
        with spoiled(families["llama"], spoil) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with limited(folder):
                config = ligermodels.load(folder, progress=False).config
        assert config.hidden_size == expected.hidden_size and config.rope_parameters == expected.rope_parameters, name


def test_the_largest_config_that_is_read_fits_into_the_limits(families):
    """A file of a few bytes may ask for 8,192 experts of absurd size: refused by what lies on disk, in time."""
    sizes = dict(num_local_experts=2**6, num_hidden_layers=2**7, hidden_size=2**20, intermediate_size=2**20,
                 vocab_size=2**28, num_attention_heads=2**10, head_dim=2**10, num_key_value_heads=2**10)  # fmt: skip
    huge = spoiled(families["mixtral"], lambda folder: change(folder, sizes))
    with huge as folder, limited(folder), pytest.raises(CheckpointError, match="does not match Mixtral"):
        ligermodels.load(folder, progress=False)


def test_mutated_configs(tmp_path):
    fuzz = Fuzz(tmp_path)
    for target in fuzz.targets(300, derandomize=True):
        target()
    for kind, counts in fuzz.counts.items():
        assert counts["loaded"] > 0 and counts["ConfigError"] > 0, (kind, counts)
    assert sum(counts.total() for counts in fuzz.counts.values()) > 240


def test_an_uncaught_error_is_found(tmp_path, monkeypatch):
    """The fuzzer's own control: a reader that trips over odd configs is told."""
    fuzz = Fuzz(tmp_path)
    monkeypatch.setattr(arch_config, "short", lambda value: {}["missing"])
    with pytest.raises(KeyError):
        fuzz.targets(200, derandomize=True)[0]()
