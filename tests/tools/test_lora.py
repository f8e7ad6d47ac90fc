"""Our LoRA beside PEFT's on transformers' model: losses, gradients, files in both directions, and merged weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

peft = pytest.importorskip("peft")

from ligermodels import CheckpointError  # noqa: E402
from ligermodels.training import adapters_off, add_lora, load_adapter, merge_lora, save_adapter  # noqa: E402
from tests.tools import models  # noqa: E402
from tests.tools.test_peft import LOGITS, LOSS, USUAL, greedy, load_adapter_of_all, logits, losses  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
]
CASES = {
    "all-linear": ("llama", {}),
    "biases": ("qwen2", {"targets": USUAL}),
    "caps and windows": ("gemma2", {}),
    "joint": ("phi3", {}),
    "experts": ("mixtral", {"targets": USUAL[:4]}),  # "all-linear" of PEFT takes the experts too
    "q and v": ("qwen2", {"targets": ["q_proj", "v_proj"]}),
    "down of one block": ("llama", {"targets": ["layers.1.mlp.down_proj"]}),
    "rsLoRA": ("llama", {"rslora": True, "targets": USUAL}),
    "DoRA": ("qwen2", {"dora": True, "targets": USUAL}),
    "dropout": ("llama", {"dropout": 0.3, "targets": ["q_proj", "down_proj"]}),
    "head, tied": ("llama", {"targets": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "head and table, untied": ("qwen2", {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "norms": ("gemma2", {"targets": ["o_proj"], "modules_to_save": ["input_layernorm", "norm"]}),
}
"""Family and options of `add_lora`."""


def both(folders, case):
    """Ours and theirs with the same adapter."""
    family, options = CASES[case]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=options.get("dropout", 0.0),
        target_modules=options.get("targets", "all-linear"), use_rslora=options.get("rslora", False),
        use_dora=options.get("dora", False), modules_to_save=options.get("modules_to_save"),
    )  # fmt: skip
    theirs = peft.get_peft_model(models.theirs(folders[family]), config)
    ours = add_lora(models.ours(folders[family]), 4, 8, **options)
    mine = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    expected = {name_of(name): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert {name: p.shape for name, p in mine.items()} == {name: p.shape for name, p in expected.items()} != {}
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(expected[name])
    return ours, theirs


def name_of(name):
    """Ours for PEFT's name of a parameter in memory."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".default", "")


@pytest.mark.parametrize("case", CASES)
def test_adapters_train_travel_and_merge_as_pefts(folders, case, tmp_path):
    family = CASES[case][0]
    ours, theirs = both(folders, case)
    torch.testing.assert_close(losses(ours), losses(theirs), **LOSS)
    expected = logits(theirs)
    torch.testing.assert_close(logits(ours), expected, **LOGITS)
    plain = logits(models.theirs(folders[family]))
    assert (expected - plain).abs().max() > 1e-2
    if "modules_to_save" not in CASES[case][1]:  # these are trained in place: the base is gone
        with adapters_off(ours), theirs.disable_adapter():
            torch.testing.assert_close(logits(ours), logits(theirs), **LOGITS)
            assert torch.equal(logits(ours), logits(models.ours(folders[family])))

    # The files: names, dtypes, the config; each loads on the other's base.
    theirs.save_pretrained(tmp_path / "theirs")
    save_adapter(ours, tmp_path / "ours")
    mine, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert {n: (t.shape, t.dtype) for n, t in mine.items()} == {n: (t.shape, t.dtype) for n, t in wanted.items()}
    said, known = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs"))
    linears = [name for name, module in ours.named_modules() if isinstance(module, torch.nn.Linear)]
    ends = [one.pop("target_modules") for one in (said, known)]
    meant = [{name for name in linears if any(f".{name}".endswith(f".{end}") for end in some)} for some in ends]
    assert meant[0] == meant[1] == {name_of(name).split(".lora_")[0] for name in mine if "lora_" in name}
    assert said == {name: known[name] for name in said}
    on_theirs = load_adapter_of_all(models.theirs(folders[family]), tmp_path / "ours")
    mine = logits(ours)
    assert (logits(on_theirs) - mine).abs().max() <= 1e-5 * mine.abs().max()
    on_ours = load_adapter(models.ours(folders[family]), tmp_path / "theirs").eval()
    assert (logits(on_ours) - expected).abs().max() <= 1e-5 * expected.abs().max()
    again = load_adapter(models.ours(folders[family]), tmp_path / "ours").eval()
    assert torch.equal(logits(again), logits(ours))
    assert family == "mixtral" or greedy(ours) == greedy(theirs)

    # Trained on, merged, saved.
    torch.testing.assert_close(losses(on_ours, 2), losses(theirs, 2), **LOSS)
    assert merge_lora(on_ours) is on_ours
    merged = logits(theirs.merge_and_unload())
    torch.testing.assert_close(logits(on_ours), merged, **LOGITS)
    on_ours.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(models.theirs(tmp_path / "merged")), merged, **LOGITS)


def test_patterns_of_other_files_count(folders, tmp_path):
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=USUAL, init_lora_weights=False,
        rank_pattern={"q_proj": 2, "v": 7, r"layers\.1\.mlp\.up_proj": 6}, alpha_pattern={"v_proj": 3},
    )  # fmt: skip
    theirs = peft.get_peft_model(models.theirs(folders["llama"]), config)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_adapter(models.ours(folders["llama"]), tmp_path / "theirs").eval()
    torch.testing.assert_close(logits(ours), logits(theirs), **LOGITS)
    save_adapter(ours, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(models.theirs(folders["llama"]), tmp_path / "ours")
    torch.testing.assert_close(logits(again), logits(theirs), **LOGITS)


def lose_a_tensor(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop("base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight")
    save_file(tensors, folder / "adapter_model.safetensors")


def with_settings(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.parametrize("family, change, message", [
    ("qwen2", with_settings(lora_bias=True), "lora_bias"),
    ("qwen2", with_settings(bias="all"), "bias='all'"),
    ("qwen2", with_settings(trainable_token_indices=[1]), "trainable_token_indices"),
    ("qwen2", with_settings(r=5), "expected"),
    ("phi3", lambda folder: None, r"self_attn\.q_proj, which is not there"),
    ("qwen2", lose_a_tensor, "partial copy"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_files_that_do_not_fit_are_refused_by_name(folders, tmp_path, family, change, message):
    ours, _ = both(folders, "q and v")
    change(save_adapter(ours, tmp_path / "a"))
    model = models.ours(folders[family])
    before = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    with pytest.raises(CheckpointError, match=message):
        load_adapter(model, tmp_path / "a")
    assert [(name, parameter.requires_grad) for name, parameter in model.named_parameters()] == before
