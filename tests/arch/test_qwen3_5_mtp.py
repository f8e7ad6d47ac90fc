"""Qwen3.5's layer for multi-token prediction: kept, read, trained, and a drafter of `generate`."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding

import ligermodels
from ligermodels.conversion import Options, convert
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.generation import generate, generate_iter, graphs
from ligermodels.generation.drafters import DraftingEngine, MultiToken
from ligermodels.training import AdamW, add_lora, add_mtp, load_mtp
from tests.arch import qwen2_vl, qwen3_vl, test_glm4_moe, test_qwen3_next
from tests.arch.suite import edit_config, read_tensors, relative, theirs, write_checkpoint
from tests.arch.test_qwen3_5 import tiny

BOUNDS = torch.tensor([0, 9, 11, 12, 24], dtype=torch.int32)


def mtp_tensors(config, seed=1, dtype=torch.float32):
    """What a released file has of the layer: the names and shapes of Qwen3.6-27B's, of this size."""
    H, I = config["hidden_size"], config["intermediate_size"]  # noqa: E741
    heads, kv, D = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    shapes = {
        "fc.weight": (H, 2 * H), "norm.weight": (H,), "pre_fc_norm_embedding.weight": (H,),
        "pre_fc_norm_hidden.weight": (H,), "layers.0.input_layernorm.weight": (H,),
        "layers.0.post_attention_layernorm.weight": (H,), "layers.0.mlp.gate_proj.weight": (I, H),
        "layers.0.mlp.up_proj.weight": (I, H), "layers.0.mlp.down_proj.weight": (H, I),
        "layers.0.self_attn.q_proj.weight": (2 * heads * D, H), "layers.0.self_attn.k_proj.weight": (kv * D, H),
        "layers.0.self_attn.v_proj.weight": (kv * D, H), "layers.0.self_attn.o_proj.weight": (H, heads * D),
        "layers.0.self_attn.q_norm.weight": (D,), "layers.0.self_attn.k_norm.weight": (D,),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    return {f"mtp.{name}": (0.3 * torch.randn(shape, generator=draw)).to(dtype) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    folder = write_checkpoint({**tiny(), "mtp_num_hidden_layers": 1}, tmp_path / "source", norm=0.0)
    (file,) = folder.glob("*.safetensors")
    tensors = mtp_tensors(json.loads((folder / "config.json").read_text()))
    save_file({**read_tensors(folder), **tensors}, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def model(folder):
    model = ligermodels.load(folder, progress=False)
    load_mtp(model)
    return model


def of_mtp(folder):
    return {name: x for name, x in read_tensors(folder).items() if name.startswith("mtp.")}


def assert_same(found, expected):
    assert found.keys() == expected.keys() and len(found) == 15
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Kept.


def test_a_round_trip_keeps_it(folder, tmp_path):
    """Also in another dtype of the model, into the folder itself, and when the weights are a trainer's."""
    expected = of_mtp(folder)
    for options in ({}, dict(dtype=torch.bfloat16)):
        model = ligermodels.load(folder, progress=False, **options)
        assert not [name for name, _ in model.named_parameters() if "mtp" in name]
        assert_same(of_mtp(model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")), expected)
    again = ligermodels.load(tmp_path / "saved", progress=False)
    assert_same(of_mtp(again.save_pretrained(tmp_path / "saved")), expected)
    state = {name: x.detach().clone() for name, x in model.named_parameters()}
    assert_same(of_mtp(model.save_pretrained(tmp_path / "state", state_dict=state)), expected)
    convert(folder, tmp_path / "converted", Options(max_shard_size="20KB"))
    assert_same(of_mtp(tmp_path / "converted"), expected)


def test_a_source_that_is_gone_is_said(folder, tmp_path):
    model = ligermodels.load(folder, progress=False)
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match=r"15 tensors such as mtp\..* are not in what is saved"):
        model.save_pretrained(tmp_path / "saved")
    assert not of_mtp(tmp_path / "saved")
    plain = ligermodels.load(tmp_path / "saved", progress=False)
    with pytest.raises(CheckpointError, match=r"it has no mtp\.fc\.weight.*15 differ"):
        load_mtp(plain)


def test_what_is_read_is_saved(model, folder, tmp_path):
    expected = of_mtp(folder)
    assert_same({n: x.detach() for n, x in model.named_parameters() if n.startswith("mtp.")}, expected)
    assert_same(of_mtp(model.save_pretrained(tmp_path / "read")), expected)
    with torch.no_grad():
        model.mtp.fc.weight.mul_(2)
    assert torch.equal(
        of_mtp(model.save_pretrained(tmp_path / "changed"))["mtp.fc.weight"], 2 * expected["mtp.fc.weight"]
    )
    rest = read_tensors(folder)
    assert all(torch.equal(x, rest[n]) for n, x in read_tensors(tmp_path / "changed").items() if n != "mtp.fc.weight")


def test_a_layer_that_would_be_saved_in_part_is_refused(model, tmp_path):
    state = {name: x for name, x in model.state_dict().items() if name != "mtp.fc.weight"}
    with pytest.raises(CheckpointError, match=r"mtp.fc.weight and 1 in all are missing.*\n.*a state_dict without it"):
        model.save_pretrained(tmp_path / "part", state_dict=state)
    add_lora(model, r=2, targets=["mtp.layers.0.self_attn.q_proj"])
    with pytest.raises(CheckpointError, match=r"q_proj.lora_A.weight, .* and 2 in all.*\n.*merge_lora first"):
        model.save_pretrained(tmp_path / "adapted")
    assert not [*tmp_path.glob("part*"), *tmp_path.glob("adapted*")]


def test_refusals(model, folder):
    with pytest.raises(InputError, match="already"):
        load_mtp(model)
    with pytest.raises(InputError, match="came from no folder"):
        load_mtp(ligermodels.Qwen3_5.from_config(tiny()))
    with pytest.raises(InputError, match="Llama has no layer"):
        sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        add_mtp(ligermodels.Llama.from_config(sizes))
    for name, value in (("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True)):
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            add_mtp(ligermodels.Qwen3_5.from_config({**tiny(), name: value}))
    with pytest.raises(CheckpointError, match=r"mtp\..* is \["):
        load_mtp(ligermodels.Qwen3_5.from_config(tiny(intermediate_size=40)), folder)
    plain = ligermodels.load(folder, progress=False)
    with pytest.raises(InputError, match=r"no layer for multi-token prediction; training\.load_mtp"):
        generate(plain, torch.tensor([[5, 6]]), use_mtp=True)
    ids = torch.tensor([[5, 6], [7, 8]])
    for options, says in (
        (dict(num_assistant_tokens=0), "num_assistant_tokens"), (dict(num_assistant_tokens=200), "at most"),
        (dict(prompt_lookup_num_tokens=2), "contradicts"), ({}, "a batch of 2 rows"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            generate(model, ids if not options else ids[:1], use_mtp=True, **options)


# Computed.


def states_by_transformers(model, embeds, hidden):
    """The layer's states, by transformers' block, norms and rotation; embeds: of the next tokens."""
    config = Qwen3_5TextConfig(**{**tiny(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    config._attn_implementation = "eager"
    block, rotary = Qwen3_5DecoderLayer(config, 0), Qwen3_5TextRotaryEmbedding(config)
    block.load_state_dict(model.mtp.layers[0].state_dict())

    def norm(x, ours):
        theirs = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        theirs.load_state_dict(ours.state_dict())
        return theirs(x)

    mtp, length = model.mtp, hidden.shape[1]
    x = torch.cat([norm(embeds, mtp.pre_fc_norm_embedding), norm(hidden, mtp.pre_fc_norm_hidden)], -1)
    x = x @ mtp.fc.weight.T
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    x = block(x, position_embeddings=rotary(x, torch.arange(length)[None]), attention_mask=mask)
    return norm(x[0] if isinstance(x, tuple) else x, mtp.norm)


def losses_by_hand(model, ids, labels):
    """The sums of the layer's losses and the number of its labels."""
    hidden = model(ids, return_logits=False).last_hidden_state
    if ids.shape[1] < 3:
        return hidden.new_zeros(()), 0
    states = states_by_transformers(model, model.model.embed_tokens(ids[:, 1:]), hidden[:, :-1])
    logits, ahead = model.lm_head(states[:, :-1]), labels[:, 2:]
    return F.cross_entropy(logits.flatten(0, 1), ahead.flatten(), reduction="sum"), (ahead != -100).sum()


@pytest.mark.parametrize("kind", ["rows", "left padding", "packed"])
def test_its_loss_is_that_of_the_token_after_the_next(model, kind):
    ids = torch.randint(3, 90, (1, 24))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    inputs, texts = {}, [(0, 24)]
    if kind == "packed":
        inputs, texts = dict(cu_seqlens=BOUNDS), list(zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True))
    elif kind == "left padding":
        labels[:, :6] = -100
        inputs, texts = dict(attention_mask=(torch.arange(24) >= 5).long()[None]), [(5, 24)]
    parts = [losses_by_hand(model.eval(), ids[:, begin:end], labels[:, begin:end]) for begin, end in texts]
    expected = sum(loss for loss, _ in parts) / sum(count for _, count in parts)
    plain = model(ids, labels=labels, **inputs).loss
    output = model.train()(ids, labels=labels, **inputs)
    assert relative(output.mtp_loss, expected) < 1e-5
    assert relative(output.loss, plain + 0.1 * expected) < 1e-5
    output.mtp_loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.mtp.parameters())
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0, "the model learns from it too"


def test_when_it_runs(model):
    """In training with labels alone; not with a weight of 0; frozen, only the layer learns."""
    ids = torch.randint(3, 90, (2, 12))
    assert model.eval()(ids, labels=ids).get("mtp_loss") is None and model.train()(ids).get("mtp_loss") is None
    whole, num = model(ids, labels=ids).mtp_loss, torch.tensor(40.0)
    assert relative(model(ids, labels=ids, num_items_in_batch=num).mtp_loss, whole * 20 / num) < 1e-5
    model.mtp.loss_weight = 0.0
    assert model(ids, labels=ids).get("mtp_loss") is None
    model.mtp = None
    new = add_mtp(model, loss_weight=0.5, freeze=True)
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad} == {"mtp"}
    optimizer, losses = AdamW(new.parameters(), lr=0.02), []
    for _ in range(30):
        output = model(ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.mtp_loss.item())
    assert losses[-1] < 0.5 * losses[0]


# A drafter.


def test_the_model_and_its_layer_are_loaded_at_once(folder, model, tmp_path):
    both = ligermodels.load(folder, progress=False, mtp_loss_weight=0.3, dtype=torch.bfloat16)
    assert both.mtp.loss_weight == 0.3 and not both.mtp.training
    found = {name: x for name, x in both.named_parameters() if name.startswith("mtp.")}
    assert_same(found, {name: x.bfloat16() for name, x in of_mtp(folder).items()})
    new = ligermodels.Qwen3_5.from_config(tiny(), dtype=torch.float32, mtp_loss_weight=0.3, seed=0)
    assert new.mtp.norm.weight.eq(0).all() and new.mtp.fc.weight.std() > 0
    without = ligermodels.Qwen3_5.from_config(tiny()).save_pretrained(tmp_path / "without")
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight"):
        ligermodels.load(without, progress=False, mtp_loss_weight=0.3)
    with pytest.raises(InputError, match="loss_weight=-1 must be 0 or more"):
        ligermodels.load(folder, progress=False, mtp_loss_weight=-1)
    with pytest.raises(InputError, match="mtp_loss_weight= reads plain weights"):
        ligermodels.load(folder, progress=False, mtp_loss_weight=0.3, quantization_config="nf4")


@pytest.mark.parametrize("right", [False, True], ids=["its own guesses", "right guesses"])
@pytest.mark.parametrize("captured", [False, True])
def test_it_drafts_and_the_text_is_the_greedy_one(model, captured, right, monkeypatch):
    """Each proposal is the greedy one of the layer, which reads its own states where the model has none yet.

    right: the guesses are replaced by the text, so that all are accepted.
    """
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"} if captured else set())
    model.requires_grad_(False)
    ids, seen, draft = torch.randint(3, 90, (1, 9)), [], MultiToken.draft

    def spy(self):
        proposed, length = draft(self), 1 + int(self.step.ends[self.step.last])  # of the text
        seen.append((expected[0, :length].tolist(), proposed.tolist()))
        return expected[0, length:][: self.count] if right else proposed

    monkeypatch.setattr(MultiToken, "draft", spy)
    for options in ({}, dict(prefill_chunk_size=4), dict(num_assistant_tokens=3), dict(do_sample=True, seed=3)):
        seen.clear()
        options = {**options, "max_new_tokens": 16, "eos_token_id": ()}
        plain = {name: value for name, value in options.items() if name != "num_assistant_tokens"}
        expected = generate(model, ids, **plain)
        assert torch.equal(generate(model, ids, use_mtp=True, **options), expected)
        assert 0 < len(seen) <= (5 if right else 15)
        for tokens, proposed in seen:
            text = torch.tensor([tokens])
            states, hidden = None, model(text, return_logits=False).last_hidden_state[:, :-1]
            for token in proposed:
                states = states_by_transformers(model, model.model.embed_tokens(text[:, 1:]), hidden)[:, -1:]
                assert model.lm_head(states).argmax().item() == token
                text, hidden = torch.cat([text, torch.tensor([[token]])], 1), torch.cat([hidden, states], 1)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_turns_that_run_ahead_end_where_plain_decoding_does(model, device, rate, count, monkeypatch):
    """Whatever is accepted and whatever ends the text, which the cache continues; a turn begins before one is read."""
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"})
    model, ids = model.requires_grad_(False).to(device), torch.randint(3, 90, (1, 9), device=device)
    options = dict(max_new_tokens=30, eos_token_id=())
    expected, draft, turns = generate(model, ids, **options), MultiToken.draft, list[str]()
    follow, forward = MultiToken.propose_on_device, DraftingEngine.forward
    text = expected[0, 9:].tolist()
    assert len(set(text)) > 8, "a model that repeats itself proves little"
    right = torch.rand(40, count, generator=torch.Generator().manual_seed(3)).to(device) < rate

    def impose(self):
        draft(self)
        turns.append("turn")
        at = 1 + self.step.ends[self.step.last] + torch.arange(count, device=device)
        following = expected[0, at.clamp(max=expected.shape[1] - 1)]
        return torch.where(right[len(turns) % 40], following, (following + 1) % 90)

    def spy(self, *given):
        turns.append("ahead")
        return follow(self, *given)

    def without_cache(self):
        turns.append("without a cache")
        forward(self)

    monkeypatch.setattr(MultiToken, "draft", impose)
    monkeypatch.setattr(MultiToken, "propose_on_device", spy)
    monkeypatch.setattr(DraftingEngine, "forward", without_cache)
    how = dict(use_mtp=True, num_assistant_tokens=count, return_dict_in_generate=True)
    for new in (2, 7, 12):
        for end in (
            dict(max_new_tokens=new, eos_token_id=()),
            dict(max_new_tokens=30, eos_token_id=text[new - 1]),
            dict(max_new_tokens=30, eos_token_id=(), stopping_criteria=lambda ids, _, n=9 + new: ids.shape[1] >= n),
        ):
            found = generate(model, ids, **end, **how)
            length = 9 + (new if end["eos_token_id"] == () else 1 + text.index(text[new - 1]))
            assert torch.equal(found.sequences, expected[:, :length])
            assert found.past_key_values.length in (length - 1, *[0] * (end["max_new_tokens"] > new))
            more = dict(past_key_values=found.past_key_values, max_new_tokens=30 - length + 9, eos_token_id=())
            assert torch.equal(generate(model, found.sequences, **more), expected)
    turns.clear()
    assert [int(new) for new in generate_iter(model, ids, use_mtp=True, num_assistant_tokens=count, **options)] == text
    assert turns.count("ahead") >= turns.count("turn") - 2 - count, "the last turns wait for what is accepted"
    assert turns.count("without a cache") == 1, "the prompt alone"
    plain = generate(model, ids, output_scores=True, output_logits=True, return_dict_in_generate=True, **options)
    found = generate(model, ids, output_scores=True, output_logits=True, **how, **options)
    assert torch.equal(found.sequences, plain.sequences)
    for x, y in ((found.scores, plain.scores), (found.logits, plain.logits)):
        # A pass of several tokens rounds differently; logits after another token differ by more than 1.
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def test_a_call_that_fails_while_the_next_turn_runs_leaves_no_trace(model, monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"})
    model, ids, cache = model.requires_grad_(False), torch.randint(3, 90, (1, 9)), model.new_cache(1, 64)
    options = dict(max_new_tokens=20, eos_token_id=())
    expected = generate(model, ids, **options)
    for new in (2, 5):
        with pytest.raises(ZeroDivisionError):
            generate(
                model, ids, use_mtp=True, past_key_values=cache, **options,
                stopping_criteria=lambda ids, _, end=9 + new: 1 // (ids.shape[1] < end) == 0,
            )  # fmt: skip
        assert cache.length == cache.farthest == 0
    assert torch.equal(generate(model, ids, use_mtp=True, past_key_values=cache, **options), expected)


def test_a_captured_draft_is_that_of_the_host(model, device, monkeypatch):
    """After 1 to 4 new tokens, of which a step reads 4; it is kept for the next call."""
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"})
    model = model.requires_grad_(False).to(device)
    ids = torch.randint(3, 90, (1, 30), device=device)
    hidden, steps = model(ids, return_logits=False).last_hidden_state[0], []
    for cache in [model.new_cache(1, 64)] * 2:
        drafts = [MultiToken(model, 3) for _ in range(2)]
        for draft, captures in zip(drafts, (True, False), strict=True):
            draft.begin(cache if captures else model.new_cache(1, 64), 64, captures=captures)
        begin = 0
        with torch.no_grad():
            for end in (8, 9, 12, 13, 17, 20, 21, 25, 28):
                text = ids[0, : end + 1].tolist()
                assert len({tuple(draft.propose(text, hidden[begin:end]).tolist()) for draft in drafts}) == 1, end
                begin = end
        steps.append((drafts[0].step, drafts[0].step._graph))
    assert steps[0] == steps[1]
    assert (steps[0][1] is None) == (device == "cpu")
    assert cache.nbytes == sum(x.nbytes for x in (*cache.tensors(), *drafts[0].step.own_cache.tensors()))


def test_it_drafts_after_a_cache(model, monkeypatch):
    """The states of the cached tokens are unknown to it, so that it counts from the first that it knows."""
    model.requires_grad_(False)
    ids, cache, counted, draft = torch.randint(3, 90, (1, 12)), model.new_cache(1, 40), [], MultiToken.draft
    model(ids[:, :7], past_key_values=cache)

    def spy(self):
        proposed = draft(self)
        counted.append(int(self.step.ends[self.step.last]))
        return proposed

    monkeypatch.setattr(MultiToken, "draft", spy)
    options = dict(max_new_tokens=12, eos_token_id=())
    found = generate(model, ids, use_mtp=True, past_key_values=cache, **options)
    assert torch.equal(found, generate(model, ids, **options))
    assert counted[0] == 12 - 7 and counted == sorted(set(counted))


def test_it_drafts_under_autocast_after_a_prompt_that_is_shorter_than_a_draft(model):
    """No pass over the prompt moves the layer's state to the dtype of autocast."""
    model.requires_grad_(False)
    options = dict(max_new_tokens=4, eos_token_id=())
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(model, torch.tensor([[5, 7]]), use_mtp=True, **options)
        assert torch.equal(found, generate(model, torch.tensor([[5, 7]]), **options))


# With images.


def test_the_model_with_images_keeps_it_and_drafts(tmp_path):
    config = qwen3_vl.qwen3_5(initializer_range=0.2)
    made = ligermodels.Qwen3_5VL.from_config(config, dtype=torch.float32, seed=0)
    add_mtp(made, seed=4)
    model = ligermodels.load(made.save_pretrained(tmp_path / "images"), progress=False)
    expected, ids = of_mtp(tmp_path / "images"), torch.randint(3, 90, (1, 9))
    assert_same(of_mtp(model.save_pretrained(tmp_path / "saved")), expected)
    load_mtp(model)
    assert_same(of_mtp(model.save_pretrained(tmp_path / "read")), expected)
    options = dict(max_new_tokens=12, eos_token_id=())
    inputs = qwen2_vl.inputs([[3, ("image", (1, 2, 3)), 5]], config)
    inputs.pop("attention_mask", None)
    for given in (dict(input_ids=ids), inputs):
        assert torch.equal(generate(model, use_mtp=True, **given, **options), generate(model, **given, **options))
    assert model.train()(**inputs, labels=inputs["input_ids"]).mtp_loss > 0


# Of mixtures of experts.


@pytest.fixture(params=["qwen3_next", "glm4_moe"])
def mixture(request, tmp_path):
    """(a folder, the layer by transformers, its rotation): the layer is the last of three blocks of transformers."""
    of_next = request.param == "qwen3_next"
    tiny = test_qwen3_next.tiny(layer_types=["linear_attention", *["full_attention"] * 2])
    tiny = {**(tiny if of_next else test_glm4_moe.tiny(use_qk_norm=True)), "num_hidden_layers": 3}
    folder = write_checkpoint(tiny, tmp_path / "source", norm=0.0 if of_next else 1.0)
    hf, size = theirs(folder), tiny["hidden_size"]
    layer = MtpLayer(hf.config, type(hf.model.layers[2]), type(hf.model.norm), 2)
    for norm in (layer.enorm, layer.hnorm, layer.post_norm):
        torch.nn.init.normal_(norm.weight)
    layer.mtp_block = hf.model.layers[2]
    names = dict(eh_proj="mtp.fc", enorm="mtp.pre_fc_norm_embedding", hnorm="mtp.pre_fc_norm_hidden")
    names["post_norm"], block = "mtp.norm", "mtp.layers.0."
    if not of_next:
        block = "model.layers.2."
        names = {name: block + name for name in names} | {"post_norm": block + "shared_head.norm"}
    tensors = {name.replace("model.layers.2.", block): x for name, x in read_tensors(folder).items()}
    tensors |= {f"{name}.weight": getattr(layer, ours).weight.detach() for ours, name in names.items()}
    if not of_next:
        copies = dict(embed_tokens="model.embed_tokens", **{"shared_head.head": "lm_head"})
        tensors |= {f"{block}{name}.weight": tensors[f"{copied}.weight"].clone() for name, copied in copies.items()}
    (file,) = folder.glob("*.safetensors")
    save_file(tensors, file, metadata={"format": "pt"})
    edit_config(folder, num_hidden_layers=2, **(dict(layer_types=tiny["layer_types"][:2]) if of_next else {}))
    assert tensors[names["eh_proj"] + ".weight"].shape == (size, 2 * size)
    return folder, layer, hf.model.rotary_emb


def test_the_layer_of_a_mixture_is_kept_read_and_trained_as_by_transformers(mixture, tmp_path):
    folder, layer, rotary = mixture
    expected = read_tensors(folder)
    model, ids = ligermodels.load(folder, progress=False), torch.randint(3, 90, (1, 20))
    convert(folder, tmp_path / "converted", Options())
    kept = [model.save_pretrained(tmp_path / "kept"), tmp_path / "converted"]
    load_mtp(model)
    for saved in (*kept, model.save_pretrained(tmp_path / "read")):
        tensors = read_tensors(saved)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    both = ligermodels.load(folder, progress=False, mtp_loss_weight=0.3)
    assert all(torch.equal(x, y) for x, y in zip(both.mtp.parameters(), model.mtp.parameters(), strict=True))
    hidden, embeds = model(ids, return_logits=False).last_hidden_state[:, :-1], model.model.embed_tokens(ids[:, 1:])
    mask, positions = torch.full((19, 19), -torch.inf).triu(1)[None, None], torch.arange(19)[None]
    states = layer(embeds, hidden, rotary(hidden, positions), mask, positions, None)
    loss = F.cross_entropy(model.lm_head(states[:, :-1]).flatten(0, 1), ids[:, 2:].flatten())
    assert relative(model.train()(ids, labels=ids).mtp_loss, loss) < 1e-5
    options = dict(max_new_tokens=12, eos_token_id=())
    assert torch.equal(generate(model.eval(), ids, use_mtp=True, **options), generate(model, ids, **options))


def test_several_layers_of_glm_are_refused():
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=2"):
        add_mtp(ligermodels.Glm4Moe.from_config({**test_glm4_moe.tiny(), "num_nextn_predict_layers": 2}))
