"""`ligermodels bench`: what it counts, prints and writes, and how it ends."""

import json
import time
from pathlib import Path

import pytest
import torch

import ligermodels
from ligermodels.cli import bench
from tests.cli.commands import run, write_checkpoint

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def on_forward(monkeypatch):
    """on_forward(function of the ids): called before each forward pass of the model that is measured."""

    def set_hook(hook):
        def loaded(args, load=bench.load_model):
            model = load(args)
            model.register_forward_pre_hook(lambda module, a, inputs: hook(inputs["input_ids"]), with_kwargs=True)
            return model

        monkeypatch.setattr(bench, "load_model", loaded)

    return set_hook


def test_times_tokens_and_files(capsys, folder, tmp_path, on_forward):
    passes, starts = [], []

    def wait(ids):
        passes.append(tuple(ids.shape))
        starts.append(time.perf_counter())
        time.sleep(0.4 if ids.shape[1] > 1 else 0.01)

    on_forward(wait)
    sizes = ("--batches", "1,3", "--prompts", "16,600", "--new", 9)
    status, stdout, stderr = run(capsys, "bench", folder, *sizes, "--out", tmp_path / "new" / "out")
    assert status == 0 and "skipped prompts of 600" in stderr
    cases = [(1, 16), (3, 16)]
    assert passes == [
        shape
        for batch, prompt in cases
        for steps in (3, 9)  # the first call does not count
        for shape in [(batch, prompt), *[(batch, 1)] * (steps - 1)]
    ]
    record = json.loads((tmp_path / "new" / "out" / "bench.json").read_text())
    assert [(row["batch"], row["prompt"]) for row in record["rows"]] == cases
    for i, row in enumerate(record["rows"]):
        first, last = starts[i * 12 + 4], starts[i * 12 + 11]  # of the 8 steps that count
        assert row["first_token_ms"] >= 400 and 10 <= row["step_ms"] < (last - first + 0.15) * 1e3 / 8
        assert row["prefill_tokens_per_s"] == pytest.approx(row["batch"] * row["prompt"] / row["first_token_ms"] * 1e3)
        assert row["decode_tokens_per_s"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3)
        assert row["of_limit"] == pytest.approx(row["decode_tokens_per_s"] / row["limit_tokens_per_s"])
        line = next(x for x in stdout.splitlines() if x.split()[:2] == [str(row["batch"]), str(row["prompt"])])
        assert f"{row['decode_tokens_per_s']:,.1f}" in line.split()
    weights = sum(p.nbytes for p in ligermodels.load(folder, progress=False).parameters())
    cache = 2 * 3 * 2 * 32 * 4  # bytes per token: keys and values of 3 layers, 2 heads of 32 numbers
    assert record["weights_bytes"] == weights
    limits = [record["copy_bytes_per_s"] * b / (weights + b * cache * (length + 4)) for b, length in cases]
    assert [row["limit_tokens_per_s"] for row in record["rows"]] == pytest.approx(limits)
    assert 1e8 < record["copy_bytes_per_s"] < 1e13 and record["load_s"] > 0


def test_a_cpu_gets_one_short_case_by_default(capsys, folder):
    status, stdout, _ = run(capsys, "bench", folder)
    assert status == 0 and "\n32 new tokens\n" in stdout and stdout.splitlines()[-1].split()[:2] == ["1", "128"]
    assert len(stdout.splitlines()) == 6


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gemma-4-E2B", "gemma-4-26B-A4B"])
def test_a_step_reads_rows_of_tables_and_the_experts_that_are_chosen(name, tied, rows):
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | {"tie_word_embeddings": tied}
    model = ligermodels.Gemma4.from_config(config, device="meta", dtype=torch.bfloat16)
    blocks, size, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    by_layer = blocks * config["hidden_size_per_layer_input"] * config["vocab_size_per_layer_input"]
    tables = by_layer + (0 if tied else vocab * size)
    expected = model.num_parameters() - tables * (1 - rows / vocab)
    if experts := config.get("num_experts"):
        unchosen = (1 - config["top_k_experts"] / experts) ** rows
        expected -= unchosen * blocks * experts * 3 * size * config["moe_intermediate_size"]
    assert bench.weights_read(model, rows) == pytest.approx(2 * expected, rel=1e-4)  # buffers are as good as nothing


def test_ctrl_c_keeps_what_was_measured(capsys, folder, tmp_path, on_forward, monkeypatch):
    monkeypatch.setattr(bench, "_copy_rate", lambda device: 1e9)

    def stop(ids):
        if len(ids) == 2:
            raise KeyboardInterrupt

    on_forward(stop)
    sizes = ("--batches", "1,2", "--prompts", "8", "--new", 2, "--out", tmp_path)
    status, stdout, _ = run(capsys, "bench", folder, *sizes)
    assert status == 130 and stdout.splitlines()[-1].split()[:2] == ["1", "8"]
    assert [row["batch"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]] == [1]


def test_a_case_without_memory_is_a_line_and_other_errors_are_not(capsys, folder, tmp_path, on_forward, monkeypatch):
    monkeypatch.setattr(bench, "_copy_rate", lambda device: 1e9)

    def fail(ids):
        if len(ids) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(ids) == 5:
            raise RuntimeError("a mistake")

    on_forward(fail)
    sizes = ("--prompts", "8", "--new", 2)
    status, stdout, _ = run(capsys, "bench", folder, *sizes, "--batches", "2,1", "--out", tmp_path)
    first, second = stdout.splitlines()[-2:]
    assert status == 0 and first.endswith("out of memory") and second.split()[:2] == ["1", "8"]
    assert json.loads((tmp_path / "bench.json").read_text())["rows"][0]["out_of_memory"]
    with pytest.raises(RuntimeError, match="a mistake"):
        run(capsys, "bench", folder, *sizes, "--batches", 5)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--batches", "0,2"), 2, "'0' is not a positive integer"),
        (("--prompts", "8,x"), 2, "'x' is not a positive integer"),
        (("--new", 1), 2, "--new 1 leaves no token"),
        (("--prompts", 510), 2, "has 512 positions"),
        (("--adapter", "nowhere"), 3, "nowhere"),
        (("--device", "cuda"), 2, "--device cuda cannot be used"),
        (("--out", "{folder}/config.json"), 2, "config.json is a file; give a folder"),
    ],
)
def test_what_cannot_be_is_one_message(options, status, message, capsys, folder):
    options = [str(option).format(folder=folder) for option in options]
    try:
        found, _, stderr = run(capsys, "bench", folder, *options)
    except SystemExit as stop:
        found, stderr = stop.code, capsys.readouterr().err
    assert found == status and message in stderr and "Traceback" not in stderr


@pytest.mark.parametrize(("model", "status"), [("nosuchx/y/z", 3), ("{folder}", 2)])
def test_an_error_before_the_measurement_leaves_no_folder(model, status, capsys, folder, tmp_path):
    argv = (model.format(folder=folder), "--prompts", 510, "--out", tmp_path / "bo" / "new")
    assert run(capsys, "bench", *argv)[0] == status
    assert not (tmp_path / "bo").exists()
