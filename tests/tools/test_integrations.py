"""ligermodels.integrations.transformers: our modules in a real PreTrainedModel, and our model over their Parameters.

transformers' own model of the same checkpoint is the expectation of every figure.
"""

import copy
import warnings

import pytest
import torch
import transformers

import ligermodels
from ligermodels.arch.decoder import Decoder
from ligermodels.checkpoint.weights import named_weights
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.generation import graphs
from ligermodels.integrations import transformers as bridge
from ligermodels.integrations.transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    register,
    unregister,
)
from ligermodels.layers import moe
from tests.arch import llama_vision, qwen2_vl, qwen3_vl, suite, test_glm4_moe, test_qwen3_next
from tests.arch.suite import save_as_released
from tests.checkpoint.test_weights import Scaled
from tests.tiny import ExactRouter
from tests.tools.models import OWN, SIZES, write_checkpoint

DRAWN = dict(initializer_range=0.2)
VISION = {
    "qwen2_vl": qwen2_vl.tiny(DRAWN, **DRAWN),
    "qwen3_vl": qwen3_vl.qwen3_vl(DRAWN, **DRAWN),
    "qwen3_vl_moe": qwen3_vl.qwen3_vl_moe(DRAWN, **DRAWN),
    "qwen3_5": qwen3_vl.qwen3_5(DRAWN, **DRAWN),
    "qwen3_5_moe": qwen3_vl.qwen3_5_moe(DRAWN, initializer_range=0.1),  # 0.2: 5e-5 off fp64 in transformers
    "mllama": llama_vision.tiny(DRAWN, **DRAWN),
}
FAMILIES = (*OWN, *VISION)
TIED = {"llama": {"lm_head.weight"}, "gemma2": {"lm_head.weight"}}
# fp32 on both sides, a few hundred roundings deep, of logits around 5.
CLOSE = dict(rtol=1e-5, atol=2e-5)
PLAIN = dict(attn_implementation="eager", experts_implementation="eager")


def ids(rows=2, length=12, seed=0):
    return torch.randint(4, 80, (rows, length), generator=torch.Generator().manual_seed(seed))


def images(family):
    """The ids, and what a model that reads images takes beside them."""
    torch.manual_seed(0)
    if family in VISION and family != "mllama":
        inputs = qwen2_vl.inputs([[2, qwen2_vl.image(2, 2), 4]] * 2)
        return inputs.pop("input_ids"), inputs
    if family == "mllama":
        config = llama_vision.tiny()
        tokens, _, inputs = llama_vision.images(config, llama_vision.placements(config))
        return tokens, inputs
    return ids(), {}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The text models, and those that read images, with gates that are not zero."""
    made = tmp_path_factory.mktemp("models")
    options = {"mixtral": dict(output_router_logits=False)}  # which transformers does not take while generating
    folders = {family: write_checkpoint(made / family, family, **options.get(family, {})) for family in OWN}
    for family, config in VISION.items():
        torch.manual_seed(0)
        architecture = ligermodels.ARCHS[family].config_class.architecture
        model = getattr(transformers, architecture)._from_config(transformers.AutoConfig.for_model(**config), **PLAIN)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "gate" in name.split(".")[-1]:
                torch.nn.init.normal_(parameter, std=0.2)
        folders[family] = made / family
        save = save_as_released if family == "qwen3_5_moe" else type(model).save_pretrained
        save(model, folders[family])
    return folders


def theirs(folder, **options):
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, **PLAIN, **options)


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def compare(ours, theirs, family="llama"):
    tokens, inputs = images(family)
    with torch.no_grad():
        found, expected = (model(input_ids=tokens, **inputs).logits for model in (ours, theirs))
    torch.testing.assert_close(found, expected, **CLOSE)


def compare_training(ours, theirs, rounding=3e-5, **inputs):
    """Losses, and every gradient relative to its largest: a row that sums to nearly nothing is rounding."""
    losses = [model.train()(**inputs).loss for model in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    for name, parameter in theirs.named_parameters():
        found = ours.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), name
        if found is not None:
            assert (found - parameter.grad).abs().max() <= rounding * parameter.grad.abs().max() + 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, ligermodels.from_transformers])
def test_logits_losses_and_gradients_are_theirs(folders, family, load):
    expected = theirs(folders[family])
    twin = copy.deepcopy(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(expected if load is ligermodels.from_transformers else folders[family])
    assert isinstance(model, ligermodels.ARCHS[family])
    if load is ligermodels.from_transformers:
        shared = {name: id(parameter) for name, parameter in expected.named_parameters()}
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == shared
        assert model.state_dict().keys() == expected.state_dict().keys() - TIED.get(family, set())
    else:
        assert isinstance(model, type(expected)) and type(model).__name__ == type(expected).__name__
        assert type(model.config) is type(expected.config) and shapes(model) == shapes(expected)
        assert model.vocab_size == expected.config.get_text_config().vocab_size
        assert isinstance(model.get_decoder(), Decoder) and model.base_model is model.model
        assert model._no_split_modules == set(ligermodels.ARCHS[family]._no_split_modules)
        assert ("lm_head.weight" in dict(model.named_parameters())) == (family not in TIED)
    compare(model, twin, family)
    tokens, inputs = images(family)
    labels = tokens.masked_fill(tokens > 80, -100)
    compare_training(model, twin, rounding=6e-5, input_ids=tokens, labels=labels, **inputs)  # through text and tower


# from_transformers


def test_the_settings_of_their_model_are_taken_over(folders):
    model = theirs(folders["llama"], dtype=torch.bfloat16).train()
    model.model.embed_tokens.requires_grad_(False)
    model.activation_checkpointing_enable()
    model.generation_config.temperature = 0.3
    ours = ligermodels.from_transformers(model)
    assert ours.dtype == torch.bfloat16 and ours.training and ours.is_gradient_checkpointing
    assert not ours.model.embed_tokens.weight.requires_grad and ours.model.norm.weight.requires_grad
    assert ours.generation_config["temperature"] == 0.3 and ours.name_or_path == str(folders["llama"])


def test_persistent_buffers_are_shared_as_parameters_are(folders, monkeypatch):
    monkeypatch.setitem(bridge._CAUSAL, "LlamaForCausalLM", Scaled)
    model = theirs(folders["llama"])
    with pytest.raises(InputError, match=r"layers\.0\.layer_scalar is missing"):
        ligermodels.from_transformers(model)
    for layer in model.model.layers:
        layer.register_buffer("layer_scalar", torch.tensor(0.5))
        layer.scale = torch.nn.Module()
        layer.scale.register_buffer("channels", torch.randn(model.config.hidden_size))
    ours = ligermodels.from_transformers(model)
    weights, shared = dict(named_weights(ours)), dict(named_weights(model))
    assert weights.keys() == shared.keys() and all(weights[name] is shared[name] for name in weights)
    before = ours(ids()).logits
    model.model.layers[0].layer_scalar.zero_()
    assert not torch.equal(ours(ids()).logits, before)


def test_models_that_share_their_parameters_keep_their_size(folders):
    model = theirs(folders["llama"])
    rows = model.resize_token_embeddings(model.config.vocab_size + 3).num_embeddings
    ours = ligermodels.from_transformers(model)
    assert ours.config.vocab_size == len(ours.lm_head.weight) == rows
    for one in (ours, model):
        assert one.resize_token_embeddings() is one.resize_token_embeddings(rows) is one.get_input_embeddings()
        with pytest.raises(InputError, match="before from_transformers"):
            one.resize_token_embeddings(rows + 1)
        assert len(one.get_input_embeddings().weight) == one.config.vocab_size == rows


class Own(transformers.LlamaForCausalLM):
    """A user's subclass, under the name of transformers' class."""


Own.__name__ = "LlamaForCausalLM"


def untied(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def test_other_models_are_refused(folders):
    for change, message in (
        (lambda model: Own(model.config), "own classes LlamaForCausalLM, .*test_integrations.Llama"),
        (lambda model: model.model, "LlamaModel"),
        (untied, "lm_head.weight is not in Llama"),
    ):
        with pytest.raises(InputError, match=message):
            ligermodels.from_transformers(change(theirs(folders["llama"])))


# AutoModelForCausalLM


@pytest.mark.parametrize("read", [
    lambda output: output.logits, lambda output: output["logits"], lambda output: output.get("logits"),
    lambda output: output[1], lambda output: output[:2][1],
], ids=["attribute", "key", "get", "position", "slice"])  # fmt: skip
def test_logits_beside_a_loss_are_computed_when_they_are_read(folders, read):
    grads = []
    for load in (AutoModelForCausalLM.from_pretrained, theirs):
        model = load(folders["gemma2"]).train()
        output = model(input_ids=ids(), labels=ids())
        if load is not theirs:
            assert "logits" not in [*output] and output[0] is output.loss is output[:1][0]
            assert "logits" not in [*output]  # still fused
        logits = read(output)
        (output.loss + logits.square().mean()).backward()
        grads.append((output.loss.detach(), logits.detach(), next(model.model.layers[0].mlp.parameters()).grad))
        assert [*output][:2] == ["loss", "logits"] and read(output) is logits
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "mixtral", *VISION])
def test_what_it_saves_opens_everywhere(folders, tmp_path, family):
    model = AutoModelForCausalLM.from_pretrained(folders[family])
    model.save_pretrained(tmp_path / "saved")
    files = ligermodels.checkpoint.reading.open_checkpoint
    with files(folders[family]) as before, files(tmp_path / "saved") as after:
        assert before.headers == after.headers
        assert all(torch.equal(before.read(name), after.read(name)) for name in before.headers)
    compare(theirs(tmp_path / "saved"), model, family)
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
    monkeypatch.setattr(bridge, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(InputError, match="ZeRO-3"):
        AutoModelForCausalLM.from_pretrained(folders["llama"])


@pytest.mark.parametrize("family", ["llama", *VISION])
def test_generate_is_ours_and_writes_the_same(folders, family, monkeypatch):
    model, expected = AutoModelForCausalLM.from_pretrained(folders[family]), theirs(folders[family])
    tokens, inputs = images(family)
    config = transformers.GenerationConfig(max_new_tokens=8, eos_token_id=2, pad_token_id=3)
    for candidate in (model, ligermodels.from_transformers(expected)):
        found = candidate.generate(input_ids=tokens, generation_config=config, **inputs)
        assert torch.equal(found, expected.generate(input_ids=tokens, generation_config=config, **inputs))
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"})  # steps and kept caches, as on a GPU
    assert torch.equal(model.generate(input_ids=tokens, generation_config=config, **inputs), found)
    many = model.generate_batch([[5, 6, 7], [8]], generation_config=config).values()
    texts = [expected.generate(torch.tensor([output.prompt_ids]), generation_config=config)[0] for output in many]
    assert [output.prompt_ids + output.generated_tokens for output in many] == [text.tolist() for text in texts]
    with pytest.raises(InputError, match="num_beams"):
        model.generate(tokens, num_beams=2, max_new_tokens=2)


# Adapters, quantised bases, classifiers


def test_adapter_folders(folders, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    # transformers 5.24 asks for PEFT 0.22, which is not released, for all adapters; LoRA's calls are those of 0.21.
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0.21")
    expected = theirs(folders["qwen2"])
    expected.add_adapter(peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    expected.eval().peft_config["default"].base_model_name_or_path = str(folders["qwen2"])
    expected.save_pretrained(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")  # finds its base
    compare(model, expected)
    model.save_pretrained(tmp_path / "again")
    other = theirs(folders["qwen2"])
    other.load_adapter(str(tmp_path / "again"))
    compare(other, expected)


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao"])
@pytest.mark.filterwarnings("ignore")
def test_quantised_bases(quantizable, tmp_path, name):
    pytest.importorskip(name)
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    if name == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        settings = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    # All in training mode: in evaluation bitsandbytes has other kernels on the CPU, which round otherwise.
    expected, model = (
        load(quantizable["llama"], quantization_config=copy.deepcopy(settings), dtype=torch.float32).train()
        for load in (theirs, AutoModelForCausalLM.from_pretrained)
    )
    plain = AutoModelForCausalLM.from_pretrained(quantizable["llama"])(ids()).logits
    for candidate in (model, ligermodels.from_transformers(expected)):
        wanted, found = (m.model.layers[0].mlp.down_proj for m in (expected, candidate))
        assert type(found) is type(wanted) and type(found.weight) is type(wanted.weight)
        compare(candidate, expected)
        assert (candidate(ids()).logits - plain).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "quantised")
    compare(AutoModelForCausalLM.from_pretrained(tmp_path / "quantised").train(), model)
    ligermodels.from_transformers(expected).save_pretrained(tmp_path / "native")
    compare(theirs(tmp_path / "native").train(), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loads_ours", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_5_text"])
def test_classifier(folders, tmp_path, family, loads_ours):
    theirs_class, pair = getattr(transformers, loads_ours.__name__), []
    is_of_tokens = loads_ours is AutoModelForTokenClassification
    if is_of_tokens and family == "qwen3_5_text":
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            loads_ours.from_pretrained(folders[family])
        return
    config = transformers.AutoConfig.from_pretrained(folders[family], num_labels=3)
    config.classifier_dropout = 0.0
    for loads, options in ((loads_ours, {}), (theirs_class, PLAIN)):
        torch.manual_seed(0)  # of score, which the checkpoint lacks
        pair.append(loads.from_pretrained(folders[family], config=config, **options))
    ours, expected = pair
    assert family != "llama" or is_of_tokens or torch.equal(ours.score.weight, expected.score.weight)
    assert not is_of_tokens or (not ours.score.bias.any() and type(ours).from_config(ours.config).dropout.p == 0)
    ours.score.load_state_dict(expected.score.state_dict())  # loading Qwen3.5, transformers draws more numbers
    assert type(ours).__name__ == type(expected).__name__ and shapes(ours) == shapes(expected)
    assert not ours.can_generate() and ours._no_split_modules == set(ours.arch._no_split_modules)
    padded, mask = ids(), torch.ones(2, 12, dtype=torch.long)
    padded[1, 7:], mask[1, 7:] = 3, 0
    inputs = dict(input_ids=padded, attention_mask=mask)
    found, wanted = ours(**inputs).logits, expected(**inputs).logits
    kept = mask.bool() if is_of_tokens else slice(None)  # what padding sees is anybody's choice
    torch.testing.assert_close(found[kept], wanted[kept], **CLOSE)
    ours.gradient_checkpointing_enable()
    labels = (padded % 3).masked_fill(mask == 0, -100) if is_of_tokens else torch.tensor([2, 0])
    assert ours(**inputs, labels=labels, num_items_in_batch=torch.tensor(2)).loss.isfinite()
    compare_training(ours, expected, 1e-4, **inputs, labels=labels)
    ours.eval().save_pretrained(tmp_path)
    compare(theirs_class.from_pretrained(tmp_path, **PLAIN), loads_ours.from_pretrained(tmp_path))


THEIR_TOKENS = transformers.AutoModelForTokenClassification


def test_a_token_classifier_drops_what_the_config_says(folders):
    for given, expected in ({"classifier_dropout": 0.3}, 0.3), ({"hidden_dropout": 0.2}, 0.2), ({}, 0.1):
        config = transformers.AutoConfig.from_pretrained(folders["llama"])
        vars(config).update(given)
        models = (loads.from_config(config) for loads in (AutoModelForTokenClassification, THEIR_TOKENS))
        assert [model.dropout.p for model in models] == [expected, expected]


# AutoModel


def their_base(folder):
    return transformers.AutoModel.from_pretrained(folder, **PLAIN)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_its_head(folders, tmp_path, family):
    """Hidden states and gradients; what is saved opens as theirs, and a copy computes with its own weights."""
    ours, expected = AutoModel.from_pretrained(folders[family]), their_base(folders[family])
    assert isinstance(ours, type(expected)) and type(ours).__name__ == type(expected).__name__
    assert shapes(ours) == shapes(expected) and not ours.training and not ours.can_generate()
    tokens, inputs = images(family)
    results = [
        model(input_ids=tokens, **inputs, output_hidden_states=family not in VISION) for model in (ours, expected)
    ]
    torch.testing.assert_close(*(output.last_hidden_state for output in results), **CLOSE)
    for one, other in zip(*(output.hidden_states or () for output in results), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    for model, output in zip((ours, expected), results, strict=True):
        state = output.last_hidden_state
        (state * torch.cos(torch.arange(state.numel())).view(state.shape)).mean().backward()
        assert model.train() is model and model.get_input_embeddings().weight.grad.any()
    for name, parameter in expected.named_parameters():
        found, wanted = ours.get_parameter(name).grad, parameter.grad
        assert (found is None) == (wanted is None), name
        assert found is None or (found - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-6, name
    ours.zero_grad()
    ours.gradient_checkpointing_enable()
    again = ours(input_ids=tokens, **inputs, use_cache=False)
    assert "past_key_values" not in again and ours.decoder.checkpointing.recompute == "block"
    ours.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        opened = their_base(tmp_path)(input_ids=tokens, **inputs).last_hidden_state
        torch.testing.assert_close(opened, results[0].last_hidden_state, **CLOSE)
        copied = copy.deepcopy(ours)
        copied.get_input_embeddings().weight.zero_()
        assert torch.equal(ours(input_ids=tokens, **inputs)[0], results[0].last_hidden_state)
        assert not torch.equal(copied(input_ids=tokens, **inputs)[0], results[0].last_hidden_state)


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_its_head_in_use(folders):
    """A cache, embeddings in place of ids, more tokens, half precision, and a LoRA adapter."""
    peft = pytest.importorskip("peft")
    model = AutoModel.from_pretrained(folders["llama"])
    tokens = ids()
    with torch.no_grad():
        whole = model(tokens).last_hidden_state
        assert "past_key_values" in model(tokens) and "past_key_values" not in model.train()(tokens)
        first = model.eval()(tokens[:, :7], use_cache=True)
        rest = model(tokens[:, 7:], past_key_values=first.past_key_values)
        torch.testing.assert_close(torch.cat([first[0], rest[0]], 1), whole, **CLOSE)
        given = model(inputs_embeds=model.get_input_embeddings()(tokens), use_cache=False)
        torch.testing.assert_close(given[0], whole, **CLOSE)
        model.resize_token_embeddings(90)
        assert torch.equal(model(tokens)[0], whole) and model(torch.tensor([[89]]))[0].shape == (1, 1, whole.shape[-1])
        halved = model.to(torch.bfloat16)(tokens)
        assert halved[0].dtype == torch.bfloat16 and (halved[0] - whole).abs().max() < 0.3
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["q_proj"]))
    adapted(tokens)[0].sum().backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert trained and all("lora_" in name for name in trained)


# register


@pytest.fixture
def registered():
    register()
    yield
    unregister()


AUTOS = [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification]


@pytest.mark.filterwarnings("ignore")
def test_register_and_unregister(folders):
    """A class that a script has imported before gives ours, then theirs again."""
    loads = {ours.__name__: (getattr(transformers, ours.__name__), ours) for ours in AUTOS}
    for _ in range(2):
        register()
        register()
        for name, (auto, ours) in loads.items():
            for model in (
                auto.from_pretrained(folders["llama"]),
                auto.from_config(ours.from_pretrained(folders["llama"]).config),
            ):
                assert type(model) is type(ours.from_pretrained(folders["llama"])), name
        unregister()
        unregister()
        for auto, _ in loads.values():
            assert type(auto.from_pretrained(folders["llama"])).__module__.startswith("transformers.")
    for family in ("qwen3_vl", "mllama"):
        register()
        auto = transformers.AutoModelForImageTextToText
        model = auto.from_pretrained(folders[family])
        assert type(model) is type(AutoModelForImageTextToText.from_pretrained(folders[family]))
        assert type(model) is type(transformers.AutoModelForMultimodalLM.from_pretrained(folders[family]))
        unregister()
        compare(model, theirs(folders[family]), family)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5"])
def test_a_registered_model_is_theirs_in_numbers(folders, registered, family):
    """Of Qwen3.5 with images, theirs is the text model alone: the same here."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[family], attn_implementation="eager")
    unregister()
    expected = transformers.AutoModelForCausalLM.from_pretrained(folders[family], **PLAIN)
    assert type(model).__module__ == bridge.__name__ and type(model).__name__ == type(expected).__name__
    compare(model, expected)
    compare_training(model, expected, input_ids=ids(), labels=ids())


def test_what_register_leaves_to_transformers(folders, tmp_path, registered, monkeypatch):
    """Other families and heads, rows of another order, and parts that their models build for themselves."""
    text = transformers.AutoConfig.for_model("llama", **SIZES)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)
    llava = transformers.AutoModelForImageTextToText.from_config(config)
    assert type(llava.model.language_model) is transformers.LlamaModel
    answers = transformers.AutoModelForQuestionAnswering.from_config(text)
    assert type(answers.transformer) is transformers.LlamaModel
    gpt2 = transformers.AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=1, vocab_size=9)
    assert type(transformers.AutoModelForCausalLM.from_config(gpt2)) is transformers.GPT2LMHeadModel
    folder = suite.write_checkpoint(test_qwen3_next.tiny(), tmp_path, norm=0.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is transformers.Qwen3NextForCausalLM
    # a trainer is no module: what a user's model_init loads in its constructor is ours
    arguments = transformers.TrainingArguments(tmp_path / "out", use_cpu=True, report_to=[])
    trainer = transformers.Trainer(
        model_init=lambda: transformers.AutoModelForCausalLM.from_pretrained(folders["llama"]), args=arguments
    )
    assert isinstance(trainer.model, ligermodels.Llama)


def test_what_stays_in_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(moe, "Router", ExactRouter)
    config = {**SIZES, **DRAWN, "model_type": "mixtral", "num_local_experts": 4}
    folder = ligermodels.Mixtral.from_config(config, seed=0).save_pretrained(tmp_path)
    ours, model = (
        load(folder, dtype=torch.bfloat16) for load in (ligermodels.load, AutoModelForCausalLM.from_pretrained)
    )
    dtypes = {name: parameter.dtype for name, parameter in ours.named_parameters()}
    assert {torch.float32, torch.bfloat16} == {*dtypes.values()}
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    assert torch.equal(model(ids()).logits, ours(ids()).logits)


def test_a_family_whose_rows_have_another_order_is_refused(tmp_path):
    folder = suite.write_checkpoint(test_qwen3_next.tiny(), tmp_path, norm=0.0)
    for load in (AutoModelForCausalLM.from_pretrained, lambda path: ligermodels.from_transformers(theirs(path))):
        with pytest.raises(InputError, match=r"rows of a Qwen3Next have another order .*ligermodels\.load"):
            load(folder)


def test_a_router_in_fp32_and_its_bias_are_shared(tmp_path):
    folder = suite.write_checkpoint(test_glm4_moe.tiny(attention_bias=True), tmp_path)
    expected = theirs(folder)
    for load in (AutoModelForCausalLM.from_pretrained, lambda path: ligermodels.from_transformers(theirs(path))):
        model = load(folder)
        assert shapes(model) == shapes(expected)
        compare(model, expected)
