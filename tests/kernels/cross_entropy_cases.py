"""Inputs and option combinations that the tests of cross_entropy and linear_cross_entropy share."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

IGNORE = -100
EXTRAS = {
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
    "return_entropy": True,
}

# Derandomized: a kernel is compiled per combination, and a run on a GPU must not depend on the day.
bounded = settings(
    max_examples=40 if torch.cuda.is_available() else 12,  # interpreted kernels are slow
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def option_sets(draw) -> dict:
    """Every option in every combination; `class_weight` and a tensor `num_items_in_batch` are flags here."""
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    return {
        "reduction": reduction,
        "num_items_in_batch": draw(st.sampled_from([None, "int", "tensor"])) if reduction == "mean" else None,
        "class_weight": draw(st.booleans()),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "z_loss": draw(st.sampled_from([0.0, 0.03])),
        "softcap": draw(st.sampled_from([None, 4.0])),
        "token_scaling": draw(st.booleans()),
        "return_z_loss": draw(st.booleans()),
        "return_token_accuracy": draw(st.booleans()),
        "return_predicted_tokens": draw(st.booleans()),
        "return_entropy": draw(st.booleans()),
    }


def arguments(options: dict, vocab: int, dtype: torch.dtype, device: str) -> dict:
    """The flags of `option_sets` made real."""
    weight = torch.linspace(0.5, 2.0, vocab, dtype=dtype, device=device) if options["class_weight"] else None
    items = {"int": 7, "tensor": torch.tensor(7, device=device), None: None}[options["num_items_in_batch"]]
    return options | {"class_weight": weight, "num_items_in_batch": items}


def some_labels(shape: tuple[int, ...], vocab: int, device: str, ignored: float = 0.3) -> Tensor:
    labels = torch.randint(0, vocab, shape, device=device)
    return labels.masked_fill(torch.rand(shape, device=device) < ignored, IGNORE)


def adversarial(device: str, dtype: torch.dtype, vocab: int = 40) -> tuple[Tensor, Tensor]:
    """Logits [7, V] that losses stumble over, and their labels."""
    logits = torch.randn(7, vocab, device=device)
    labels = torch.randint(0, vocab, (7,), device=device)
    logits[0, labels[0]] = logits[0].exp().sum().log() + 9.21  # p = 0.9999 at the label
    logits[1] *= 1e4  # one-hot: every other probability is 0
    logits[2] = 1e4 + torch.arange(vocab, device=device) % 2 * 8  # differences that fp16 and bf16 hold, far from 0
    logits[3] = -3.5  # equal values
    logits[4, : vocab // 2] = -torch.inf
    labels[4] = vocab - 1
    logits[5] = -torch.inf  # a single class is left
    labels[5] = 3
    logits[5, 3] = -2.0
    labels[6] = IGNORE
    return logits.to(dtype), labels


def results(output, inputs: list[Tensor], upstream: Tensor | None = None) -> dict[str, Tensor]:
    """All outputs of a call by name, and the gradient of its loss for each of `inputs`."""
    found = {"loss": output} if isinstance(output, Tensor) else output._asdict()
    found = {name: value for name, value in found.items() if value is not None}
    upstream = torch.ones_like(found["loss"]) if upstream is None else upstream
    gradients = torch.autograd.grad(found["loss"], inputs, upstream.to(found["loss"].dtype))
    return found | {f"grad{i}": g for i, g in enumerate(gradients)}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, atol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value.to(actual[name].device), rtol=rtol, atol=atol, check_dtype=False, equal_nan=True,
            msg=lambda m, name=name: f"{name}: {m}",
        )  # fmt: skip
