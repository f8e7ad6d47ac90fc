"""train --fp8 and --quantize fp8: what is refused, the plan, and the model of a run; the CPU trains no run in FP8."""

import dataclasses

import pytest
import torch

from ligermodels import InputError, Llama, Mixtral
from ligermodels.layers.fp8 import FP8Linear
from ligermodels.layers.lora import LoRAFP8Linear, LoRAQuantizedLinear
from ligermodels.processes import Processes
from ligermodels.recipes import memory, model as models, report
from tests.recipes.runs import options_of, train
from tests.tiny import FAMILIES, TINY


def test_the_cpu_refuses_it(home, tmp_path, capsys):
    for flags in (("--fp8", "rowwise"), ("--quantize", "fp8", "--lora-r", "4")):
        assert train(home, tmp_path / "run", *flags, "--max-steps", "1") == 3
        assert f"{flags[0][2:]}={flags[1]}: the run is on the CPU" in capsys.readouterr().err
    for flags in (dict(tp=2), dict(lora_r=4, quantize="nf4")):
        with pytest.raises(InputError, match="give one of the two"):
            options_of("sft", fp8="rowwise", **flags)


def test_gpus_without_fp8_are_refused(monkeypatch):
    sketch, processes = (
        Llama.from_config({**TINY, "model_type": "llama"}, device="meta"),
        Processes(torch.device("cuda")),
    )
    options = options_of("sft", fp8="rowwise")

    def has(capability):
        for module in ("fp8", "fp8_matmul"):
            monkeypatch.setattr(f"ligermodels.kernels.linear.{module}.cuda_capability", lambda index: capability)

    for capability, message in ((0, "need Ada, Hopper or later"), (80, "e4m3 for 8.9 and later: Ada.*\n  Next: .*nf4")):
        has(capability)
        with pytest.raises(InputError, match=message):
            models.check_fp8(options, sketch, processes)
    has(90)
    models.check_fp8(options, sketch, processes)
    odd = Llama.from_config({**TINY, "model_type": "llama", "hidden_size": 40, "head_dim": 10, "intermediate_size": 24},
                            device="meta")  # fmt: skip
    with pytest.raises(InputError, match="multiples of 16"):
        models.check_fp8(options, odd, processes)


def test_the_plan_counts_what_is_kept():
    sketch = Llama.from_config({**TINY, "model_type": "llama"}, device="meta", dtype=torch.bfloat16)
    layers = memory.count(sketch.decoder.layers)

    def weights(gpus=1, **flags):
        common = dict(precision="bf16", activations="none", batch_tokens=64, accumulation=4)
        options, processes = options_of("sft", **{**common, **flags}), Processes(torch.device("cuda"), size=gpus)
        if gpus > 1:
            processes = dataclasses.replace(processes, mesh=object())
        return memory.estimate(memory.Sizes.of(sketch, options), options, processes)["weights"]

    plain = weights()
    assert weights(fp8="rowwise") == plain + layers
    assert weights(fp8="rowwise", accumulation=1) == plain
    assert weights(fp8="rowwise", accumulation=1, activations="block") == plain + layers
    assert weights(gpus=2, fp8="rowwise") == weights(gpus=2)
    frozen, trained = weights(lora_r=4), weights(lora_r=4, quantize="fp8")
    assert frozen - trained == pytest.approx((2 - 8.02 / 8) * layers, abs=1)


@pytest.mark.parametrize(
    ("flags", "kind", "keeps"),
    [
        (dict(fp8="rowwise", accumulation=4), FP8Linear, True),
        (dict(fp8="rowwise-bf16-dw", accumulation=1), FP8Linear, False),
        (dict(fp8="tensorwise", accumulation=4, lora_r=4), LoRAFP8Linear, True),
        (dict(quantize="fp8", lora_r=4), LoRAQuantizedLinear, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_the_model_of_a_run(home, flags, kind, keeps):
    options = options_of("sft", model=str(home / "model"), precision="bf16", activations="none", **flags)
    model = models.model_of(options, home / "model", Processes(torch.device("cpu")))
    linears = [module for block in model.decoder.layers for module in block.modules() if type(module) is kind]
    assert len(linears) == 7 * len(model.decoder.layers)
    assert all(module.fp8.keep_weights == keeps for module in linears)
    tokens = torch.arange(40).view(1, -1)
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_the_plan_of_a_mixture_says_that_experts_stay():
    sketch = Mixtral.from_config({**TINY, **FAMILIES["mixtral"], "model_type": "mixtral"}, device="meta")
    options = options_of("sft", fp8="rowwise")
    assert "experts stay in 16 bits" in report.fp8_line(options, memory.Sizes.of(sketch, options))
    dense = Llama.from_config({**TINY, "model_type": "llama"}, device="meta")
    assert "experts" not in report.fp8_line(options, memory.Sizes.of(dense, options))
