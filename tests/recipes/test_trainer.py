"""The loop: schedules, the position in the data, signals, full disks, broken losses, estimates of memory."""

import functools
import json
import os
import re
import resource
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from ligermodels import InputError, Llama, Mixtral, Qwen2, Qwen3_5
from ligermodels.arch import block
from ligermodels.cli import main
from ligermodels.layers import MoE
from ligermodels.processes import Processes
from ligermodels.recipes import memory, report
from ligermodels.recipes.base import next_token_loss, num_labels
from ligermodels.recipes.model import make_optimizer, model_of
from ligermodels.recipes.steps import check_ids, forwards_per_step, learning_rate, shard_batches
from ligermodels.training import add_lora
from tests.arch.test_layers_that_differ import MIXTURE, Mixture
from tests.processes import Child
from tests.recipes import losses
from tests.recipes.runs import metrics, options_of, reached, train, weights
from tests.training.test_lora import make

STEPS = "--max-length 64 --accumulation 2 --max-steps 12 --learning-rate 3e-3 --warmup-steps 2".split()


def test_the_learning_rate_of_each_step():
    def rates(schedule, **options):
        options = options_of("sft", lr_scheduler_type=schedule, **{"warmup_steps": 2, **options})
        return [round(learning_rate(n, 10, options), 4) for n in range(10)]

    assert rates("constant_with_warmup") == [0.5] + [1.0] * 9
    assert rates("linear") == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert rates("linear", final_lr=0.2)[-2:] == [0.4, 0.3]
    assert rates("wsd", decay=0.4) == [0.5] + [1.0] * 6 + [0.75, 0.5, 0.25]
    assert rates("wsd", decay=4) == rates("wsd", decay=0.4)
    assert rates("cosine")[2:] == [1.0, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381]
    assert rates("cosine", warmup_steps=0.25)[:4] == [0.3333, 0.6667, 1.0, 1.0]  # 0.25 of 10 steps are 3
    assert rates("cosine", warmup_steps=0)[0] == 1.0


def test_ranks_share_the_evaluation_and_none_counts_twice():
    recipe, ranks = SimpleNamespace(collate=sum), [Processes(rank=rank, size=4, ranks_per_batch=2) for rank in range(4)]
    kept = [shard_batches([[1], [2], [3], [4], [5]], recipe, processes) for processes in ranks]
    assert kept == [[1, 3, 5], [1, 3, 5], [2, 4, 0], [2, 4, 0]]


def test_the_forwards_of_a_step():
    assert [forwards_per_step(None, 1, forwards) for forwards in (None, 1000, 100, 5)] == [8, 8, 5, 1]
    assert [forwards_per_step(None, ranks, 5) for ranks in (1, 3, 16)] == [1, 3, 16]
    assert forwards_per_step(6, 3, 5) == 6
    with pytest.raises(InputError, match="7 forwards or prompts a step cannot be split over 3 processes; give 9"):
        forwards_per_step(7, 3, None)


def test_ids_that_the_model_has_no_row_for_are_refused():
    batch = {"input_ids": torch.tensor([[3, 8]])}
    assert check_ids(batch, 9) is batch
    with pytest.raises(InputError, match="gave the id 8, and the model has 8 ids"):
        check_ids(batch, 8)


def test_numbers_that_are_hardly_meant_are_warned_of(home, tmp_path, capsys):
    flags = ("--max-steps", "2", "--dry-run")
    assert train(home, tmp_path, *flags, "--warmup-steps", "3", "--lora-r", "65") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert [re.findall(r"--\S+ \d+ is more than the [a-z']+ \D*\d+", line) for line in said] == [
        ["--warmup-steps 3 is more than the run's 2"], ["--lora-r 65 is more than the model's width 64"]
    ]  # fmt: skip
    assert train(home, tmp_path, *flags, "--warmup-steps", "2", "--lora-r", "64") == 0
    assert "warning" not in capsys.readouterr().err


def test_norms_have_no_weight_decay():
    options = options_of("sft", precision="fp32", weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, max_grad_norm=2.0)
    optimizer = make_optimizer(options, losses.model(), Processes(torch.device("cpu")))
    found = {
        (p.dim(), group["weight_decay"], group["betas"]) for group in optimizer.param_groups for p in group["params"]
    }
    assert found == {(2, 0.3, (0.8, 0.9)), (1, 0.0, (0.8, 0.9))} and optimizer.max_grad_norm == 2.0
    experts = MoE(8, 4, num_experts=2, top_k=1, bias=True)  # whose biases are matrices
    decayed, others = (
        group["params"] for group in make_optimizer(options, experts, Processes(torch.device("cpu"))).param_groups
    )
    assert [p.shape for p in others] == [p.shape for name, p in experts.named_parameters() if name.endswith("bias")]
    assert {p.dim() for p in decayed} == {2, 3} and len(decayed) == len(others) == 3


@pytest.mark.parametrize(("recipe", "given"), [("sft", {"lora_r": 4}), ("pretrain", {"scratch": True})])
def test_the_seed_draws_what_is_new(home, recipe, given):
    def drawn(seed):
        options = options_of(recipe, precision="fp32", activations="none", seed=seed, **given)
        return model_of(options, home / "model", Processes(torch.device("cpu"))).state_dict()

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert all(weight.equal(again[name]) for name, weight in one.items())
    assert not all(weight.equal(other[name]) for name, weight in one.items())


def test_the_seed_is_that_of_dropout(home, tmp_path):
    assert train(home, tmp_path / "out", *STEPS, "--max-steps", "1", "--seed", "5") == 0
    assert torch.initial_seed() == 5


def test_the_balancing_loss_has_the_weight_of_a_forwards_labels():
    routed = dict(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
    model = losses.model("Mixtral", **routed)
    ids = torch.randint(61, (2, 24))
    labels = ids.index_fill(1, torch.arange(8), -100)
    batches = [dict(input_ids=ids, labels=ids), dict(input_ids=ids, labels=labels)]
    alone = [model(**batch) for batch in batches]
    count = sum(map(num_labels, batches)).float()
    assert count == 2 * (23 + 16)
    step = sum(next_token_loss(model, batch, count) for batch in batches)
    wanted = (46 * alone[0].loss + 32 * alone[1].loss) / 78
    torch.testing.assert_close(step, wanted, rtol=1e-6, atol=0)
    assert alone[0].aux_loss > 1.9  # half of it is added, and a step that added it twice would be another
    model.eval()
    evaluated = sum(next_token_loss(model, batch, torch.ones(())) for batch in batches) / count
    torch.testing.assert_close(evaluated, wanted, rtol=1e-6, atol=0)


def test_a_signal_ends_the_run_after_the_step_and_a_checkpoint(home, tmp_path, capfd):
    flags = (*STEPS, "--eval-share", "0.2", "--eval-steps", "5")
    assert train(home, tmp_path / "undisturbed", *flags) == 0
    for number in (signal.SIGINT, signal.SIGTERM):
        out = tmp_path / str(number)
        child = Child(lambda out=out: os._exit(train(home, out, *flags)))  # the status of the command
        reached(out, 3, child)
        child.signal(number)
        assert child.wait() == 130
        said, taken = capfd.readouterr().err, max(metrics(out))
        assert f"stopped after step {taken} of 12" in said
        assert f"train sft --config {out}/options.yaml --resume" in said
        assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{taken:08d}"]
        assert main(["train", "sft", "--config", f"{out}/options.yaml", "--resume"]) == 0
        assert weights(out) == weights(tmp_path / "undisturbed")


def test_the_space_of_a_full_disk_is_said_once(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10_000))
    assert train(home, tmp_path / "out", *STEPS) == 3
    said = capsys.readouterr().err
    assert re.search(r"It takes [\d.]+ [kM]B, and 10 kB were free", said) and said.count("free some space") == 1


def test_a_full_disk_keeps_the_older_checkpoint(home, capfd):
    """No file may become as large as a checkpoint, from some moment of the run on."""
    flags, saved = (*STEPS, "--max-steps", "400", "--save-steps", "4"), home / "full" / "checkpoints"
    child = Child(lambda: os._exit(train(home, "full", *flags)))
    reached(home / "full", 9, child)
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (500_000, 500_000))
    assert child.wait() == 3
    said = capfd.readouterr().err
    failed = int(re.search(r"step (\d+) could not be saved", said)[1])
    assert "checkpoints before it are unchanged" in said and re.search(r"[\d.]+ [MG]B were free on its disk", said)
    kept = [step for step in (failed - 8, failed - 4) if step > 0]  # step 8 may still be written when the disk is full
    assert sorted(int(path.name[5:]) for path in saved.iterdir()) == kept and kept
    assert train(home, "full", *flags, "--resume", "--max-steps", str(failed)) == 0
    assert f"resumed after step {failed - 4}" in capfd.readouterr().err


def test_a_loss_that_is_no_number_stops_the_run(home, capsys):
    assert train(home, "nan", *STEPS, "--learning-rate", "1e30", "--max-grad-norm", "0", "--save-steps", "1") == 3
    said = capsys.readouterr().err
    last = max(metrics(home / "nan"))
    assert f"step {last + 1} of 12: the loss is" in said and "a lower --learning-rate" in said
    assert {path.name for path in (home / "nan/checkpoints").iterdir()} <= {f"step-{n:08d}" for n in (last - 1, last)}


def test_the_best_model_is_that_of_the_lowest_evaluation(home, tmp_path):
    """At a learning rate that is so high that later steps are worse: it is that of a run which ends there."""
    flags = (*STEPS, "--learning-rate", "0.1", "--lr-scheduler-type", "constant_with_warmup", "--eval-share", "0.3")
    assert train(home, tmp_path / "all", *flags, "--eval-steps", "1") == 0
    values = metrics(tmp_path / "all", "eval_loss")
    best = min(values, key=values.get)
    card = (tmp_path / "all" / "model" / "README.md").read_text()
    assert 0 < best < 12 and f"| best evaluation | {values[best]:.4f}, after step {best} |" in card
    assert train(home, tmp_path / "some", *flags, "--max-steps", str(best)) == 0
    found, expected = weights(tmp_path / "all"), weights(tmp_path / "some")
    assert found["best/model.safetensors"] == expected["model/model.safetensors"] != found["model/model.safetensors"]


def test_a_run_that_is_resumed_writes_each_line_once(tmp_path, capsys):
    """The checkpoint of step 4 was written before the evaluation after that step, which is therefore made again."""
    options = options_of("sft", output_dir=str(tmp_path), report_to="none")
    before = report.Reporter(options, 9, 0, -1, torch.device("cpu"))
    for step in range(6):
        before.step(step, {"loss": 1.0, "lr": 1.0, "tokens_per_second": 1.0, "gib": 1.0})
        if step % 2 == 0:
            before.evaluation(step, 1.0, {}, better=False, is_cross_entropy=True)
    after = report.Reporter(options, 9, resumed=4, evaluated=2, device=torch.device("cuda"))
    assert [line["step"] for line in after.lines() if "loss" in line] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in after.lines() if "eval_loss" in line] == [0, 2]
    assert ", peak of the process 1.0 GiB, " in capsys.readouterr().err
    after.step(5, {"loss": 1.0, "lr": 1.0, "tokens_per_second": 1.0, "gib": 1.0})
    assert ", peak 1.0 GiB, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "odd", [b"[]", b'{"loss": 1}', b'{"step": 2, "loss": 0.', b'{"step": "2"}', b"\xff", b"[" * 9999]
)
def test_an_odd_line_of_metrics_loses_no_other(tmp_path, odd):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 1.0}\n' + odd + b'\n{"step": 2, "loss": 0.5}\n')
    options = options_of("sft", output_dir=str(tmp_path))
    lines = report.Reporter(options, 9, 2, -1, torch.device("cpu")).lines()
    assert lines == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 2


LLAMA_8B = dict(
    model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip


MEASURED = [
    # weights, recomputed, tokens, GPUs: peak GiB of tensors on H200s, torch 2.11; benchmarks/results has those of all
    # weights (batches without micro-batches), and of adapters (rank 16) the runs of `benchmarks.train_step`
    ("8B", "lora", "none", 16384, 1, 62.5),
    ("8B", "lora", "block", 16384, 1, 21.5),
    ("8B", "lora", "none", 2048, 1, 21.8),
    ("8B", "lora", "block", 2048, 1, 16.5),
    ("8B", "nf4", "none", 2048, 1, 12.1),
    ("8B", "nf4", "block", 2048, 1, 6.88),
    ("70B", "nf4", "block", 4096, 1, 46.1),
    ("8B", "bf16", "block", 16384, 1, 60.7),
    ("1B", "bf16", "none", 16384, 1, 21.2),
    ("1B", "bf16", "none", 1024, 1, 9.77),
    ("1.5B", "bf16", "none", 16384, 1, 31.3),
    ("9B", "bf16", "none", 16384, 1, 114.1),  # a hybrid
    ("8B", "fp32", "none", 8192, 8, 39),  # of docs/distributed.md, not measured
    ("8B", "fp32", "block", 32768, 2, 63.7),
    ("8B", "fp32", "mlp", 32768, 2, 86.6),
]
MODELS = {
    "8B": LLAMA_8B,
    "70B": {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64},
    "1B": {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
           "tie_word_embeddings": True},
    "1.5B": dict(
        model_type="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "9B": dict(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "weights", "activations", "tokens", "gpus", "measured"), MEASURED)
def test_the_estimate_is_what_was_measured(model, weights, activations, tokens, gpus, measured):
    """From 3 % below to 6 % above, of a step of one forward on each GPU; the plan leaves 8 % free (MARGIN)."""
    sketch = {"1.5B": Qwen2, "9B": Qwen3_5}.get(model, Llama).from_config(MODELS[model], device="meta")
    lora = {"lora": dict(lora_r=16), "nf4": dict(lora_r=16, quantize="nf4")}.get(weights, {})
    options = options_of(
        "sft", precision="bf16-masters" if lora else weights, activations=activations, batch_tokens=tokens,
        accumulation=gpus, **lora,
    )  # fmt: skip
    processes = Processes(torch.device("cuda"), size=gpus)
    needs = memory.estimate(memory.Sizes.of(sketch, options), options, processes)
    assert 0.97 * measured < sum(needs.values()) / memory.GIB < 1.06 * measured


class TheirMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(32, 8))


def test_a_plan_names_the_modules_of_others_in_its_blocks():
    options = options_of("sft", batch_tokens=64, accumulation=1, precision="bf16", activations="none")
    sketch, data = losses.model(), SimpleNamespace(format=None, rows=[], eval_rows=None)

    def line():
        sizes = memory.Sizes.of(sketch, options)
        return report.make_plan(options, Processes(torch.device("cpu")), "Llama", sizes, data, None, 1)["memory"]

    assert "not counted" not in line()
    sketch.decoder.layers[1].mlp = TheirMLP()
    sketch.decoder.layers[0].extra = torch.nn.Linear(32, 8)
    assert line().endswith("; not counted: LlamaBlock, Sequential")


def test_a_plan_asks_each_block_of_dense_ones_and_of_experts():
    """8 experts of 12, of which a token takes 2, in blocks 0 and 2, a dense MLP of 44 in block 1, at width 32."""
    options = options_of("sft", batch_tokens=64, accumulation=1)
    sketch = Mixture.from_config({**MIXTURE, "num_experts": 8, "dense": [1], "intermediate_size": 44}, device="meta")
    experts, dense = (sketch.decoder.layers[i] for i in (0, 1))
    sizes = memory.Sizes.of(sketch, options)
    assert sizes.layers == 2 * memory.count(experts) + memory.count(dense) and sizes.block == memory.count(experts)
    shared = memory.saved_per_token(dense, "mlp")
    assert sizes.saved == {"none": shared + 2 * (2 * 24 + 44) // 3, "mlp": shared, "block": 32, "again": shared + 88}
    assert sizes.unpacked == 8 * 24 * 32 and memory.unpacked(dense) == 3 * 44 * 32


def test_what_fits_is_chosen():
    options = options_of("sft", batch_tokens=8192, accumulation=2)
    sizes = memory.Sizes.of(Llama.from_config(LLAMA_8B, device="meta"), options)

    def chosen(gib):
        return memory.choose(sizes, options, Processes(torch.device("cuda")), gib * 2**30)

    assert [chosen(gib) for gib in (140, 100, 90, 20)] == [
        ("bf16-masters", "none"),
        ("bf16-masters", "mlp"),
        ("bf16-masters", "block"),
        ("bf16", "block"),
    ]


def test_the_parameters_of_adapters_are_counted_before_there_are_any():
    model, names = make("mixtral"), ("experts.down_proj", "mlp.gate.weight")
    options = options_of("sft", lora_r=4, lora_target_modules=("q_proj",), lora_target_parameters=names)
    counted = memory.adapter_parameters(model, options)
    add_lora(model, 4, targets=["q_proj"], target_parameters=names)
    assert counted == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_experts_are_balanced_by_their_biases(home, tmp_path, monkeypatch):
    """The rate changes them once a step, they are saved, and a run that is resumed goes on from them."""
    monkeypatch.setattr(block, "MoE", functools.partial(MoE, score="sigmoid", correction_bias=True))
    folder, config = tmp_path / "model", json.loads((home / "model" / "config.json").read_text())
    shutil.copytree(home / "model", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config |= dict(model_type="mixtral", num_local_experts=4)
    values = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}
    Mixtral.from_config(values, seed=0, dtype=torch.float32, device="cpu").save_pretrained(folder)
    flags = (*STEPS, "--router-bias-rate", "0.25", "--lr-scheduler-type", "constant_with_warmup")
    assert train(home, tmp_path / "whole", *flags, "--max-steps", "3", model=folder) == 0
    assert train(home, tmp_path / "parts", *flags, "--max-steps", "2", model=folder) == 0
    assert train(home, tmp_path / "parts", *flags, "--max-steps", "3", "--resume", model=folder) == 0
    whole, parts = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    biases = {name: x for name, x in whole.items() if name.endswith("gate.e_score_correction_bias")}
    assert len(biases) == config["num_hidden_layers"]
    for bias in biases.values():
        assert bias.dtype == torch.float32 and bias.any() and torch.equal(4 * bias, (4 * bias).round())
        assert bias.abs().max() <= 0.75
    assert whole.keys() == parts.keys() and all(torch.equal(x, parts[name]) for name, x in whole.items())
    loads = metrics(tmp_path / "whole", "max_expert_load")
    assert [*loads] == [1, 2, 3] and all(1 <= load <= 4 for load in loads.values())
    assert main(["train", "sft", str(home / "model"), "--data", str(home / "chats.jsonl"), "--output-dir",
                 str(tmp_path / "none"), *STEPS, "--router-bias-rate", "0.25"]) != 0  # fmt: skip
