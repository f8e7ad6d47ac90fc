"""`from_pretrained`, `load` and `save_pretrained` with transformers' arguments, and folders that other tools write."""

import copy
import json
import shutil
import sys
import warnings
from typing import ClassVar

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import ligermodels
from ligermodels import CheckpointError, ConfigError, HubError, InputError, Llama, Mixtral, Qwen2
from ligermodels.arch import placement
from ligermodels.checkpoint import hub
from ligermodels.checkpoint.weights import same_bits
from tests.sizes import SIZES

LAYERS = dict(num_hidden_layers=3, initializer_range=0.2)
FAMILIES = {
    "llama": dict(tie_word_embeddings=True),
    "qwen2": dict(tie_word_embeddings=False),
    "mixtral": dict(num_local_experts=4),  # names in memory are not those on disk
}
IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(0))
# fp32 on both sides, a few hundred roundings deep.
FP32 = dict(rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of transformers, in bf16 by their config."""
    made = {}
    for family, own in FAMILIES.items():
        made[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **{**SIZES, **LAYERS, **own})
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made[family])
    return made


def load(folder, **options):
    return ligermodels.load(folder, progress=False, **options)


def logits(model):
    with torch.no_grad():
        return model(IDS.to(model.device)).logits


def same_weights(a, b):
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


class TestArguments:
    @pytest.mark.parametrize(
        "given, dtype",
        [
            (dict(), torch.bfloat16),
            (dict(torch_dtype="auto"), torch.bfloat16),
            (dict(torch_dtype="float32"), torch.float32),
            (dict(dtype="torch.float64"), torch.float64),
        ],
        ids=str,
    )
    def test_dtypes(self, folders, given, dtype):
        assert Llama.from_pretrained(folders["llama"], progress=False, **given).dtype == dtype

    @pytest.mark.parametrize("place", [torch.device("cpu"), {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}], ids=str)
    def test_a_device_map_of_one_device_needs_no_accelerate(self, folders, place, monkeypatch):
        monkeypatch.setitem(sys.modules, "accelerate", None)
        model = load(folders["llama"], device_map=place)
        assert torch.equal(logits(model), logits(load(folders["llama"], device="cpu")))

    def test_arguments_without_effect(self, folders):
        """lm-eval and others always pass them."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(
                folders["llama"], revision="main", subfolder="", trust_remote_code=False, gguf_file=None,
                quantization_config=None, device_map=None, attn_implementation=None, low_cpu_mem_usage=True,
                use_safetensors=True, token=None, cache_dir=None, local_files_only=False, variant=None,
                offload_folder="nowhere", max_memory=None, tp_plan=None, weights_only=True, adapter_kwargs={},
            )  # fmt: skip
        with pytest.warns(UserWarning, match="attn_implementation='sdpa' changes nothing") as caught:
            load(folders["llama"], attn_implementation="sdpa")
        assert len(caught) == 1

    def test_fields_of_the_config_can_be_changed(self, folders):
        model = load(folders["mixtral"], use_cache=False, router_aux_loss_coef=0.5)
        assert model.config.use_cache is False and model.config.router_aux_loss_coef == 0.5
        assert load(folders["mixtral"]).config.use_cache is True

    def test_the_name_is_kept_and_not_saved(self, folders, tmp_path, monkeypatch):
        model = load(folders["llama"])
        assert vars(model)["name_or_path"] == model.config._name_or_path == str(folders["llama"])
        model.save_pretrained(tmp_path / "saved")
        assert "_name_or_path" not in json.loads((tmp_path / "saved" / "config.json").read_text())
        monkeypatch.setattr(hub, "resolve", lambda *args, **options: folders["llama"])
        assert load("owner/name").name_or_path == "owner/name"


LOADING = [
    (dict(devicemap="auto"), InputError, "did you mean 'device_map'"),
    (dict(wibble=3), InputError, "wibble=3 is not supported$"),
    (dict(dtype=torch.bfloat16, torch_dtype=torch.float32), InputError, "one argument under two names"),
    (dict(device="gpu"), InputError, "device='gpu' is no device of torch's; give one such as cpu, cuda"),
    (dict(device="cuda:977"), InputError, r"device='cuda:977' cannot be used: .* `ligermodels doctor` says"),
    (dict(device_map="cuda:977"), InputError, "device_map='cuda:977' cannot be used"),
    (dict(device_map="gpu"), InputError, "expected one such as 'cuda:0', 'auto'"),
    (dict(device_map={"model": "disk", "lm_heads": "cpu"}), InputError, "no device for lm_head.weight"),
    (dict(device_map={"": "disk", "lm_heads": "cpu"}), InputError, "names 'lm_heads', which the model does not have"),
    (dict(use_safetensors=False), InputError, "use_safetensors=False is not supported"),
    (dict(force_download=True), InputError, "force_download=True is not supported"),
    (dict(config="nowhere/../x"), HubError, "x is not there"),
]
SAVING = [
    (dict(safe_serialization=False), InputError, "safe_serialization=False is not supported"),
    (dict(private=True), InputError, "pass push_to_hub=True"),
    (dict(state_dict={"model.norm.weight": torch.ones(32)}), CheckpointError, "missing"),
]


@pytest.mark.parametrize("given, error, words", LOADING, ids=str)
def test_a_load_that_cannot_work_says_so(folders, given, error, words):
    with pytest.raises(error, match=words):
        load(folders["qwen2"], **given)


@pytest.mark.parametrize("given", ["device", "device_map"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_fetched(given, monkeypatch):
    monkeypatch.setattr(hub, "resolve", None)
    for call in (ligermodels.load, Llama.from_hub):
        with pytest.raises(InputError, match="cannot be used"):
            call("owner/name", **{given: "cuda:977"})
    with pytest.raises(InputError, match="no device of torch's"):
        Llama.from_config(SIZES, device="gpu")


@pytest.mark.parametrize("given, error, words", SAVING, ids=lambda value: "")
def test_a_save_that_cannot_work_says_so(folders, tmp_path, given, error, words):
    with pytest.raises(error, match=words):
        load(folders["llama"]).save_pretrained(tmp_path / "out", **given)
    assert not list(tmp_path.iterdir())


class TestWeightsAlone:
    """Folders without a config.json, as Trainer, TRL and accelerate write them."""

    @pytest.mark.parametrize("family", ["llama", "mixtral"])
    def test_every_form_of_config(self, folders, family, tmp_path):
        model = load(folders[family], dtype=torch.float32)  # though the config says bf16
        save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"(?s)config\.json is not there.*weights alone.*pass config="):
            load(tmp_path)
        source = folders[family]
        for config in (
            model.config,
            json.loads((source / "config.json").read_text()),
            str(source),
            source / "config.json",
            transformers.AutoConfig.from_pretrained(source),
        ):
            found = load(tmp_path, config=config)
            assert type(found) is type(model) and found.dtype == torch.float32
            assert same_weights(found.state_dict(), model.state_dict())
        assert load(tmp_path, config=source, dtype=torch.bfloat16).dtype == torch.bfloat16


class TestDevices:
    ON_DISK: ClassVar = {
        "some modules": dict(device_map={
            "model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
            "model.norm": "cpu", "lm_head": "cpu",
        }),
        "all but the head": dict(device_map={"model": "disk", "lm_head": "cpu"}),
        "a module in another": dict(device_map={"": "cpu", "model.layers.1": "disk", "model.layers.1.mlp": "cpu"}),
        "everything": dict(device_map={"": "disk"}),
        "what exceeds max_memory": dict(device_map="auto", max_memory={"cpu": 90_000, "disk": "1GB"}),
        "more than max_memory": dict(device_map="auto", max_memory={"cpu": 90_000}),
    }  # fmt: skip

    @pytest.mark.parametrize("given, family", [*zip(ON_DISK.values(), [*FAMILIES] * 2, strict=True)], ids=ON_DISK)
    def test_modules_on_the_disk_are_read_from_the_checkpoint(self, folders, family, given, tmp_path):
        pytest.importorskip("accelerate")
        plain = load(folders[family], dtype=torch.float32)  # not the dtype of the files
        model = load(folders[family], dtype=torch.float32, offload_folder=tmp_path / "offload", **given)
        assert any(parameter.is_meta for parameter in model.parameters())
        if family == "llama" and "model" in given["device_map"]:
            assert model.hf_device_map["lm_head"] == "disk"  # where the table is that a tied head reads
        assert torch.equal(logits(model), logits(plain))
        assert torch.equal(logits(copy.deepcopy(model)), logits(plain))
        assert torch.equal(model.generate(IDS, max_new_tokens=4), plain.generate(IDS, max_new_tokens=4))
        shutil.copytree(folders[family], tmp_path / "saved")
        model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
        assert same_weights(load(tmp_path / "saved").state_dict(), plain.state_dict())
        assert not (tmp_path / "offload").exists()

    def test_a_folder_is_saved_over_while_its_weights_are_on_the_disk(self, folders, tmp_path):
        pytest.importorskip("accelerate")
        shutil.copytree(folders["qwen2"], tmp_path / "model")
        model = load(tmp_path / "model", device_map={"": "disk"})
        expected = logits(model)
        load(folders["llama"]).save_pretrained(tmp_path / "model")
        assert torch.equal(logits(model), expected)

    def test_what_is_not_quantised_may_be_on_the_disk(self, folders, tmp_path):
        pytest.importorskip("accelerate")
        plan = {"model.layers": "cpu", "model.norm": "disk", "model.embed_tokens": "disk", "lm_head": "disk"}
        plain = load(folders["qwen2"], quantization_config="nf4")
        plain.save_pretrained(tmp_path / "saved")
        for folder in (folders["qwen2"], tmp_path / "saved"):
            model = load(folder, quantization_config="nf4", device_map=plan)
            assert model.model.norm.weight.is_meta and torch.equal(logits(model), logits(plain))

    def test_the_plan_keeps_blocks_whole_and_a_tied_head_with_its_table(self, folders):
        pytest.importorskip("accelerate")
        loaded = load(folders["llama"])
        model = type(loaded).from_config(loaded.config, device="meta")
        block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
        # Space for the table, a block and one that is moved there to run; then for all the rest.
        plan = placement.plan(model, "sequential", max_memory={0: int(2.5 * block), 1: 9 * block, "cpu": 9 * block})
        assert [plan[f"model.layers.{i}"] for i in range(3)] == [0, 1, 1]
        assert plan["model.embed_tokens"] == 0 and plan["model.norm"] == 1
        assert plan["lm_head"] == 0

    @pytest.mark.gpu
    def test_blocks_on_several_devices(self, folders):
        pytest.importorskip("accelerate")
        for family in FAMILIES:
            expected = logits(load(folders[family], dtype=torch.float32, device="cuda"))
            last = f"cuda:{torch.cuda.device_count() - 1}"
            plan = {"model.embed_tokens": "cuda:0", "model.layers.0": "cpu", "model.layers.1": last}
            plan |= {"model.layers.2": "disk", "model.norm": last, "lm_head": last}
            model = load(folders[family], dtype=torch.float32, device_map=plan)
            torch.testing.assert_close(logits(model).to("cuda:0"), expected.to("cuda:0"), **FP32)
            ids = IDS.cuda()
            wanted = load(folders[family], dtype=torch.float32, device="cuda").generate(ids, max_new_tokens=8)
            assert torch.equal(model.generate(ids, max_new_tokens=8), wanted)


class TestSaving:
    def test_a_state_dict_takes_the_place_of_the_weights(self, folders, tmp_path):
        model = load(folders["mixtral"])
        state = {f"module._orig_mod.{name}": tensor.float() + 1 for name, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path / "out", state_dict=state)
        saved = load(tmp_path / "out")
        assert saved.dtype == torch.float32 and model.dtype == torch.bfloat16
        assert model.config.dtype == "bfloat16"  # the model itself is as it was
        assert same_weights(
            saved.state_dict(), {name.removeprefix("module._orig_mod."): t for name, t in state.items()}
        )
        hf = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", attn_implementation="eager", experts_implementation="eager"
        )
        torch.testing.assert_close(logits(hf), logits(saved), **FP32)

    @pytest.mark.parametrize(
        "state, words",
        [
            (lambda state: state.update(v_head=torch.ones(3)), "not the model's"),
            (lambda state: state.update({"lm_head.weight": torch.ones(97, 32)}), "lm_head.weight differs"),
            (lambda state: state.update({"model.norm.weight": torch.ones(31)}), r"is \[31\], the model has \[32\]"),
        ],
    )
    def test_a_state_dict_of_something_else(self, folders, tmp_path, state, words):
        model = load(folders["llama"])
        changed = dict(model.state_dict())
        state(changed)
        with pytest.raises(CheckpointError, match=words):
            model.save_pretrained(tmp_path / "out", state_dict=changed)
        assert not (tmp_path / "out").exists()

    def test_push_to_hub_and_the_arguments_of_transformers(self, folders, tmp_path, monkeypatch):
        pushed = []
        monkeypatch.setattr(hub, "push", lambda *args, **options: pushed.append((args, options)))
        model = load(folders["llama"])
        usual = dict(safe_serialization=True, save_peft_format=True, variant=None, token="t", save_function=torch.save)
        model.save_pretrained(tmp_path / "name", **usual)
        assert not pushed
        model.save_pretrained(tmp_path / "name", push_to_hub=True, private=True, **usual)
        model.save_pretrained(tmp_path / "name", push_to_hub=True, repo_id="me/model")
        model.save_pretrained(tmp_path / "name", push_to_hub=True, is_main_process=False)
        folder = tmp_path / "name"
        assert pushed == [((folder, "name"), dict(token="t", private=True)), ((folder, "me/model"), {})]

    @pytest.mark.parametrize("how", ["a Parameter", "a copy"])
    def test_a_head_that_was_untied_is_saved_so(self, folders, tmp_path, how):
        model = load(folders["llama"], dtype=torch.float32)
        if how == "a copy":  # as PEFT leaves it after modules_to_save=["lm_head"]
            model.lm_head = copy.deepcopy(model.lm_head)
        else:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
        assert torch.equal(logits(load(tmp_path)), logits(model))
        hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(logits(hf), logits(model), **FP32)


def test_classes_load_what_is_theirs(folders):
    assert type(load(folders["mixtral"])) is Mixtral and type(load(folders["qwen2"])) is Qwen2
    with pytest.raises(ConfigError, match="model_type 'qwen2'"):
        Llama.from_pretrained(folders["qwen2"])
