"""config.json: what is read, refused and written, in every family, and files that do not fit the weights."""

import json
import warnings

import pytest
import transformers

import ligermodels
from ligermodels import CheckpointError, ConfigError
from ligermodels.arch import ARCHS
from ligermodels.arch.llama import LlamaConfig
from tests.checkpoint.fixtures import make_good, spoiled

GOOD = dict(vocab_size=97, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4)
OF_ALL = dict(num_key_value_heads=2, head_dim=8)
FULL, SLIDING = "full_attention", "sliding_attention"
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 4.0, 7.5]
SU = dict(type="su", short_factor=SHORT, long_factor=LONG)


REFUSED = {
    "llama": [
        (dict(model_type="qwen2"), "qwen2.*ligermodels.load"),
        (dict(quantization_config=dict(quant_method="gptq")), "gptq.*unquantised"),
        (dict(num_attention_heads=5, head_dim=None), "num_attention_heads=5 must divide hidden_size 32"),
        (dict(num_key_value_heads=3), "num_key_value_heads=3 must divide"),
        (dict(hidden_act="relu2"), "hidden_act='relu2' is not supported; supported: silu"),
        (dict(attention_dropout=0.1), "attention_dropout=0.1 is not supported"),
        (dict(dtype="float8_e4m3fn"), "float8_e4m3fn.*bfloat16"),
        (dict(dtype="bfloat16", torch_dtype="float16"), "dtype='bfloat16' and torch_dtype='float16'"),
        (dict(rope_scaling=dict(type="sideways")), "sideways.*llama3"),
        (dict(rope_theta=1e4, rope_parameters=dict(rope_theta=5e5)), "rope_theta twice"),
        (dict(rope_scaling=dict(type="linear")), "needs factor"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
        (dict(rope_interleaved=True), "rope_interleaved"),
        (dict(layer_types=[FULL, SLIDING]), "layer_types is .* every block is full_attention"),
    ],
    "mistral": [
        (dict(sliding_window=0), "sliding_window=0 must be a positive integer"),
        (dict(sliding_window=8, layer_types=[FULL, FULL]), "layer_types is .* every block is sliding_attention"),
    ],
    "gemma": [
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention=True.*causal"),
        (dict(hidden_activation="relu"), "hidden_activation='relu'.*gelu_pytorch_tanh"),
    ],
    "gemma2": [
        (dict(layer_types=[FULL]), "layer_types.*each of 2 blocks"),
        (dict(sliding_window=None), "there is no window"),
    ],
    "gemma3_text": [
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention=True.*causal"),
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0.*caps no scores"),
        (dict(rope_parameters=dict(rope_theta=1e6)), "expected an object by layer type: full_attention, sliding"),
        (dict(rope_local_base_freq=1e3, rope_parameters={SLIDING: dict(rope_theta=1e4)}), "rope_theta twice"),
    ],
    "qwen2": [
        (dict(layer_types=[FULL, SLIDING]), "there is no window"),
    ],
    "phi3": [
        (dict(rope_scaling=dict(type="linear", factor=2.0)), "'linear' is not supported; supported: default, longrope"),
        (dict(rope_scaling=dict(type="longrope", long_factor=LONG)), "lacks|needs short_factor"),
        (dict(rope_scaling={**SU, "long_factor": LONG[:3]}), "long_factor=.* must be a list of 4"),
        (dict(partial_rotary_factor=1.5), "rotate 12 dims"),
    ],
    "qwen2_vl": [
        (dict(vision_config=dict(hidden_size=32, hidden_act="relu")), "hidden_act='relu'.*quick_gelu"),
        (dict(rope_parameters=dict(mrope_section=[1, 1, 1])), r"mrope_section is \[1, 1, 1\].*together 4"),
        (dict(text_config={"model_type": "llama"}), "text_config.*qwen2_vl_text"),
    ],
    "mllama": [
        (dict(attention_bias=True), "attention_bias=True.*has none"),
        (dict(cross_attention_layers=[0, 1]), "leave one out"),
        (dict(cross_attention_layers=[1], vision_config=dict(hidden_act="silu")), "hidden_act='silu'.*quick_gelu"),
        (dict(vision_config=dict(vision_output_dim=768)), "vision_output_dim=768.*must be 7680"),
    ],
}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [(family, *case) for family, cases in REFUSED.items() for case in cases],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items())[:50] if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused(family, changes, words):
    if family == "qwen2_vl":
        changes = {"vision_config": dict(hidden_size=32), "rope_parameters": dict(mrope_section=[1, 1, 2]), **changes}
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        ARCHS[family].from_config({**GOOD, **OF_ALL, **changes}, device="meta")


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=f"lacks {field}"):
        LlamaConfig.from_hf({key: value for key, value in GOOD.items() if key != field})


def test_harmless_keys_are_kept_without_a_word():
    """Those that tools write, and whatever transformers' base classes do."""
    keys = {**transformers.GenerationConfig().to_dict(), **transformers.PretrainedConfig().to_dict()}
    keys = {key: 1 if value is None else value for key, value in keys.items() if key not in LlamaConfig.field_names()}
    keys |= {"auto_map": {"AutoModel": "x.Y"}, "model_type": "llama", "layer_types": [FULL, FULL]}
    keys |= {"unsloth_fixed": True, "torchscript": False, "is_llama_config": True, "rope_interleaved": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = LlamaConfig.from_hf({**GOOD, **keys}).to_hf()
    dropped = {"transformers_version", "architectures", "_name_or_path", "auto_map"}
    assert {key: value for key, value in keys.items() if saved.get(key) != value}.keys() <= dropped


def test_unknown_keys_are_named_once_kept_and_saved():
    with pytest.warns(UserWarning, match="attention_sink, zebra") as caught:
        config = LlamaConfig.from_hf({**GOOD, "zebra": 1, "attention_sink": True, "pretraining_tp": 1})
    assert len(caught) == 1
    assert config.to_hf()["zebra"] == 1 and config.to_hf()["pretraining_tp"] == 1


def test_ropes_by_layer_type_are_read_from_files_that_mix_the_generations():
    linear, default = {"rope_type": "linear", "factor": 8.0}, {"rope_type": "default"}
    expected = {FULL: {**linear, "rope_theta": 5e5}, SLIDING: {**default, "rope_theta": 2e4}}
    older = dict(rope_theta=5e5, rope_local_base_freq=2e4)
    for config in (
        dict(older, rope_scaling=linear),
        dict(older, rope_scaling=None, rope_parameters={FULL: linear, SLIDING: default}),
        dict(older, rope_parameters={FULL: {**linear, "rope_theta": 5e5}}),
        dict(rope_parameters=expected),
    ):
        read = ligermodels.Gemma3Config.from_hf({**GOOD, **config})
        assert read.rope_parameters == expected and "rope_local_base_freq" not in read.extra
        saved = read.to_hf()
        assert saved["rope_parameters"] == expected and {**saved, **older, "rope_scaling": linear} == saved
        theirs = transformers.AutoConfig.for_model(**saved)
        assert theirs.rope_parameters == expected
    assert "rope_scaling" not in ligermodels.Gemma3Config.from_hf(GOOD).to_hf()


def spoiled_config(**changes):
    def spoil(folder):
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **changes}))

    return spoil


def replaced(text, file="config.json"):
    return lambda folder: (folder / file).write_text(text)


FILES = {
    "cut": (replaced('{"model_type": "lla'), CheckpointError, "not JSON"),
    "git-lfs pointer": (replaced("version https://git-lfs.github.com/spec/v1\n"), CheckpointError, "git lfs"),
    "an unknown family": (spoiled_config(model_type="falcon"), ConfigError, "the zoo has"),
    "a model of images": (replaced('{"model_type": "llama", "text_config": {}}'), ConfigError, "text_config"),
    "an adapter's": (replaced('{"model_type": "llama", "peft_type": "LORA"}'), ConfigError, "of an adapter"),
    "not there": (lambda folder: (folder / "config.json").unlink(), CheckpointError, "is not there"),
    "tied, and the index names a head": (spoiled_config(tie_word_embeddings=True), CheckpointError, "config ties"),
    "another family's": (spoiled_config(model_type="gemma2", head_dim=8), CheckpointError, "missing"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_good(tmp_path_factory.mktemp("good"))["sharded"]


@pytest.mark.parametrize(("spoil", "error", "words"), FILES.values(), ids=FILES)
def test_files_that_do_not_fit_end_in_a_typed_error(good, spoil, error, words):
    with spoiled(good, spoil) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=f"(?s){words}"):
            ligermodels.load(folder, progress=False)


def test_no_code_of_a_checkpoint_runs(good, tmp_path, monkeypatch):
    marker = tmp_path / "ran"

    def spoil(folder):
        for name in ("modeling_llama", "configuration_llama", "sitecustomize"):
            (folder / f"{name}.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
        calls = {"AutoModelForCausalLM": "evil/repo--modeling_llama.Model"}
        spoiled_config(auto_map=calls, architectures=["Model"])(folder)

    with spoiled(good, spoil) as folder:
        monkeypatch.chdir(folder)
        model = ligermodels.load(folder, progress=False)
        assert type(model) is ligermodels.Llama and not marker.exists()
        saved = json.loads((model.save_pretrained(tmp_path / "out") / "config.json").read_text())
        assert "auto_map" not in saved and saved["architectures"] == ["LlamaForCausalLM"]


def test_unusual_but_sound_configs_load(good):
    """A byte order mark, and token ids that no text will have."""
    for spoil in (
        lambda folder: (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes()),
        spoiled_config(eos_token_id=[2, 99], pad_token_id=-1),
        replaced('{"eos_token_id": -1}', "generation_config.json"),
    ):
        with spoiled(good, spoil) as folder:
            assert ligermodels.load(folder, progress=False).config.hidden_size == 16
