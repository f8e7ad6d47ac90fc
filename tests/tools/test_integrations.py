"""ligermodels.integrations.transformers: our modules in a real PreTrainedModel, and our model over their Parameters.

transformers' own model of the same checkpoint is the expectation of every figure.
"""

import copy
import warnings

import pytest
import torch
import transformers

import ligermodels
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.integrations import transformers as bridge
from ligermodels.integrations.transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from tests.arch import llama_vision, qwen2_vl
from tests.tools.models import SIZES

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=6),
    "qwen2_vl": lambda: transformers.AutoConfig.for_model(**qwen2_vl.tiny(DRAWN, **DRAWN)),
    "mllama": lambda: transformers.AutoConfig.for_model(**llama_vision.tiny(DRAWN, **DRAWN)),
}
DRAWN = dict(initializer_range=0.2)
FAMILIES = tuple(CONFIGS)
TIED = {"llama": {"lm_head.weight"}, "gemma2": {"lm_head.weight"}}
# fp32 on both sides, a few hundred roundings deep, of logits around 5.
CLOSE = dict(rtol=1e-5, atol=2e-5)
PLAIN = dict(attn_implementation="eager", experts_implementation="eager")


def ids(rows=2, length=12, seed=0):
    return torch.randint(4, 80, (rows, length), generator=torch.Generator().manual_seed(seed))


def images(family):
    """The ids, and what a model that reads images takes beside them."""
    torch.manual_seed(0)
    if family == "qwen2_vl":
        inputs = qwen2_vl.inputs([[2, qwen2_vl.image(2, 2), 4]] * 2)
        return inputs.pop("input_ids"), inputs
    if family == "mllama":
        config = llama_vision.tiny()
        tokens, _, inputs = llama_vision.images(config, llama_vision.placements(config))
        return tokens, inputs
    return ids(), {}


def theirs_of(family, seed=0, **options):
    """A model of transformers: its plainest form, with biases and gates that are not zero."""
    config = CONFIGS[family]()
    name = config.architectures[0] if config.architectures else ligermodels.ARCHS[family].config_class.architecture
    torch.manual_seed(seed)
    model = getattr(transformers, name)._from_config(config, **PLAIN, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "gate" in name.split(".")[-1]:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: a folder that transformers saved}."""
    home = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        theirs_of(family).save_pretrained(home / family)
    return {family: home / family for family in FAMILIES}


def load_theirs(folder, **options):
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, **PLAIN, **options)


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def compare(ours, theirs, family="llama"):
    tokens, inputs = images(family)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(input_ids=tokens, **inputs).logits, theirs(input_ids=tokens, **inputs).logits, **CLOSE
        )


def compare_training(ours, theirs, family):
    """Losses, and every gradient relative to its largest: a row that sums to nearly nothing is rounding."""
    tokens, inputs = images(family)
    labels = tokens.masked_fill(tokens > 80, -100)
    losses = [model(input_ids=tokens, labels=labels, **inputs).loss for model in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    for name, parameter in theirs.named_parameters():
        found = ours.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        if found is not None:
            assert (found - parameter.grad).abs().max() <= 3e-5 * parameter.grad.abs().max() + 1e-6, name


# from_transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_our_model_has_the_parameters_of_theirs(family):
    theirs = theirs_of(family)
    twin = copy.deepcopy(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = ligermodels.from_transformers(theirs)
    assert isinstance(ours, ligermodels.ARCHS[family])
    parameters = dict(theirs.named_parameters())
    assert {name: id(p) for name, p in ours.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert ours.state_dict().keys() == theirs.state_dict().keys() - TIED.get(family, set())
    compare(ours, twin, family)
    compare_training(ours, twin, family)


def test_the_settings_of_their_model_are_taken_over(folders):
    theirs = load_theirs(folders["llama"], dtype=torch.bfloat16).train()
    theirs.model.embed_tokens.requires_grad_(False)
    theirs.activation_checkpointing_enable()
    theirs.generation_config.temperature = 0.3
    ours = ligermodels.from_transformers(theirs)
    assert ours.dtype == torch.bfloat16 and ours.training and ours.is_gradient_checkpointing
    assert not ours.model.embed_tokens.weight.requires_grad and ours.model.norm.weight.requires_grad
    assert ours.generation_config["temperature"] == 0.3 and ours.name_or_path == str(folders["llama"])


def test_models_that_share_their_parameters_keep_their_size(folders):
    theirs = load_theirs(folders["llama"])
    rows = theirs.resize_token_embeddings(theirs.config.vocab_size + 3).num_embeddings
    ours = ligermodels.from_transformers(theirs)
    assert ours.config.vocab_size == len(ours.lm_head.weight) == rows
    for one in (ours, theirs):
        assert one.resize_token_embeddings() is one.resize_token_embeddings(rows) is one.get_input_embeddings()
        with pytest.raises(InputError, match="before from_transformers"):
            one.resize_token_embeddings(rows + 1)
        assert len(one.get_input_embeddings().weight) == one.config.vocab_size == rows


class Own(transformers.LlamaForCausalLM):
    """A user's subclass, under the name of transformers' class."""


Own.__name__ = "LlamaForCausalLM"


def untied():
    model = theirs_of("llama")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@pytest.mark.parametrize("make, message", [
    (lambda: Own(CONFIGS["llama"]()), "own classes LlamaForCausalLM, .*test_integrations.Llama"),
    (lambda: theirs_of("llama").model, "LlamaModel"),
    (untied, "lm_head.weight is not in Llama"),
], ids=["subclass", "base model", "untied"])  # fmt: skip
def test_other_models_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        ligermodels.from_transformers(make())


# AutoModelForCausalLM


@pytest.mark.parametrize("family", FAMILIES)
def test_names_logits_and_losses_are_theirs(folders, family):
    theirs = load_theirs(folders[family])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(folders[family])
    assert isinstance(model, transformers.PreTrainedModel) and isinstance(model, type(theirs))
    assert isinstance(model, ligermodels.ARCHS[family])
    assert type(model).__name__ == type(theirs).__name__ and type(model.config) is type(theirs.config)
    assert shapes(model) == shapes(theirs) and model.vocab_size == theirs.config.get_text_config().vocab_size
    assert type(model.get_decoder()).__name__ == "Decoder" and model.base_model is model.model
    assert model._no_split_modules == set(ligermodels.ARCHS[family]._no_split_modules)
    assert [n for n, _ in model.named_parameters() if n == "lm_head.weight"] == (
        [] if family in TIED else ["lm_head.weight"]
    )
    compare(model, theirs, family)
    compare_training(model.train(), theirs.train(), family)


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
@pytest.mark.parametrize("read", [
    lambda output: output.logits, lambda output: output["logits"], lambda output: output.get("logits"),
    lambda output: output[1], lambda output: output[:2][1],
], ids=["attribute", "key", "get", "position", "slice"])  # fmt: skip
def test_logits_beside_a_loss_are_computed_when_they_are_read(folders, family, read):
    grads = []
    for load in (AutoModelForCausalLM.from_pretrained, load_theirs):
        model = load(folders[family]).train()
        output = model(input_ids=ids(), labels=ids())
        if load is not load_theirs:
            assert "logits" not in [*output] and output[0] is output.loss is output[:1][0]
            assert "logits" not in [*output]  # still fused
        logits = read(output)
        (output.loss + logits.square().mean()).backward()
        grads.append((output.loss.detach(), logits.detach(), model.model.layers[0].mlp.parameters().__next__().grad))
        assert [*output][:2] == ["loss", "logits"] and read(output) is logits
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_saves_opens_everywhere(folders, tmp_path, family):
    model = AutoModelForCausalLM.from_pretrained(folders[family])
    model.save_pretrained(tmp_path / "saved")
    files = ligermodels.checkpoint.reading.open_checkpoint
    with files(folders[family]) as before, files(tmp_path / "saved") as after:
        assert before.headers == after.headers
        for name in before.headers:
            assert torch.equal(before.read(name), after.read(name)), name
    for opened in (load_theirs(tmp_path / "saved"), AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        compare(opened, model, family)
    native = ligermodels.load(tmp_path / "saved", progress=False)
    compare(native, model, family)
    native.save_pretrained(tmp_path / "native")
    compare(AutoModelForCausalLM.from_pretrained(tmp_path / "native"), native, family)


def test_what_cannot_be_honoured_raises(folders, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="tp_plan"):
        AutoModelForCausalLM.from_pretrained(folders["llama"], tp_plan="auto")
    with pytest.raises(ValueError, match=r"GPT2Config.*\n.*LlamaConfig, MistralConfig"):
        AutoModelForCausalLM.from_config(transformers.GPT2Config())
    with pytest.raises(ConfigError, match="attention_dropout"):
        AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES, attention_dropout=0.1))
    transformers.MixtralModel.from_pretrained(folders["mixtral"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"1 parameters .*: lm_head\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"6 parameters .*gate_proj.* and 1 more"):
        AutoModelForCausalLM.from_pretrained(folders["llama"], intermediate_size=48, ignore_mismatched_sizes=True)
    monkeypatch.setattr(bridge, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(InputError, match="ZeRO-3"):
        AutoModelForCausalLM.from_pretrained(folders["llama"])


# Generation


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_vl", "mllama"])
def test_generate_is_ours_and_writes_the_same(folders, family):
    model, theirs = AutoModelForCausalLM.from_pretrained(folders[family]), load_theirs(folders[family])
    tokens, inputs = images(family)
    config = transformers.GenerationConfig(max_new_tokens=8, eos_token_id=2, pad_token_id=3)
    for candidate in (model, ligermodels.from_transformers(theirs)):
        found = candidate.generate(input_ids=tokens, generation_config=config, **inputs)
        assert torch.equal(found, theirs.generate(input_ids=tokens, generation_config=config, **inputs))
    with pytest.raises(InputError, match="num_beams"):
        model.generate(tokens, num_beams=2, max_new_tokens=2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("plan", [
    {"": "disk"},
    {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu",
     "lm_head": "cpu"},
], ids=["all", "the blocks"])  # fmt: skip
def test_modules_on_the_disk(folders, family, plan, tmp_path):
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(folders[family], device_map=plan, offload_folder=str(tmp_path))
    theirs = load_theirs(folders[family])
    assert any(parameter.is_meta for parameter in model.parameters()) and model.device == torch.device("cpu")
    compare(model, theirs)
    options = dict(attention_mask=torch.ones_like(ids()), max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids(), **options), theirs.generate(ids(), **options))


# Adapters and quantised bases


def test_adapter_folders(folders, tmp_path):
    peft = pytest.importorskip("peft")
    theirs = load_theirs(folders["qwen2"])
    theirs.add_adapter(peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    theirs.eval().peft_config["default"].base_model_name_or_path = str(folders["qwen2"])
    theirs.save_pretrained(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")  # finds its base
    compare(model, theirs)
    model.save_pretrained(tmp_path / "again")
    other = load_theirs(folders["qwen2"])
    other.load_adapter(str(tmp_path / "again"))
    compare(other, theirs)


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao"])
@pytest.mark.filterwarnings("ignore")
def test_quantised_bases(tmp_path, name):
    pytest.importorskip(name)
    if name == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        settings = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    sizes = dict(SIZES, hidden_size=128, intermediate_size=192)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "base")
    # All in training mode: in evaluation bitsandbytes has other kernels on the CPU, which round otherwise.
    theirs, model = (
        load(tmp_path / "base", quantization_config=copy.deepcopy(settings), dtype=torch.float32).train()
        for load in (load_theirs, AutoModelForCausalLM.from_pretrained)
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids()).logits
    for candidate in (model, ligermodels.from_transformers(theirs)):
        expected, found = (m.model.layers[0].mlp.down_proj for m in (theirs, candidate))
        assert type(found) is type(expected) and type(found.weight) is type(expected.weight)
        compare(candidate, theirs)
        assert (candidate(ids()).logits - plain).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "quantised")
    compare(AutoModelForCausalLM.from_pretrained(tmp_path / "quantised").train(), model)
    ligermodels.from_transformers(theirs).save_pretrained(tmp_path / "native")
    compare(load_theirs(tmp_path / "native").train(), theirs)


# Trainers


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.filterwarnings("ignore")
def test_classifier(folders, tmp_path, family):
    pair = []
    for loads in (AutoModelForSequenceClassification, transformers.AutoModelForSequenceClassification):
        torch.manual_seed(0)  # of score, which the checkpoint lacks
        options = PLAIN if loads.__module__.startswith("transformers.") else {}
        pair.append(loads.from_pretrained(folders[family], num_labels=3, **options))
    ours, theirs = pair
    assert type(ours).__name__ == type(theirs).__name__ and shapes(ours) == shapes(theirs)
    assert not ours.can_generate() and ours._no_split_modules == set(ligermodels.ARCHS[family]._no_split_modules)
    padded, mask = ids(), torch.ones(2, 12, dtype=torch.long)
    padded[1, 7:], mask[1, 7:] = 3, 0
    ours.train().gradient_checkpointing_enable()
    labels = torch.tensor([2, 0])
    found = ours(padded, mask, labels=labels, num_items_in_batch=torch.tensor(2))
    expected = theirs.train()(padded, mask, labels=labels)
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    found.loss.backward()
    expected.loss.backward()
    for name, parameter in theirs.named_parameters():
        difference = (ours.get_parameter(name).grad - parameter.grad).abs().max()
        assert difference <= 1e-4 * parameter.grad.abs().max() + 1e-6, name
    ours.eval().save_pretrained(tmp_path)
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, **PLAIN)
    compare(opened, AutoModelForSequenceClassification.from_pretrained(tmp_path))
