"""Mutated config.json and generation_config.json, by hypothesis: each loads, or ends in an error of this package.

The configs are those of released models (tests/fixtures/configs), made into shapes without memory, and those of tiny
checkpoints, loaded whole. What is read is written and read again, and must come out the same.
The longer run: python -m tests.hostile.fuzz_configs --count 20000
"""

import collections
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ligermodels
from ligermodels.arch import ARCHS
from ligermodels.errors import LigermodelsError
from tests.hostile.folders import CONFIG
from tests.hostile.fuzz_files import BYTE_STEP, PLACES, change_bytes, change_tree
from tests.hostile.fuzzing import bounded, run

FAMILIES: dict[str, dict] = {
    "llama": {},
    "mistral": dict(sliding_window=8),
    "mixtral": dict(num_local_experts=2, num_experts_per_tok=1),
    "gemma": dict(head_dim=8),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=8),
    "qwen2": {},
    "phi3": dict(original_max_position_embeddings=64),
}
"""What a tiny config of each has beside `CONFIG`."""
REAL = Path(__file__).parents[1] / "fixtures" / "configs"
WORDS = [
    *("linear", "dynamic", "llama3", "yarn", "longrope", "su", "default", "mrope", "gelu", "silu", "relu2"),
    *("float32", "bfloat16", "torch.float16", "auto", "full_attention", "sliding_attention"),
    *("model_type", "rope_scaling", "rope_parameters", "rope_theta", "rope_type", "type", "factor", "short_factor"),
    *("long_factor", "original_max_position_embeddings", "partial_rotary_factor", "attention_factor", "truncate"),
    *("head_dim", "layer_types", "sliding_window", "quantization_config", "auto_map", "dtype", "torch_dtype"),
    *("eos_token_id", "pad_token_id", "bos_token_id", "num_key_value_heads", "num_local_experts", "text_config"),
    *("tie_word_embeddings", "hidden_activation", "query_pre_attn_scalar", "use_sliding_window", "\x1b[2J", ""),
    *ARCHS,
]  # fmt: skip
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(st.characters(exclude_categories=()), max_size=6))
NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 3, 4, 7, 8, 64, 100, 2**15, 2**20, 2**31, 2**53, 2**63, 2**64, 10**400]),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e-320, 1e-30, 1e-9, 1e15, 1e300, float("nan"), float("inf")]),
    st.integers(0, 2**20),
    st.floats(),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=6,
)
TREE_STEP = st.tuples(st.sampled_from(["replace", "rename", "delete", "add", "swap"]), PLACES, PLACES, VALUES, TEXTS)
SIZES = ("num_hidden_layers", "num_local_experts")


def make_families(root: Path) -> dict[str, Path]:
    """{family: the folder of a tiny checkpoint of it}."""
    folders = {}
    for family, changes in FAMILIES.items():
        config = {**CONFIG, "model_type": family, **changes}
        model = ARCHS[family].from_config(config, device="cpu", dtype=torch.float32)
        folders[family] = model.save_pretrained(root / family)
    return folders


def small(config: Any) -> Any:
    """A config with few blocks, so that one of a real model is made in milliseconds."""
    if isinstance(config, dict):
        layers = config.get("num_hidden_layers")
        config = {**config, **{key: 2 for key in SIZES if isinstance(config.get(key), int) and config[key] > 2}}
        types = config.get("layer_types")
        if isinstance(types, list) and len(types) == layers:
            config["layer_types"] = types[: config["num_hidden_layers"]]
    return config


class Fuzz:
    """Configs of real models and tiny checkpoints, mutated and counted by their outcome."""

    def __init__(self, root: Path):
        self.folders = list(make_families(root).values())
        self.contents = [(folder / "config.json").read_bytes() for folder in self.folders]
        found = [json.loads(path.read_text()) for path in sorted(REAL.rglob("*.json"))]
        self.real = [small(config) for config in found if config["model_type"] in FAMILIES]
        assert len({config["model_type"] for config in self.real}) == len(FAMILIES)
        generation = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "temperature": 0.6, "top_p": 0.9}
        self.generation = {**generation, "do_sample": True, "suppress_tokens": [[1, 2], {"a": None}], "x": {"y": 1.0}}
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def attempt(self, kind: str, work: Callable[[], object]) -> None:
        """Whatever else than this package's errors comes, passes through to hypothesis."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                work()
            except LigermodelsError as error:
                # The line ends are those of the tables of tensors that do not match.
                assert len(str(error)) < 5000 and str(error).replace("\n", "").isprintable(), repr(str(error))
                self.counts[kind][type(error).__name__] += 1
            else:
                self.counts[kind]["loaded"] += 1

    def build(self, config: Any) -> None:
        """A model without memory, whose config survives being written and read."""
        family = config.get("model_type") if isinstance(config, dict) else None
        arch = ARCHS.get(family, ligermodels.Llama) if isinstance(family, str) else ligermodels.Llama
        model = arch.from_config(small(config), device="meta")
        written = json.loads(json.dumps(model.config.to_hf()))
        again = arch.config_class.from_hf(written)
        assert json.dumps(again.to_hf(), sort_keys=True) == json.dumps(model.config.to_hf(), sort_keys=True)

    def load(self, folder: Path, file: str, content: bytes) -> None:
        """A checkpoint with `content` in one of its files: loaded, run and used to generate, if it can be.

        Numbers that are in range and make no sense may end in NaN, which `generate` refuses.
        """
        path = folder / file
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        try:
            model = ligermodels.load(folder, progress=False)
            ids = torch.arange(6).view(2, 3)
            assert model(ids).logits.shape == (2, 3, CONFIG["vocab_size"])
            assert model.generate(ids, max_new_tokens=2, pad_token_id=0).shape[0] == 2
        finally:
            path.unlink()
            if before is not None:
                path.write_bytes(before)

    def targets(self, count: int, **options: Any) -> list[Callable[[], None]]:
        """A function of hypothesis for each kind of mutation, `count` examples in all."""
        shares = {"real configs": 0.4, "configs": 0.25, "configs as bytes": 0.15, "generation configs": 0.2}
        many = {kind: max(1, round(count * share)) for kind, share in shares.items()}

        def limited(kind: str) -> settings:
            return bounded(many[kind], **options)

        @limited("real configs")
        @given(PLACES, st.lists(TREE_STEP, min_size=1, max_size=3))
        def real_configs(which, steps):
            config = change_tree(self.real[which % len(self.real)], steps)
            self.attempt("real configs", lambda: self.build(config))

        @limited("configs")
        @given(PLACES, st.lists(TREE_STEP, min_size=1, max_size=3))
        def configs(which, steps):
            folder = which % len(self.folders)
            content = json.dumps(change_tree(json.loads(self.contents[folder]), steps)).encode()
            self.attempt("configs", lambda: self.load(self.folders[folder], "config.json", content))

        @limited("configs as bytes")
        @given(PLACES, st.lists(BYTE_STEP, min_size=1, max_size=3))
        def configs_as_bytes(which, steps):
            folder = which % len(self.folders)
            content = change_bytes(self.contents[folder], steps, len(self.contents[folder]))
            self.attempt("configs as bytes", lambda: self.load(self.folders[folder], "config.json", content))

        @limited("generation configs")
        @given(st.lists(TREE_STEP, min_size=1, max_size=3), st.lists(BYTE_STEP, max_size=1))
        def generation_configs(steps, cuts):
            content = json.dumps(change_tree(self.generation, steps)).encode()
            content = change_bytes(content, cuts, len(content))
            self.attempt("generation configs", lambda: self.load(self.folders[0], "generation_config.json", content))

        return [real_configs, configs, configs_as_bytes, generation_configs]


if __name__ == "__main__":
    run(Fuzz, "Reads mutated configs", count=20_000)
