"""Gemma 4's text: every switch of its configuration on tiny checkpoints, and the released sizes."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

import ligermodels
from ligermodels.arch.gemma4 import Gemma4Block, Gemma4Config
from ligermodels.errors import ConfigError, InputError
from ligermodels.generation import generate_many, graphs
from tests.arch.suite import (
    FIXTURES,
    GRADIENTS,
    LOGITS,
    Suite,
    check_compiled,
    read_tensors,
    relative,
    rope,
    theirs,
    theirs_logits,
    tiny_config,
)

FULL, SLIDING = "full_attention", "sliding_attention"
ROPES = {FULL: rope("proportional", partial_rotary_factor=0.5), SLIDING: {"rope_type": "default", "rope_theta": 20.0}}


def tiny(**changes):
    base = dict(
        head_dim=8, global_head_dim=12, sliding_window=6, layer_types=[SLIDING, FULL], rope_parameters=ROPES,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=97,
    )  # fmt: skip
    return tiny_config("gemma4_text", **{**base, **changes})


class TestGemma4(Suite):
    arch = ligermodels.Gemma4
    TINY = {
        "keys_as_values": tiny(attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=2.5),
        "shared_keys": tiny(
            num_hidden_layers=6, layer_types=[SLIDING, FULL] * 3, num_kv_shared_layers=3, use_double_wide_mlp=True,
            num_key_value_heads=1, hidden_size_per_layer_input=10,
        ),
        "experts": tiny(
            enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=20, attention_k_eq_v=True,
        ),
        "untied_with_biases_and_gelu": tiny(
            tie_word_embeddings=False, attention_bias=True, hidden_activation="gelu", hidden_size_per_layer_input=6,
        ),
    }  # fmt: skip
    ALSO = ("shared_keys", "experts")
    REAL = {"gemma-4-E2B": 4_628_569_344, "gemma-4-E4B": 7_463_013_376, "gemma-4-31B": 30_697_345_280,
            "gemma-4-26B-A4B": 25_233_141_760}  # fmt: skip
    SWITCHED_ON = dict(
        num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2, num_kv_shared_layers=2, use_double_wide_mlp=True,
        head_dim=16, global_head_dim=24, attention_k_eq_v=True, num_global_key_value_heads=1, sliding_window=12,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=256, final_logit_softcapping=8.0,
        rope_parameters=ROPES,
    )  # fmt: skip
    SWITCHED_OFF = dict(
        sliding_window=128, final_logit_softcapping=None, hidden_activation="silu",
        rope_parameters={**ROPES, FULL: rope("proportional", partial_rotary_factor=1.0)},
    )  # fmt: skip

    def shallow(self, tiny):
        return {**super().shallow(tiny), "layer_types": [FULL], "num_kv_shared_layers": 0}

    def earlier_generation(self, config):
        """As released files are, with the sizes of full blocks in two fields."""
        config = dict(config)
        sizes = next(iter(config.pop("per_layer_config").values()))
        config["global_head_dim"] = sizes["head_dim"]
        return {**config, "num_global_key_value_heads": sizes.get("num_key_value_heads")}

    def test_blocks_run_one_by_one_as_calibration_runs_them(self, hf, model, ids):
        if model.config.hidden_size_per_layer_input:
            with pytest.raises(InputError, match="runs in its model, not alone"):
                super().test_blocks_run_one_by_one_as_calibration_runs_them(hf, model, ids)
        else:
            super().test_blocks_run_one_by_one_as_calibration_runs_them(hf, model, ids)

    def test_embeddings_stand_for_ids(self, model, ids):
        if model.config.hidden_size_per_layer_input:
            with pytest.raises(InputError, match="looks ids up in a second table; pass input_ids"):
                super().test_embeddings_stand_for_ids(model, ids)
        else:
            super().test_embeddings_stand_for_ids(model, ids)

    @pytest.mark.parametrize("policy", ["mlp", "block"])
    def test_recomputed_gradients_are_the_same(self, model, ids, policy):
        found = []
        for settings in ("none", policy):
            model.gradient_checkpointing_enable({"recompute": settings})
            model.zero_grad()
            model.train()(ids, labels=ids).loss.backward()
            found.append([parameter.grad for parameter in model.parameters()])
        assert all(map(torch.equal, *found))

    @pytest.mark.parametrize("name", ALSO)
    def test_shared_keys_and_experts_compile(self, name, written):
        model = self.arch.from_hub(written(self.TINY[name]), progress=False).train()
        check_compiled(model, torch.randint(3, 90, (2, 24)))

    def test_a_draft_of_several_tokens_reads_the_keys_of_all(self, written, monkeypatch):
        model = self.arch.from_hub(written(self.TINY["shared_keys"]), progress=False)
        ids = torch.randint(3, 90, (1, 12))
        expected = model.generate(ids, max_new_tokens=40, eos_token_id=[])
        monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"})
        found = model.generate(ids, max_new_tokens=40, eos_token_id=[], prompt_lookup_num_tokens=3)
        assert torch.equal(found, expected)

    def test_a_cache_of_transformers_has_no_layer_for_shared_keys(self, written):
        model = self.arch.from_hub(written(self.TINY["shared_keys"]), progress=False)
        ids, options = torch.randint(3, 90, (2, 12)), dict(max_new_tokens=20, eos_token_id=[])
        expected = model.generate(ids, **options).repeat_interleave(2, 0)
        options |= dict(num_return_sequences=2, do_sample=True, top_k=1, past_key_values=transformers.DynamicCache())
        assert torch.equal(model.generate(ids, **options), expected)

    def test_the_text_of_a_released_checkpoint(self, hf, folder, model, ids, tmp_path):
        """Of one with images, whose names have a prefix, with weights for keys that no block reads."""
        config = json.loads((folder / "config.json").read_text())
        whole = {"model_type": "gemma4", "text_config": config, "vision_config": {}, "dtype": "float32"}
        tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in read_tensors(folder).items()}
        last = f"model.language_model.layers.{model.config.num_hidden_layers - 1}.self_attn."
        tensors = {last + name: torch.ones(4, 4) for name in ("k_proj.weight", "k_norm.weight")} | tensors
        tensors["model.vision_tower.patch_embedder.input_proj.weight"] = torch.ones(2, 2)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(whole))
        with pytest.warns(
            UserWarning, match="gemma4: only the text model is read: what reads images and audio is left"
        ):
            text = self.arch.from_hub(tmp_path, progress=False)
        assert text.config == model.config and torch.equal(text(ids).logits, model(ids).logits)


KEYS = 3
"""The blocks of `shared_keys` with keys of their own; three more read these."""
PADDED = torch.tensor([[0] * 5 + [1] * 14 + [0] * 2, [1] * 21, [1] * 9 + [0] * 12])


class TestBlocksWithoutKeys:
    """They run for the tokens alone whose last states are read."""

    @pytest.fixture
    def model(self, written):
        return ligermodels.Gemma4.from_hub(written(TestGemma4.TINY["shared_keys"]), progress=False)

    @pytest.fixture
    def ids(self):
        return torch.randint(3, 90, (3, 21), generator=torch.Generator().manual_seed(1))

    @pytest.fixture
    def tokens(self, monkeypatch):
        """The tokens of a row that each block ran for, in order; a method is replaced, as a hook has to see all."""
        seen, forward = [], Gemma4Block.forward

        def counted(self, x, *inputs, **options):
            seen.append(x.shape[1])
            return forward(self, x, *inputs, **options)

        monkeypatch.setattr(Gemma4Block, "forward", counted)
        return seen

    @pytest.mark.parametrize("mask", [None, PADDED], ids=["unpadded", "padded"])
    @pytest.mark.parametrize("keep", [1, 4, 8, 20])
    def test_last_logits_are_those_of_transformers_and_of_all_tokens(self, written, model, ids, tokens, mask, keep):
        hf = theirs(written(TestGemma4.TINY["shared_keys"]))
        given = {} if mask is None else {"attention_mask": mask}
        real = torch.ones_like(ids[:, -keep:], dtype=torch.bool) if mask is None else mask[:, -keep:].bool()
        whole = model(ids, **given, use_cache=False).logits[:, -keep:]
        expected = theirs_logits(hf, ids, **given)[:, -keep:]
        for how in (dict(use_cache=False), dict(use_cache=True), dict(past_key_values=transformers.DynamicCache())):
            tokens.clear()
            found = model(ids, **given, **how, logits_to_keep=keep).logits
            assert tokens == [21] * KEYS + [keep] * 3 and found.shape[1] == keep
            assert relative(found[real], expected[real]) < LOGITS and relative(found[real], whole[real]) < LOGITS
            assert found.isfinite().all()
        found = model(ids, **given, logits_to_keep=keep, return_logits=False).last_hidden_state
        assert found.shape[1] == keep and relative(model.logits_of(found)[real], expected[real]) < LOGITS

    def test_parts_of_a_text_leave_the_same_cache(self, written, model, ids, tokens):
        """Every part asks for its last token alone; the blocks with keys store all, past the window of 6 too."""
        expected = theirs_logits(theirs(written(TestGemma4.TINY["shared_keys"])), ids)
        cache, past = model.new_cache(3, 21), 0
        for length in (3, 9, 1, 2, 6):
            part = slice(past, past + length)
            found = model(ids[:, part], past_key_values=cache, logits_to_keep=1, return_logits=past % 2 == 0)
            logits = found.logits if past % 2 == 0 else model.logits_of(found.last_hidden_state)
            past += length
            assert relative(logits, expected[:, past - 1 : past]) < LOGITS and logits.shape[1] == 1
        assert tokens == [n for length in (3, 9, 1, 2, 6) for n in [length] * KEYS + [1] * 3]

    @pytest.mark.parametrize("recompute", ["none", "block"])
    def test_gradients_of_last_logits_are_those_of_all(self, model, ids, tokens, recompute):
        model.train().gradient_checkpointing_enable({"recompute": recompute})
        found = []
        for keep in (0, 4):
            model.zero_grad()
            logits = model(ids, attention_mask=PADDED, logits_to_keep=keep).logits[:, -4:]
            logits.square().mean().backward()
            found.append([parameter.grad for parameter in model.parameters()])
        assert 4 in tokens and all(map(torch.is_tensor, found[1]))
        for grad, expected in zip(*found, strict=True):
            assert relative(grad, expected) < GRADIENTS

    def test_all_tokens_run_where_all_are_read(self, model, ids, tokens):
        whole = model(ids, use_cache=False)
        asked = dict(logits_to_keep=2, use_cache=False)
        output = model(ids, output_hidden_states=True, **asked)
        assert [x.shape[1] for x in output.hidden_states] == [21] * 7 and output.last_hidden_state.shape[1] == 21
        assert relative(output.logits, whole.logits[:, -2:]) < LOGITS
        model.train()(ids, labels=ids).loss.backward()
        bounds = torch.tensor([0, 30, 44, 63], dtype=torch.int32)
        packed = model(ids, cu_seqlens=bounds).logits
        assert relative(model(ids, cu_seqlens=bounds, logits_to_keep=2).logits, packed[:, -2:]) < LOGITS
        model.eval()(ids, logits_to_keep=21, use_cache=False)
        assert set(tokens) == {21, 63}

    @pytest.mark.parametrize("where", ["layers.5", "layers.3.mlp", "norm"])
    def test_a_hook_gets_the_states_of_all_tokens(self, model, ids, where):
        expected, seen = model(ids, logits_to_keep=2, use_cache=False).logits, []
        hook = model.model.get_submodule(where).register_forward_hook(lambda *given: seen.append(given[1][0].shape[1]))
        found = model(ids, logits_to_keep=2, use_cache=False).logits
        hook.remove()
        assert seen == [21] and relative(found, expected) < LOGITS

    @pytest.mark.parametrize("drafts", [False, True])
    @pytest.mark.parametrize("chunk", [None, 8])
    def test_generation_reads_a_prompt_so(self, written, model, tokens, chunk, drafts):
        ids = torch.randint(3, 90, (1 if drafts else 2, 19))
        expected = theirs(written(TestGemma4.TINY["shared_keys"])).generate(
            ids, max_new_tokens=9, do_sample=False, eos_token_id=[]
        )
        tokens.clear()
        options = dict(prompt_lookup_num_tokens=2) if drafts else {}
        found = model.generate(ids, max_new_tokens=9, eos_token_id=[], prefill_chunk_size=chunk, **options)
        assert torch.equal(found, expected)
        lengths = [19] if chunk is None else [8, 8, 3]
        assert tokens[: 6 * len(lengths)] == [n for length in lengths for n in [length] * KEYS + [1] * 3]


class TestKeysMadeOfValues:
    """With attention_k_eq_v a cache stores the values of a full block, and of its keys the dims that rotate."""

    @pytest.fixture(params=["keys_as_values", "experts"])
    def name(self, request):
        return request.param

    @pytest.fixture
    def model(self, name, written):
        return ligermodels.Gemma4.from_hub(written(TestGemma4.TINY[name]), progress=False)

    @pytest.fixture
    def ids(self):
        return torch.randint(3, 90, (2, 19), generator=torch.Generator().manual_seed(1))

    def test_bytes_of_a_released_model(self):
        config = json.loads((FIXTURES / "gemma-4-31B.json").read_text())
        decoder = ligermodels.Gemma4.from_config(config, device="meta", dtype=torch.bfloat16).decoder
        tokens, window = 32768, 1024
        windows = 50 * window * 16 * 2 * 256 * 2
        for kind, full in (("auto", 4 * (512 + 128) * 2), ("fp8", 4 * 2 * (512 + 2))):
            states = decoder._new_states(1, tokens, "meta", kind)
            found = sum(x.nbytes for state in states if state.window is None for x in state.buffers)
            assert found == 10 * tokens * full
            if kind == "auto":
                assert sum(x.nbytes for state in states for x in state.buffers) - found == windows

    def test_parts_of_a_text_and_a_step_on_the_device(self, name, model, written, ids, monkeypatch):
        """Also where rows are padded on the left, come and go, or are drafts; the keys that are stored are 6 of 12."""
        hf = theirs(written(TestGemma4.TINY[name]))
        expected, cache, past = theirs_logits(hf, ids), model.new_cache(2, 4), 0
        for length in (3, 9, 1, 1, 5):
            found = model(ids[:, past : past + length], past_key_values=cache).logits
            assert relative(found, expected[:, past : past + length]) < LOGITS
            past += length
        assert [state.key_dim for state in cache] == [8, 6] and cache[1].buffers[1].shape[3] == 12
        options = dict(max_new_tokens=24, eos_token_id=[])
        mask = torch.tensor([[0] * 4 + [1] * 15, [1] * 19])
        for given in ({}, dict(attention_mask=mask)):
            wanted = hf.generate(ids, do_sample=False, **given, **options)
            for devices in ({"cuda"}, {"cpu", "cuda"}):  # one step after the other, and that of a graph
                monkeypatch.setattr(graphs, "DEVICES", devices)
                assert torch.equal(model.generate(ids, **given, **options), wanted)
        rows = [ids[0, 4:], ids[1], ids[1, :7]]
        for found, row in zip(generate_many(model, rows, batch_size=2, **options), rows, strict=True):
            assert torch.equal(found, hf.generate(row[None], do_sample=False, **options)[0, len(row) :])
        drafted = model.generate(ids[:1], prompt_lookup_num_tokens=3, **options)
        assert torch.equal(drafted, hf.generate(ids[:1], do_sample=False, **options))

    def test_gradients_after_cached_tokens(self, model, ids):
        """As where keys are stored whole: those of the new tokens alone."""
        found = []
        for rotating in (6, None):
            model.decoder.layers[1].self_attn.rotating = rotating
            model.zero_grad()
            with torch.no_grad():
                cache = model(ids[:, :8], use_cache=True).past_key_values
            assert cache[1].key_dim == (rotating or 12)
            model(ids[:, 8:], past_key_values=cache).logits.square().mean().backward()
            found.append([x.grad for x in model.parameters() if x.grad is not None])
        assert len(found[0]) == len(found[1])
        for grad, expected in zip(*found, strict=True):
            assert relative(grad, expected) < GRADIENTS

    @pytest.mark.parametrize("norm", ["k_norm", "v_norm"])
    def test_keys_are_whole_where_a_hook_changes_them(self, model, ids, norm):
        attention = model.decoder.layers[1].self_attn
        hook = attention.get_submodule(norm).register_forward_hook(lambda module, args, out: out * 1.5)
        expected, cache = model(ids, use_cache=False).logits, model.new_cache(2, 19)
        for part in (slice(0, 8), slice(8, 9), slice(9, 19)):
            assert relative(model(ids[:, part], past_key_values=cache).logits, expected[:, part]) < LOGITS
        assert cache[1].key_dim == 12
        hook.remove()
        cache.reset()
        model(ids[:, :8], past_key_values=cache)
        assert cache[1].key_dim == 6
        attention.get_submodule(norm).register_forward_hook(lambda *given: None)
        with pytest.raises(InputError, match=r"since then k_norm or v_norm got a hook.*call cache.reset"):
            model(ids[:, 8:], past_key_values=cache)

    def test_other_caches_have_whole_keys(self, model, ids):
        expected = model(ids, use_cache=False).logits
        theirs, fp8 = transformers.DynamicCache(), model.new_cache(2, 19, kv_cache_dtype="fp8")
        for part in (slice(0, 8), slice(8, 19)):
            found = model(ids[:, part], past_key_values=theirs).logits
            assert relative(found, expected[:, part]) < LOGITS
            with torch.no_grad():
                model(ids[:, part], past_key_values=fp8)
        assert theirs.layers[1].keys.shape[-1] == fp8[1].key_dim == 12

    def test_a_rope_without_other_dims_or_of_another_kind_keeps_whole_keys(self):
        for changes in (
            dict(partial_rotary_factor=1.0),
            dict(rope_type="default", partial_rotary_factor=0.5),
            dict(partial_rotary_factor=0.05),
        ):
            ropes = {**ROPES, FULL: {**ROPES[FULL], **changes}}
            config = {**TestGemma4.TINY["keys_as_values"], "rope_parameters": ropes}
            model = ligermodels.Gemma4.from_config(config, device="cpu", dtype=torch.float32)
            assert model.new_cache(1, 4)[1].key_dim == 12, changes


def test_experts_of_its_router_are_neither_taken_nor_recorded():
    config = TestGemma4.TINY["experts"]
    model, ids = ligermodels.Gemma4.from_config(config, device="cpu"), torch.ones(1, 3, dtype=torch.long)
    experts = torch.zeros(config["num_hidden_layers"], 3, config["top_k_experts"], dtype=torch.int32)
    for call in (
        lambda: model(ids, experts=experts),
        lambda: model(ids, output_experts=True),
        lambda: model(ids, output_router_logits=True),
        lambda: model.generate(ids, max_new_tokens=2, output_experts=True),
    ):
        with pytest.raises(InputError, match=r"has no router that|needs a mixture of experts"):
            call()


@pytest.mark.parametrize(("changes", "message"), [
    (dict(num_kv_shared_layers=5), "num_kv_shared_layers=5 leaves blocks no block of their kind before them"),
    (dict(num_kv_shared_layers=9), "num_kv_shared_layers=9 leaves blocks no block of their kind before them"),
    (dict(layer_types=[FULL, SLIDING] * 3), "layer_types=.* must end with full_attention"),
    (dict(use_bidirectional_attention="all"), "use_bidirectional_attention='all' is not supported"),
    (dict(global_head_dim=7), "global_head_dim=7 must be even"),
    (dict(attention_k_eq_v=True, num_global_key_value_heads=3), "num_global_key_value_heads=3 must divide"),
    (dict(per_layer_config={"1": {"head_dim": 12}}), "per_layer_config=.* may give head_dim to the blocks of full"),
    (dict(per_layer_config={str(i): {"head_dim": i} for i in (1, 3, 5)}), "the same to each, and nothing else"),
    (dict(per_layer_config={str(i): {"num_key_value_heads": 1} for i in (1, 3, 5)}), "may give head_dim to the blocks"),
    (dict(per_layer_config={str(i): {"head_dim": 16} for i in (1, 3, 5)}), "may give head_dim to the blocks of"),
    (dict(per_layer_config=[]), "per_layer_config"),
    (dict(enable_moe_block=True), "enable_moe_block=True needs num_experts, top_k_experts and moe_intermediate_size"),
])  # fmt: skip
def test_a_config_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Gemma4Config.from_hf({**TestGemma4.TINY["shared_keys"], **changes})
