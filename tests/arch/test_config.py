"""config.json: what is read, what is refused, what is written."""

import json
import warnings

import pytest

from ligermodels import ConfigError
from ligermodels.arch.llama import LlamaConfig

GOOD = dict(
    model_type="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=4,
)


def test_defaults_are_those_of_transformers():
    config = LlamaConfig.from_hf(GOOD)
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert config.max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (dict(rope_theta=5e5), dict(rope_type="default", rope_theta=5e5)),
        (dict(rope_theta=5e5, rope_scaling=None), dict(rope_type="default", rope_theta=5e5)),
        (
            dict(rope_scaling=dict(type="linear", factor=2.0)),
            dict(rope_type="linear", rope_theta=1e4, factor=2.0),
        ),
        (
            dict(rope_parameters=dict(rope_type="linear", type="linear", rope_theta=7.0, factor=2.0)),
            dict(rope_type="linear", rope_theta=7.0, factor=2.0),
        ),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=2.0), max_position_embeddings=64),
            dict(rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=64),
        ),
        (
            dict(rope_theta=5.0, rope_parameters=dict(rope_type="default", rope_theta=5.0)),
            dict(rope_type="default", rope_theta=5.0),
        ),
    ],
)
def test_rotary_parameters_of_either_generation(rope, expected):
    config = LlamaConfig.from_hf({**GOOD, **rope})
    assert config.rope_parameters == expected
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(model_type="qwen2"), ["qwen2", "ligermodels.load"]),
        (dict(quantization_config=dict(quant_method="gptq")), ["gptq", "unquantised"]),
        (dict(hidden_size="32"), ["hidden_size='32'", "positive integer"]),
        (dict(hidden_size=True), ["hidden_size=True", "positive integer"]),
        (dict(num_hidden_layers=0), ["num_hidden_layers=0", "positive"]),
        (dict(num_hidden_layers=-3), ["num_hidden_layers=-3", "positive"]),
        (dict(vocab_size=97.5), ["vocab_size", "integer"]),
        (dict(rms_norm_eps=float("nan")), ["rms_norm_eps", "finite"]),
        (dict(rms_norm_eps="1e-5"), ["rms_norm_eps", "number"]),
        (dict(num_attention_heads=5), ["num_attention_heads=5", "hidden_size 32"]),
        (dict(num_key_value_heads=3), ["num_key_value_heads=3", "divide"]),
        (dict(head_dim=7), ["head_dim=7", "even"]),
        (dict(hidden_act="relu2"), ["relu2", "silu"]),
        (dict(attention_dropout=0.1), ["attention_dropout=0.1", "not supported"]),
        (dict(attention_bias="yes"), ["attention_bias", "bool"]),
        (dict(tie_word_embeddings=None), ["tie_word_embeddings", "bool"]),
        (dict(eos_token_id="</s>"), ["eos_token_id", "int or list"]),
        (dict(dtype="float8_e4m3fn"), ["float8_e4m3fn", "bfloat16"]),
        (dict(dtype="bfloat16", torch_dtype="float16"), ["dtype", "torch_dtype"]),
        (dict(rope_scaling=dict(type="sideways")), ["sideways", "llama3"]),
        (dict(rope_scaling=[1]), ["rope_scaling", "object"]),
        (dict(rope_theta=-1.0), ["rope_theta", "positive"]),
        (
            dict(rope_theta=1e4, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
            ["rope_theta", "twice"],
        ),
        (
            dict(
                rope_scaling=dict(rope_type="linear", factor=2.0),
                rope_parameters=dict(rope_type="linear", factor=4.0),
            ),
            ["factor", "twice"],
        ),
        (dict(partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused(changes, words):
    with pytest.raises(ConfigError) as error:
        LlamaConfig.from_hf({**GOOD, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=f"lacks {field}"):
        LlamaConfig.from_hf({key: value for key, value in GOOD.items() if key != field})


def test_something_other_than_an_object_is_refused():
    with pytest.raises(ConfigError, match="list"):
        LlamaConfig.from_hf([GOOD])


def test_unknown_keys_are_named_once_kept_and_saved():
    with pytest.warns(UserWarning, match="attention_sink, zebra") as caught:
        config = LlamaConfig.from_hf({**GOOD, "zebra": 1, "attention_sink": True, "pretraining_tp": 1})
    assert len(caught) == 1
    assert config.to_hf()["zebra"] == 1 and config.to_hf()["pretraining_tp"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LlamaConfig.from_hf({**GOOD, "auto_map": {"AutoModel": "x.Y"}, "transformers_version": "4.31.0"})


def test_trainers_may_assign():
    config = LlamaConfig.from_hf(GOOD)
    config.use_cache, config.pad_token_id = False, 3
    assert config.get_text_config().to_dict()["pad_token_id"] == 3


DEEP: list = []
for _ in range(40):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 2**40}, "too large to be meant"),
        ({"hidden_size": 2**40}, "too large to be meant"),
        ({"num_hidden_layers": 10**5000}, "too large to be meant"),
        ({"rms_norm_eps": float("nan")}, "finite number"),
        ({"rms_norm_eps": 10**400}, "finite number"),
        ({"hidden_size": "32"}, "positive integer"),
        ({"eos_token_id": [1, True]}, "all of them ids"),
        ({"eos_token_id": [1, "2"]}, "all of them ids"),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": {"a": 1}}}, "no number"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "can be computed with"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [[1.0]], "long_factor": [1.0]}}, "no number"),
        ({"quantization_config": "gptq"}, "quantization_config"),
        ({"extra_key": DEEP}, "more than 32 deep"),
        ({"extra_key": "\ud800"}, "lone surrogate"),
        ({"extra_key": {1: 2}}, "keys that are no strings"),
        ({"model_type": "x" * 10**6}, "model_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_config_out_to_hurt_is_refused_in_few_words(changes, words):
    with pytest.raises(ConfigError) as error:
        LlamaConfig.from_hf({**GOOD, **changes})
    assert words in str(error.value) and len(str(error.value)) < 600
