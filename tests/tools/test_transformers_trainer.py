"""transformers' Trainer: the losses, predictions and folders of our models are those of transformers' own."""

import shutil
import types

import numpy as np
import pytest
import torch

import ligermodels
from ligermodels.errors import LigermodelsError
from ligermodels.integrations.transformers import AutoModelForCausalLM
from tests.tools.models import Texts, assert_same_logs, logged, make_ids, make_tokenizer, make_trainer, ours, theirs

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402


def trained(model, folder, trainer_options=None, **options):
    trainer = make_trainer(model, folder, trainer_options, **options)
    trainer.train()
    return trainer


WAYS = {
    "plain": {},
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
    decaying = [{*one.get_decay_parameter_names(one.model)} for one in (found, expected)]
    decaying = [names & dict(theirs(folder).named_parameters()).keys() for names in decaying]
    assert decaying[0] == decaying[1] < dict(found.model.named_parameters()).keys()


def test_predictions_and_metrics_are_those_of_transformers(folder, tmp_path):
    def compute_metrics(predictions):
        logits, labels = predictions
        hits = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
        return {"accuracy": hits.mean(), "score": float(np.abs(logits[labels != -100]).sum())}

    results = []
    for make in (ours, theirs):
        options = dict(compute_metrics=compute_metrics)
        trainer = make_trainer(make(folder), tmp_path, options, label_smoothing_factor=0.3)
        results.append((trainer.predict(Texts(6)), trainer.evaluate()))
    (found, metrics), (expected, expected_metrics) = results
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)
    tokens = found.label_ids != -100  # logits at padding mean nothing
    # fp32 logits of about 5, by kernels and by eager operations
    np.testing.assert_allclose(found.predictions[tokens], expected.predictions[tokens], rtol=0, atol=1e-5)
    for name in ("eval_loss", "eval_accuracy", "eval_score"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5)


class Padded(Texts):
    """Rows padded on the left, as prompts to continue are. The first token is not predicted from padding."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        row = {name: values.roll(index % 3) for name, values in row.items()}
        return row | {"labels": row["labels"].index_fill(0, torch.tensor(index % 3), -100)}


def test_generated_predictions_are_those_of_transformers(folder, tmp_path):
    def count(predictions):
        return {"sum": float(np.where(predictions.predictions > 0, predictions.predictions, 0).sum())}

    results = []
    for make in (ours, AutoModelForCausalLM.from_pretrained, theirs):
        arguments = transformers.Seq2SeqTrainingArguments(
            tmp_path, predict_with_generate=True, generation_max_length=18, max_steps=2, eval_strategy="steps",
            eval_steps=1, learning_rate=1e-2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Seq2SeqTrainer(
            make(folder), arguments, train_dataset=Padded(), eval_dataset=Padded(8), compute_metrics=count,
            processing_class=make_tokenizer(),
        )  # fmt: skip
        trainer.train()
        results.append((trainer, trainer.predict(Padded(4)).predictions))
    (expected, tokens) = results.pop()
    for found, written in results:
        assert_same_logs(found, expected, "eval_loss", "eval_sum")
        np.testing.assert_array_equal(written, tokens)


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


def test_a_saved_folder_opens_here_and_in_transformers(folder, tmp_path):
    tokenizer = ligermodels.Tokenizer.from_hub(folder)
    trainer = trained(ours(folder), tmp_path / "run", dict(processing_class=tokenizer), max_steps=2)
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


def test_trainer_knows_that_every_arch_shifts_its_labels():
    for arch in ligermodels.ARCHS.values():
        model = types.SimpleNamespace(config=arch.config_class)
        assert arch._get_name(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


@pytest.mark.parametrize("number, multiple", [(60, None), (98, 16)])
def test_resized_embeddings_are_those_of_transformers(folder, tmp_path, number, multiple):
    model, expected = ours(folder), theirs(folder)
    for one in (model, expected):
        torch.manual_seed(0)
        table = one.resize_token_embeddings(number, pad_to_multiple_of=multiple)
        assert table is one.get_input_embeddings()
    rows = expected.config.vocab_size
    assert model.config.vocab_size == model.vocab_size == rows == model.lm_head.out_features
    for name, parameter in model.named_parameters():
        # New rows are drawn with a std of 0.2 * sqrt(1e-9) = 6e-6; two draws are closer than ten times that.
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=0, atol=6e-5, msg=name)
    ids = make_ids(2, 8)
    torch.testing.assert_close(model(ids, labels=ids).loss, expected(ids, labels=ids).loss, rtol=1e-4, atol=0)
    model.save_pretrained(tmp_path / "saved")
    for load in (ours, theirs):
        torch.testing.assert_close(load(tmp_path / "saved")(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_a_replaced_table_is_seen_by_a_tied_head_alone_and_a_replaced_head_is_saved(folder, tmp_path):
    model, expected, ids = ours(folder), theirs(folder), make_ids(2, 6)
    for one in (model, expected):
        torch.manual_seed(3)
        one.set_input_embeddings(torch.nn.Embedding(97, 32))
        one.tie_weights()
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == model.config.tie_word_embeddings
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-4)
    head = torch.nn.Linear(32, 97)
    for one in (model, expected):
        one.set_output_embeddings(head)
    assert model.get_output_embeddings().weight is head.weight and not model.config.tie_word_embeddings
    torch.testing.assert_close(model(ids, labels=ids).loss, expected(ids, labels=ids).loss, rtol=1e-5, atol=0)
    model.set_output_embeddings(torch.nn.Linear(32, 97, bias=False))
    model.save_pretrained(tmp_path / "saved")
    for load in (ours, theirs):
        torch.testing.assert_close(load(tmp_path / "saved")(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def by_pipeline(model):
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=make_tokenizer(), device="cpu")
    options = dict(max_new_tokens=6, do_sample=False)
    return [pipe(["a b c d", "e f"], batch_size=2, **options), pipe([{"role": "user", "content": "a b c"}], **options)]


def by_outlines(model):
    outlines = pytest.importorskip("outlines")
    model, options = outlines.from_transformers(model, make_tokenizer()), dict(max_new_tokens=8, do_sample=False)
    form = outlines.types.Regex("[a-d]{3}(xy|z)")
    return [model("a b c", **options), model.batch(["a b c", "d"], form, **options)]


@pytest.mark.parametrize("write", [by_pipeline, by_outlines])
def test_texts_are_those_of_transformers_model(folder, write):
    ours_native, integrated, expected = (
        write(make(folder)) for make in (ours, AutoModelForCausalLM.from_pretrained, theirs)
    )
    assert ours_native == integrated == expected
