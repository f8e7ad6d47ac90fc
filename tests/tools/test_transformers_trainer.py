"""transformers' Trainer: the losses, predictions and folders of our models are those of transformers' own."""

import logging
import shutil
import sys
import types

import numpy as np
import pytest
import torch

import ligermodels
from ligermodels.errors import LigermodelsError
from tests.tools.models import FAMILIES, SIZES, Texts, make_ids, make_tokenizer, ours, theirs, write_checkpoint

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers.integrations import TensorBoardCallback  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / request.param, request.param)


def make_trainer(model, folder, trainer_options=None, **options):
    defaults = dict(
        save_strategy="no", max_steps=4, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        learning_rate=1e-2, report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, seed=1,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(folder, **{**defaults, **options})
    return transformers.Trainer(
        model, arguments, train_dataset=Texts(), eval_dataset=Texts(8), **(trainer_options or {})
    )


def trained(model, folder, trainer_options=None, **options):
    trainer = make_trainer(model, folder, trainer_options, **options)
    trainer.train()
    return trainer


def logged(trainer, name="loss"):
    return torch.tensor([float(entry[name]) for entry in trainer.state.log_history if name in entry])


def assert_same_logs(found, expected, *names):
    for name in names:
        assert len(logged(expected, name)) > 1
        # fp32 on both sides: gradients differ in their last bits, which Adam's division spreads over a few steps.
        torch.testing.assert_close(logged(found, name), logged(expected, name), rtol=1e-4, atol=0)


def checkpointing(**settings):
    return dict(activation_checkpointing=True, activation_checkpointing_kwargs=settings)


WAYS = {
    "plain": {},
    "accumulation": dict(gradient_accumulation_steps=2),
    "checkpointing": checkpointing(),
    "non-reentrant": checkpointing(use_reentrant=False),
    "label smoothing": dict(label_smoothing_factor=0.3),
    "smoothing, accumulation": dict(label_smoothing_factor=0.3, gradient_accumulation_steps=2),
    "noise": dict(neftune_noise_alpha=5.0),
    "compiled": dict(torch_compile=True, torch_compile_backend="eager"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_losses_are_those_of_transformers(folder, tmp_path, way):
    options = {"eval_strategy": "steps", "eval_steps": 2, **way}
    found, expected = (trained(make(folder), tmp_path / make.__name__, **options) for make in (ours, theirs))
    assert_same_logs(found, expected, "loss", "eval_loss", "grad_norm")
    assert found.state.total_flos == expected.state.total_flos > 0


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_losses_of_other_families(tmp_path, family):
    """Softcaps and windows; experts, whose balancing loss is added once a micro-batch."""
    folder = write_checkpoint(tmp_path / "model", family)
    slow = dict(attn_implementation="eager", experts_implementation="eager")
    found = trained(ours(folder), tmp_path / "ours", gradient_accumulation_steps=2)
    expected = trained(theirs(folder, **slow), tmp_path / "theirs", gradient_accumulation_steps=2)
    assert_same_logs(found, expected, "loss")


def test_reentrant_checkpointing_becomes_a_warning(folder, tmp_path):
    expected = trained(ours(folder), tmp_path)
    with pytest.warns(UserWarning, match="use_reentrant=True is not used here"):
        found = trained(ours(folder), tmp_path, **checkpointing(use_reentrant=True))
    assert found.model.is_gradient_checkpointing
    assert_same_logs(found, expected, "loss")


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_liger_kernel_changes_nothing_and_evaluates(folder, tmp_path, monkeypatch, smoothing):
    def patch(**options):
        raise AssertionError("liger-kernel patches transformers' models, and this is none")

    fake = types.ModuleType("liger_kernel.transformers")
    fake._apply_liger_kernel_to_instance = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", fake)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    options = dict(eval_strategy="steps", eval_steps=2, label_smoothing_factor=smoothing)
    expected = trained(theirs(folder), tmp_path, **options)
    model, seen = ours(folder), []
    model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((kwargs.get("skip_logits"), "logits" in output)),
        with_kwargs=True,
    )
    found = trained(model, tmp_path, use_liger_kernel=True, **options)
    assert_same_logs(found, expected, "loss", "eval_loss")
    # In evaluation Trainer asks for no logits; without labels the label smoother needs them all the same.
    assert set(seen) == ({(None, True), (True, True)} if smoothing else {(None, False), (True, False)})


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_predictions_and_metrics_are_those_of_transformers(folder, tmp_path, smoothing):
    def compute_metrics(predictions):
        logits, labels = predictions
        assert isinstance(logits, np.ndarray) and logits.shape == (*labels.shape, 97)
        hits = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
        return {"accuracy": hits.mean(), "score": float(np.abs(logits[labels != -100]).sum())}

    results = []
    for make in (ours, theirs):
        trainer = make_trainer(
            make(folder), tmp_path, dict(compute_metrics=compute_metrics), label_smoothing_factor=smoothing
        )
        assert trainer.label_names == ["labels"] and not trainer.can_return_loss
        predictions = trainer.predict(Texts(6))
        results.append((predictions, trainer.evaluate(), trainer.predict(Unlabelled(6))))
    (found, metrics, unlabelled), (expected, expected_metrics, expected_unlabelled) = results
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)
    tokens = found.label_ids != -100  # what stands at padding means nothing
    for one, other in ((found, expected), (unlabelled, expected_unlabelled)):
        # fp32 logits of about 5, by kernels and by eager operations
        np.testing.assert_allclose(one.predictions[tokens], other.predictions[tokens], rtol=0, atol=1e-5)
    for name in ("eval_loss", "eval_accuracy", "eval_score"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5)


class Unlabelled(Texts):
    def __getitem__(self, index):
        return {name: value for name, value in super().__getitem__(index).items() if name != "labels"}


def test_forward_returns_what_trainers_take_apart(folder):
    model, expected, ids = ours(folder), theirs(folder), make_ids(2, 7)
    with torch.no_grad():
        output, theirs_output = model(ids, labels=ids), expected(ids, labels=ids)
        assert list(output) == ["loss", "logits"]
        torch.testing.assert_close(output[1:][0], theirs_output[1:][0], rtol=0, atol=1e-5)  # fp32
        assert list(model(ids, labels=ids, skip_logits=True)) == ["loss"]
        cached = model(ids, labels=ids, use_cache=True)
    assert [key for key in cached if key not in model.config.keys_to_ignore_at_inference] == ["loss", "logits"]
    assert list(model.train()(ids, labels=ids)) == ["loss"]
    assert list(model.eval()(ids, labels=ids)) == ["loss"]  # with gradients the logits would stay in memory


def test_the_same_parameters_decay(folder, tmp_path):
    names, expected = (
        set(make_trainer(model, tmp_path).get_decay_parameter_names(model)) & dict(model.named_parameters()).keys()
        for model in (ours(folder), theirs(folder))
    )
    assert names == expected and names < dict(ours(folder).named_parameters()).keys()


def test_resumed_and_best_are_exact(folder, tmp_path):
    options = dict(
        save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", max_steps=6, learning_rate=3e-2,
    )  # fmt: skip
    whole = trained(ours(folder), tmp_path / "run", **options)
    expected = trained(theirs(folder), tmp_path / "theirs", **options)
    assert_same_logs(whole, expected, "loss", "eval_loss")
    best = whole.state.best_model_checkpoint
    assert best.rpartition("/")[2] == expected.state.best_model_checkpoint.rpartition("/")[2]
    resumed = make_trainer(ours(folder), tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert torch.equal(logged(resumed)[-2:], logged(whole)[-2:])
    shutil.copy(folder / "config.json", best)
    for model in (whole.model, resumed.model, ours(best)):
        for one, other in zip(model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_run_goes_on_from_a_checkpoint_of_the_other(folder, tmp_path):
    """The optimizer's state too, which names no parameter: their order says whose it is."""
    options = dict(save_strategy="steps", save_steps=2)
    whole = trained(theirs(folder), tmp_path / "theirs", **options)
    trained(ours(folder), tmp_path / "ours", **options)
    for make, source in ((ours, "theirs"), (theirs, "ours")):
        resumed = make_trainer(make(folder), tmp_path / "resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / source / "checkpoint-2"))
        assert_same_logs(resumed, whole, "loss")


def test_weights_that_a_checkpoint_lacks_are_a_warning(folder, tmp_path, caplog):
    trainer = make_trainer(ours(folder), tmp_path)
    state = trainer.model.state_dict()
    del state["model.norm.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    logging.getLogger("transformers").propagate = True
    trainer._load_from_checkpoint(str(tmp_path))
    assert "missing keys in the checkpoint model loaded: ['model.norm.weight']" in caplog.text


def test_a_saved_folder_opens_here_and_in_transformers(folder, tmp_path):
    trainer = trained(ours(folder), tmp_path / "run", dict(processing_class=make_tokenizer()), max_steps=2)
    ids = make_ids(2, 8)
    expected = trainer.model.eval()(ids).logits
    trainer.save_model(tmp_path / "saved")
    with pytest.raises(LigermodelsError, match="pass config="):
        ours(tmp_path / "saved")
    assert torch.equal(ours(tmp_path / "saved", config=folder)(ids).logits, expected)
    shutil.copy(folder / "config.json", tmp_path / "saved")
    assert torch.equal(ours(tmp_path / "saved")(ids).logits, expected)
    torch.testing.assert_close(theirs(tmp_path / "saved")(ids).logits, expected, rtol=0, atol=1e-5)  # fp32 logits
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == make_tokenizer().chat_template
    )
    trainer.model.save_pretrained(tmp_path / "ours")
    assert torch.equal(ours(tmp_path / "ours")(ids).logits, expected)


def test_names_that_trainer_and_its_callbacks_read(folder, tmp_path):
    model, expected = ours(folder), theirs(folder)
    assert model.config._name_or_path == model.name_or_path == expected.name_or_path == str(folder)
    assert type(model).from_hub(folder, progress=False).name_or_path == str(folder)
    assert model.can_generate() and model.vocab_size == 97 and model.warnings_issued == {}
    assert model._tied_weights_keys == expected._tied_weights_keys
    assert repr(model).startswith(f"{type(model).__name__}(\n  (model): Decoder(")
    assert model.config.to_dict()["_name_or_path"] == str(folder)
    model.save_pretrained(tmp_path / "saved")
    assert "_name_or_path" not in (tmp_path / "saved" / "config.json").read_text()
    written = {}

    class Writer:
        def add_text(self, tag, text):
            written[tag] = text

        def __getattr__(self, name):
            return lambda *args, **options: None

    callback = TensorBoardCallback.__new__(TensorBoardCallback)  # past its look for the tensorboard package
    callback.tb_writer, callback.logging_dir = Writer(), str(tmp_path)
    trained(model, tmp_path / "run", dict(callbacks=[callback]), max_steps=2)
    assert f'"model_type": "{model.config.model_type}"' in written["model_config"]
    assert model.config.use_cache is False
    trainer = make_trainer(model, tmp_path / "run", dict(processing_class=make_tokenizer()))
    trainer.create_model_card(model_name="tiny")
    assert "tiny" in (tmp_path / "run" / "README.md").read_text()


def test_trainer_knows_that_every_arch_shifts_its_labels():
    for arch in ligermodels.ARCHS.values():
        model = types.SimpleNamespace(config=arch.config_class)
        assert arch._get_name(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def test_special_tokens_of_the_tokenizer_reach_the_configs(folder, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "z"
    model, expected = ours(folder), theirs(folder)
    for one in (model, expected):
        trained(one, tmp_path, dict(processing_class=tokenizer), max_steps=2)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(model.config, name) == getattr(expected.config, name)
        assert getattr(model.generation_config, name) == getattr(expected.generation_config, name)


class TestResizing:
    @pytest.mark.parametrize("number", [97, 105, 60, (None, 64), (98, 16), (3, None)], ids=str)
    def test_is_that_of_transformers(self, folder, tmp_path, number):
        number, multiple = number if isinstance(number, tuple) else (number, None)
        models = ours(folder), theirs(folder)
        models[0](make_ids(1, 5), labels=make_ids(1, 5)).loss.backward()  # gradients of the old shape do not stay
        for model in models:
            torch.manual_seed(0)
            table = model.get_input_embeddings()
            assert model.resize_token_embeddings() is table
            assert model.resize_token_embeddings(number, pad_to_multiple_of=multiple) is table
        (model, expected), rows = models, models[1].config.vocab_size
        assert model.config.vocab_size == model.vocab_size == rows == model.lm_head.out_features
        assert model.get_input_embeddings().num_embeddings == rows
        assert model.get_input_embeddings().padding_idx == expected.get_input_embeddings().padding_idx
        for name, parameter in model.named_parameters():
            # New rows are drawn with a std of 0.2 * sqrt(1e-9) = 6e-6; two draws are closer than ten times that.
            torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=0, atol=6e-5, msg=name)
        if rows > 97:
            assert 1e-6 < table.weight[97:].std(0).mean() < 3e-5  # drawn, not copied
        ids = make_ids(2, 8) % min(rows, 32)
        logits, loss = model(ids).logits, model(ids, labels=ids).loss
        torch.testing.assert_close(logits[..., :97], expected(ids).logits[..., :97], rtol=0, atol=1e-5)  # fp32 logits
        torch.testing.assert_close(loss, expected(ids, labels=ids).loss, rtol=1e-4, atol=0)  # with the drawn rows
        loss.backward()
        model.save_pretrained(tmp_path / "saved")
        for load in (
            (ours, theirs) if rows > 3 else (ours,)
        ):  # transformers' does not open where the pad token has no row
            torch.testing.assert_close(load(tmp_path / "saved")(ids).logits, logits, rtol=0, atol=1e-5)

    def test_without_the_mean_rows_are_drawn(self, folder):
        model = ours(folder)
        old = model.get_input_embeddings().weight.detach().clone()
        model.resize_token_embeddings(1000, mean_resizing=False)
        table = model.get_input_embeddings().weight
        assert torch.equal(table[:97], old)
        # The std of 28,896 draws is within 2 % of that of the distribution but once in 10^6 times.
        assert table[97:].std().item() == pytest.approx(model.config.initializer_range, rel=0.02)
        assert (model.lm_head.weight is table) == model.config.tie_word_embeddings

    def test_of_a_head_with_a_bias(self, folder):
        model = ours(folder)
        model.set_output_embeddings(torch.nn.Linear(32, 97))
        bias = model.lm_head.bias.detach().clone()
        model.resize_token_embeddings(99)
        assert torch.equal(model.lm_head.bias[:97], bias)
        torch.testing.assert_close(model.lm_head.bias[97:], bias.mean().expand(2), rtol=0, atol=1e-6)
        assert model(make_ids(1, 4)).logits.shape[-1] == 99

    def test_rows_that_cannot_be_meant(self, folder):
        model = ours(folder)
        for arguments in ((0,), (-3,), (1.5,), (True,), (100, 0), (100, "8")):
            with pytest.raises(LigermodelsError, match="must be a positive number"):
                model.resize_token_embeddings(*arguments)
        model.lm_head = torch.nn.Sequential(model.lm_head)
        with pytest.raises(LigermodelsError, match=r"lm_head is a Sequential .* before they are sharded"):
            model.resize_token_embeddings(100)


class TestReplacing:
    def test_a_replaced_table_is_seen_by_a_tied_head_alone(self, folder):
        model, expected = ours(folder), theirs(folder)
        ids = make_ids(2, 6)
        for one in (model, expected):
            torch.manual_seed(3)
            one.set_input_embeddings(torch.nn.Embedding(97, 32))
            one.tie_weights()
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == model.config.tie_word_embeddings
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-4)
        model(ids, labels=ids).loss.backward()
        expected(ids, labels=ids).loss.backward()
        torch.testing.assert_close(
            model.get_input_embeddings().weight.grad, expected.get_input_embeddings().weight.grad, rtol=1e-4, atol=1e-5
        )

    def test_a_replaced_head_keeps_the_fused_loss_and_is_saved(self, folder, tmp_path):
        model, expected = ours(folder), theirs(folder)
        ids = make_ids(2, 6)
        head = torch.nn.Linear(32, 97)
        for one in (model, expected):
            one.set_output_embeddings(head)
        assert model.get_output_embeddings().weight is head.weight and model.lm_head.bias is head.bias
        assert not model.lm_head.is_tied and not model.config.tie_word_embeddings
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(ids, labels=ids).loss, expected(ids, labels=ids).loss, rtol=1e-5, atol=0)
        model.set_output_embeddings(torch.nn.Linear(32, 97, bias=False))
        model.save_pretrained(tmp_path / "saved")
        for load in (ours, theirs):
            torch.testing.assert_close(load(tmp_path / "saved")(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
        head = torch.nn.Linear(32, 97, bias=False)
        head.weight = model.get_input_embeddings().weight
        model.set_output_embeddings(head)
        assert model.lm_head.is_tied and model.lm_head.bias is None and model.config.tie_word_embeddings

    def test_scale_and_softcap_belong_to_the_architecture(self):
        config = dict(
            vocab_size=97, hidden_size=32, intermediate_size=44, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=3.0,
        )  # fmt: skip
        model = ligermodels.Gemma2.from_config(config, device="cpu")
        ids, embeddings, head = make_ids(2, 6), torch.nn.Embedding(97, 32), torch.nn.Linear(32, 97, bias=False)
        expected = model(ids).logits
        embeddings.weight, head.weight = model.get_input_embeddings().weight, torch.nn.Parameter(model.lm_head.weight)
        model.set_input_embeddings(embeddings)
        model.set_output_embeddings(head)
        assert torch.equal(model(ids).logits, expected) and model.get_input_embeddings().weight is embeddings.weight

    def test_a_table_with_rows_for_images_is_not_resized(self):
        with torch.device("meta"):
            model = ligermodels.Llama.from_config(SIZES)
            model.model.embed_tokens = torch.nn.Embedding(105, 32)  # as LlamaVision has it
        with pytest.raises(LigermodelsError, match="105 rows and lm_head 97"):
            model.resize_token_embeddings(120)


def test_a_pipeline_writes_what_it_writes_for_transformers(folder):
    results = []
    for make in (ours, theirs):
        pipe = transformers.pipeline("text-generation", model=make(folder), tokenizer=make_tokenizer(), device="cpu")
        options = dict(max_new_tokens=6, do_sample=False)
        chat = [{"role": "user", "content": "a b c"}]
        results.append([pipe(["a b c d", "e f"], batch_size=2, **options), pipe(chat, **options)])
    assert results[0] == results[1]
