"""What a loader easily gets wrong in an architecture of Llama's kind, each beside a control that must differ.

A test class names `arch`, `PLAIN` (arguments of the transformers config, untied, with an rms_norm_eps and a rope_theta
that are not the defaults), `COMPILED` (the configuration that is compiled), `REAL` (names in fixtures/configs) and
inherits the tests.
"""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ligermodels import CheckpointError
from ligermodels.layers import LMHead
from tests.arch.suite import FIXTURES, LOGITS, relative, theirs, theirs_logits, write_checkpoint


class Traps:
    arch: type
    PLAIN: dict
    COMPILED: dict
    REAL: dict

    @pytest.fixture
    def folder(self, tmp_path):
        return write_checkpoint(self.PLAIN, tmp_path / "hf")

    @pytest.fixture
    def ids(self):
        return torch.randint(3, self.PLAIN["vocab_size"], (2, 24))

    def load(self, folder, dtype="auto"):
        return self.arch.from_hub(folder, dtype=dtype, progress=False)

    def edit(self, folder, change):
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    def test_defaults_are_those_of_transformers(self):
        sizes = ("model_type", "vocab_size", "intermediate_size", "num_hidden_layers")
        given = {**{name: self.PLAIN[name] for name in sizes}, "hidden_size": 64, "num_attention_heads": 32}
        ours, expected = self.arch.config_class.from_hf(given), transformers.AutoConfig.for_model(**given)
        names = ("rms_norm_eps", "max_position_embeddings", "hidden_act", "tie_word_embeddings", "sliding_window")
        for name in (*names, "num_key_value_heads"):
            assert getattr(ours, name) == getattr(expected, name), name
        assert {**ours.rope_parameters, **expected.rope_parameters} == ours.rope_parameters

    @pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
    def test_a_number_of_the_file_that_goes_missing_is_seen(self, folder, ids, name):
        expected = theirs_logits(theirs(folder), ids)
        assert relative(self.load(folder)(ids).logits, expected) < LOGITS

        def drop(config):
            (config if name in config else config["rope_parameters"]).pop(name)

        self.edit(folder, drop)
        assert relative(self.load(folder)(ids).logits, expected) > 100 * LOGITS

    def test_null_for_heads_means_what_a_missing_key_means(self, folder, ids):
        expected = self.load(folder)(ids).logits
        self.edit(folder, lambda config: config.update(head_dim=None))
        assert torch.equal(self.load(folder)(ids).logits, expected)

    def test_the_head_is_never_tied_unasked(self, folder):
        self.edit(folder, lambda config: config.pop("tie_word_embeddings"))
        model = self.load(folder)
        assert isinstance(model.lm_head, LMHead) and not model.config.tie_word_embeddings
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            self.load(folder)

    def test_a_bf16_model_has_fp32_tables(self, folder):
        rotary = theirs(folder).model.rotary_emb
        model = self.load(folder, torch.float32).to(torch.bfloat16)
        positions = torch.arange(0, 30000, 997)[None]
        for ours, expected in zip(model.decoder.rotary_emb(positions), rotary(torch.zeros(1), positions), strict=True):
            assert ours.dtype == torch.float32
            assert torch.equal(ours, expected[..., : ours.shape[-1]])

    def test_norms_cast_before_they_weigh(self, folder):
        theirs_norm = theirs(folder).to(torch.bfloat16).model.layers[0].input_layernorm
        x = torch.randn(64, self.PLAIN["hidden_size"], dtype=torch.bfloat16)
        norm = self.load(folder, torch.bfloat16).decoder.layers[0].input_layernorm
        assert torch.equal(norm(x)[0], theirs_norm(x))
        scale = x.float().square().mean(-1, keepdim=True).add(self.PLAIN["rms_norm_eps"]).rsqrt()
        assert not torch.equal((x * scale * norm.weight.float()).bfloat16(), theirs_norm(x))

    def test_logits_keep_the_dtype_of_the_model(self, folder, ids):
        output = self.load(folder, torch.bfloat16)(ids, labels=ids, return_logits=True)
        assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == torch.float32

    def test_files_and_tensors_that_are_not_the_model(self, folder, ids):
        expected = self.load(folder)(ids).logits
        tensors = load_file(folder / "model.safetensors")
        save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, folder / "consolidated.safetensors")
        (folder / "original").mkdir()
        save_file({"tok_embeddings.weight": torch.ones(4, 4)}, folder / "original" / "consolidated.00.safetensors")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert torch.equal(self.load(folder)(ids).logits, expected)

    def test_the_whole_model_compiles_without_a_graph_break(self):
        config = {**self.COMPILED, "initializer_range": 0.3}
        rope = config.pop("rope_parameters")
        theta = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config |= {"rope_theta": theta, "rope_scaling": scaling if rope["rope_type"] != "default" else None}
        model = self.arch.from_config(config, dtype=torch.float32)
        ids = torch.randint(config["vocab_size"], (2, 24))
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
        compiled(ids, labels=ids).loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)

    def test_real_files_of_both_generations_are_read_alike_and_without_a_warning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in self.REAL:
                earlier, later = (
                    self.arch.config_class.from_hf(json.loads(path.read_text()))
                    for path in (FIXTURES / f"{name}.json", FIXTURES / "v5" / f"{name}.json")
                )
                assert earlier == later, name
                assert self.arch.config_class.from_hf(earlier.to_hf()) == earlier
