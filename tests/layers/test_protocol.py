"""What layers/base.py asks of a layer, of all layers of the package, in tiny models of every family."""

import functools
import importlib
import pkgutil

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels.arch import ARCHS
from ligermodels.errors import InputError
from ligermodels.layers import Embedding, Experts, LMHead, Router
from ligermodels.layers.base import Layer, fp32_names
from ligermodels.parallel.tensor import check_tensor
from ligermodels.training import add_mtp
from tests.arch import gemma3_vl, gemma4_vl, llama_vision, qwen2_vl, qwen3_vl
from tests.tiny import FAMILIES, TINY

CONFIGS = {name: {"model_type": name, **TINY, **changes} for name, changes in FAMILIES.items()}
CONFIGS["gemma4_text"] |= dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=20)
CONFIGS |= {"mllama": llama_vision.tiny(), "qwen2_vl": qwen2_vl.tiny()}
CONFIGS |= {"gemma3": gemma3_vl.tiny(vocab_size=98), "qwen3_vl": qwen3_vl.qwen3_vl(), "qwen3_5": qwen3_vl.qwen3_5()}
CONFIGS |= {"gemma4": gemma4_vl.tiny(vocab_size=98), "gemma4_unified": gemma4_vl.unified(vocab_size=98)}
CONFIGS |= {"qwen3_vl_moe": qwen3_vl.qwen3_vl_moe(), "qwen3_5_moe": qwen3_vl.qwen3_5_moe()}


@functools.cache
def model_of(name):
    model = ARCHS[name].from_config(ARCHS[name].config_class.from_hf(CONFIGS[name]), dtype=torch.float32)
    if name in ("qwen3_5_text", "qwen3_5_moe_text"):
        add_mtp(model)
    return model


@functools.cache
def layers():
    """(class, family, a layer of that class) of all classes of the package whose layers have parameters."""
    for module in pkgutil.walk_packages(ligermodels.__path__, "ligermodels."):
        if not module.name.endswith("__main__") and not module.name.startswith("ligermodels.integrations."):
            importlib.import_module(module.name)

    def below(cls):
        return {cls}.union(*(below(child) for child in cls.__subclasses__()))

    met = [(type(module), name, module) for name in CONFIGS for module in model_of(name).modules()]
    classes = {
        cls for cls in below(Layer) - {Layer} if cls.__module__.startswith(("ligermodels.layers", "ligermodels.arch"))
    }
    unseen = {cls for cls in classes - {cls for cls, *_ in met} if not cls.__subclasses__()}
    assert not unseen, f"no tiny model has {unseen}: add one that does to CONFIGS"
    return list({cls: (cls, *found) for cls, *found in met if cls in classes and parameters(found[1])}.values())


def parameters(module):
    return list(module.parameters(recurse=False))


def refusal(name):
    """What tensor parallel says of a model, "" if it takes it."""
    try:
        check_tensor(model_of(name), 2)
    except InputError as error:
        return str(error)
    return ""


def test_every_family_and_every_layer_is_met():
    assert CONFIGS.keys() == ARCHS.keys()
    assert {Experts, Router, LMHead, Embedding} < {cls for cls, *_ in layers()}


def test_a_layer_draws_each_of_its_parameters(monkeypatch):
    """Without its init_weights the parameter is named: nothing else draws it."""
    for cls, name, _ in layers():
        with monkeypatch.context() as without:
            without.setattr(cls, "init_weights", Layer.init_weights)
            with pytest.raises(InputError, match="nothing has drawn them; let the init_weights of") as error:
                model_of(name).init_weights()
        path, _, last = str(error.value).partition(" ")[0].rpartition(".")
        layer = model_of(name).get_submodule(path)
        assert isinstance(layer, cls) and last in layer._parameters


@torch.no_grad()
def test_a_layer_that_stands_alone_is_drawn_by_the_generator_of_torch():
    """Matrices as nn.Linear draws them, a table with std 0.02."""

    def drawn(layer):
        for parameter in parameters(layer):
            parameter.fill_(float("nan"))
        torch.manual_seed(1)
        layer.reset_parameters()
        return torch.cat([parameter.flatten() for parameter in parameters(layer)])

    for _, _, layer in layers():
        assert drawn(layer).isfinite().all() and torch.equal(drawn(layer), drawn(layer)), layer
    for layer in (Experts(100, 100, num_experts=2), Router(100, 64), LMHead(100, 64)):
        assert 0.095 < drawn(layer).abs().max() <= 0.1
    assert 0.018 < Embedding(100, 64).weight.std() < 0.022


@pytest.mark.parametrize("name", CONFIGS)
def test_tensor_parallel_meets_no_parameter_that_is_neither_shared_nor_refused(name, monkeypatch):
    """What `shards` names is there, and consists of the units and parts that it says."""
    parts, named = (model_of(name).decoder, model_of(name).lm_head, model_of(name).mtp), set()
    modules = [pair for part in parts if part is not None for pair in part.named_modules()]
    for layer in (module for _, module in modules if isinstance(module, Layer)):
        for key, shard in layer.shards().items():
            path, _, last = key.rpartition(".")
            part = getattr(layer.get_submodule(path), last)
            named |= {id(x) for x in (part.parameters() if isinstance(part, nn.Module) else [part])}
            if shard.split not in ("refused", "replicated"):
                dim = shard.dim if shard.dim is not None else -1 if shard.split == "rows" else 0
                rows = getattr(part, "weight", part).shape[dim]
                assert rows % shard.count == 0 and (shard.parts is None or rows == sum(shard.parts))
            assert shard.split != "refused" or shard.what in refusal(name)
    for path, module in modules:  # a linear module is named by the layer that it is in
        what = f"{path.rpartition('.')[2]}.weight" if isinstance(module, nn.Linear) else type(module).__name__
        assert {id(x) for x in parameters(module)} <= named or what in refusal(name)
    for cls in {cls for cls, family, layer in layers() if family == name and layer.shards()}:
        with monkeypatch.context() as without:
            without.setattr(cls, "shards", Layer.shards)
            assert f"{cls.__name__}.shards() does not name" in refusal(name)


class Kept(Layer):
    keep_fp32 = True

    def __init__(self):
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)
        self.register_buffer("bias", torch.randn(3))
        self.register_buffer("count", torch.tensor(5))


def test_a_layer_keeps_its_own_tensors_in_fp32():
    """With their bits and gradients, under each cast to 16 bits, also of a layer that was built in them."""
    for cast in (lambda module: module.to(torch.bfloat16), nn.Module.bfloat16, nn.Module.half):
        model = nn.Sequential(Kept())
        weight, bias = (getattr(model[0], name).detach().clone() for name in ("weight", "bias"))
        model[0].weight.grad = torch.ones(3, 4)
        cast(model)
        layer = model[0]
        assert layer.linear.weight.dtype.itemsize == layer.linear.bias.dtype.itemsize == 2
        assert torch.equal(layer.weight, weight) and torch.equal(layer.bias, bias) and layer.count.dtype == torch.int64
        assert layer.weight.dtype == layer.bias.dtype == layer.weight.grad.dtype == torch.float32
        assert {x.dtype for x in (*model.double().parameters(), layer.bias)} == {torch.float64}
        cast(model.to("meta"))
        assert layer.weight.is_meta and layer.weight.dtype == torch.float32 != layer.linear.weight.dtype
    assert fp32_names(model) == {"0.weight", "0.bias", "0.count"}
    built_in_16_bits = Kept()
    built_in_16_bits.weight.data = built_in_16_bits.weight.data.half()
    assert built_in_16_bits.half().weight.dtype == torch.float32
