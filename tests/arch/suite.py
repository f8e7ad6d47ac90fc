"""The properties that every architecture must have, on tiny checkpoints that transformers writes.

A test class names `arch`, `TINY` (id -> keyword arguments of the transformers config), `REAL` (name of a file in
fixtures/configs -> exact number of parameters) and inherits the properties. Weights are drawn large, so that norms,
softcaps and windows change the logits visibly.

Logits, gradients, saving and configs are compared for every entry of `TINY`; the other properties for the first one and
for those in `ALSO`, and for the rest only in the slow tests.
"""

import contextlib
import copy
import importlib
import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ligermodels.arch import ARCHS
from ligermodels.checkpoint import weights
from ligermodels.errors import InputError
from tests.kernels.on_gpu import never_waits
from tests.sizes import SIZES

FIXTURES = Path(__file__).parents[1] / "fixtures" / "configs"
# Both sides compute in fp32, a few hundred roundings deep; 1e-5 of the largest value is what that leaves.
LOGITS = 1e-5
# Gradients pass the same depth twice.
GRADIENTS = 3e-5
STACKED = {"qwen3_vl_moe": True, "qwen3_5_moe": False, "qwen3_5_moe_text": False, "gpt_oss": False}
"""Families whose released files have the experts of a block in stacked tensors; whether these are transposed."""
EVERY = ("test_logits_loss_and_every_gradient", "test_round_trip_is_bit_exact_and_both_generations_of_config_agree")
"""Tests that run on every entry of TINY without `slow`."""


def rope(rope_type, **values):
    return {"rope_type": rope_type, "rope_theta": 500.0, **values}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8, beta_slow=1)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


def tiny_config(model_type, **changes):
    """Keyword arguments of a small transformers config."""
    base = dict(model_type=model_type, max_position_embeddings=128, rms_norm_eps=1e-5, rope_parameters=rope("default"))
    return {**SIZES, **base, **changes}


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def auto_class(config):
    """The class of transformers that makes the model: the one with a language-model head."""
    images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM


def write_checkpoint(tiny, folder, seed=0, norm=1.0):
    """A checkpoint by transformers with random weights: std 0.3 around 0, around `norm` for the norms."""
    config = transformers.AutoConfig.for_model(**tiny)
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(norm if "norm" in name or name.endswith("ln_q.weight") else 0.0, 0.3)
            if parameter.numel() == 1:  # a gate, which is drawn far from 0
                parameter.copy_(parameter.sign() * (0.3 + parameter.abs()))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
            if name.endswith(("layer_scalar", "std_scale")):
                buffer.uniform_(0.5, 1.5)
            if name.endswith(("std_bias", "_min", "_max")):  # of gemma4's tower
                buffer.fill_({"s": 0.3, "n": -0.7, "x": 0.9}[name[-1]]).mul_(1 + 0.3 * torch.rand_like(buffer))
    return save_as_released(model, folder)


def save_as_released(model, folder):
    """Saves transformers' model; where it writes another layout than that of released files, in theirs."""
    model.save_pretrained(folder)
    if (family := model.config.model_type) in STACKED:
        tensors = {name: on_disk(family, name, x).contiguous() for name, x in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if family == "gemma3":  # a new tower loses the first level of its names
        tensors = read_tensors(folder)
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def on_disk(family, name, tensor):
    """A tensor as released files of a family in STACKED have it, from that of transformers' model."""
    return tensor.mT if STACKED[family] and ".mlp.experts." in name else tensor


def theirs(folder):
    """transformers' model in its plainest form: the one that has every softcap, and sums experts in a fixed order."""
    options = dict(dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    return auto_class(transformers.AutoConfig.from_pretrained(folder)).from_pretrained(folder, **options)


def theirs_logits(hf, *ids, **inputs):
    with torch.no_grad():
        return hf(*ids, **inputs).logits


def edit_config(folder, **changes):
    """Changes the text's keys of a folder's config.json; None stays as null, `...` removes the key."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    for key, value in changes.items():
        if value is ...:
            text.pop(key, None)
        else:
            text[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def read_tensors(folder):
    return {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()}


def saved_bytes(run):
    """The bytes of activations that autograd saves, counted each time it saves one."""
    total = 0

    def keep(tensor):
        nonlocal total
        total += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return total


def check_gradients(hf, model, named_on_disk, allowed=GRADIENTS):
    """Each gradient is that of transformers. None and zero are the same: frameworks differ in unused parameters."""
    wanted = named_on_disk({name: parameter.grad for name, parameter in hf.named_parameters()})
    parameters = dict(model.named_parameters())
    regions = [region for region in weights.regions(model, model.DISK_NAMES) if region.param in parameters]
    assert {region.source for region in regions} == set(wanted)
    for region in regions:
        grad, expected = parameters[region.param].grad, wanted[region.source]
        if expected is None or not expected.any():
            assert grad is None or not grad[region.index].any(), region.source
        else:
            found = relative(region.to_disk(grad[region.index]), expected)
            cancels = 10 if expected.numel() == 1 else 1  # a gate's is one sum of terms of both signs
            assert found < allowed * cancels, f"{region.source}: relative error {found:.1e}"


def check_checkpointing(model, tower, stack, batch, recompute):
    """The gradients are bit for bit the same and less is saved: by tower and text, and by the tower alone."""

    def step():
        model.zero_grad()
        model(**batch).loss.backward()

    plain, expected = saved_bytes(step), {name: p.grad.clone() for name, p in model.named_parameters()}
    model.gradient_checkpointing_enable({"recompute": recompute})
    less, policy = saved_bytes(step), tower.checkpointing
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    model.gradient_checkpointing_disable()
    assert saved_bytes(step) == plain
    tower.checkpointing = policy
    policy.prepare(stack)
    assert less < saved_bytes(step) < plain
    for blocks, of_the_tower in ((1, None), (0, 0)):  # a number of blocks is one of the text's
        model.gradient_checkpointing_enable({"recompute": recompute, "blocks": blocks})
        assert tower.checkpointing.blocks == of_the_tower


def check_other_layout(model, folder, tensors, batch, into):
    """`tensors`, the weights of the folder by other names, load as the same model, which is saved by the folder's."""
    before = read_tensors(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    other = type(model).from_hub(folder, progress=False)
    assert torch.equal(other(**batch).logits, model(**batch).logits)
    other.save_pretrained(into)
    saved = read_tensors(into)
    assert before.keys() == saved.keys() and all(torch.equal(before[name], saved[name]) for name in before)


def check_compiled(model, ids, labels=None, **inputs):
    """The whole model is one graph, and its loss and gradients are those of the eager model."""
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = {}
    for name, forward in (("compiled", compiled), ("eager", model)):
        model.zero_grad()
        loss = forward(ids, labels=ids if labels is None else labels, **inputs).loss
        loss.backward()
        found[name] = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    for ours, expected in zip(found["compiled"], found["eager"], strict=True):
        torch.testing.assert_close(ours, expected)


def tables_depend_on_length(model):
    return model.config.ropes["full"]["rope_type"] in ("dynamic", "longrope")


class Wrapper(torch.nn.Module):
    """Steers a decoder layer, as users of transformers write it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden_states, *args, **kwargs):
        return 0.9 * self.block(hidden_states + 0.1, *args, **kwargs)


class Catcher(torch.nn.Module):
    """In place of a layer: keeps what it is called with, and stops there, as code for calibration does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **kwargs):
        self.kept = hidden_states, kwargs
        raise StopIteration


class Tiny:
    """Runs each test on the configurations of `TINY`, on checkpoints that are written once."""

    arch: type
    TINY: dict
    REAL: dict = {}
    ALSO: tuple = ()
    """Entries of TINY for which every property is checked, beside the first."""
    SLOW: tuple = ()
    """Tests of the first entry that are slow tests, since another architecture compiles the same code."""
    NORM = 1.0
    """What the norms' weights are drawn around; where they act as 1 + weight, 0 is as large."""
    GAPS_DIFFER = False
    """Whether a mask with padding between tokens gives other logits than in transformers."""

    def pytest_generate_tests(self, metafunc):
        names = list(self.TINY)
        quick = names if metafunc.function.__name__ in EVERY else [names[0], *self.ALSO]
        marked = [pytest.param(self.TINY[name], id=name, marks=[] if name in quick else pytest.mark.slow)
                  for name in names]  # fmt: skip
        if "tiny" in metafunc.fixturenames:
            metafunc.parametrize("tiny", marked)
        if "first" in metafunc.fixturenames:
            marks = [pytest.mark.slow] if metafunc.function.__name__ in self.SLOW else []
            metafunc.parametrize("first", [pytest.param(self.TINY[names[0]], id=names[0], marks=marks)])
        if "real" in metafunc.fixturenames:
            metafunc.parametrize("real", self.REAL.items(), ids=self.REAL)

    @pytest.fixture
    def folder(self, tiny, written):
        return written(tiny, norm=self.NORM)

    @pytest.fixture
    def hf(self, folder):
        return theirs(folder)

    @pytest.fixture
    def model(self, folder):
        return self.arch.from_hub(folder, progress=False)


class Suite(Tiny):
    SWITCHED_ON: dict
    """All that sets a model of text apart, beside the sizes of a tiny one: what other tests train, split and generate
    with, where they have no entry of their own. Windows are shorter than 16 tokens; widths can be halved."""
    SWITCHED_OFF: dict
    """Values of its fields that switch a feature off, each of which the loss has to show."""
    GENERATE: dict = {}
    """Further arguments of transformers' generate."""

    @pytest.fixture
    def ids(self):
        return torch.randint(3, 90, (2, 24))

    # For every entry of TINY

    def test_logits_loss_and_every_gradient(self, hf, model, ids):
        for length in (24, 7):  # beyond and within the original length of scaled rotary embeddings
            assert relative(model(ids[:, :length]).logits, theirs_logits(hf, ids[:, :length])) < LOGITS
        # An optimizer's state knows parameters by their order alone, and the fused AdamW does not look at shapes.
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in hf.named_parameters()]
        labels = ids.clone()
        labels[0, 5:9] = labels[1, :3] = -100
        expected = hf(ids, labels=labels).loss
        loss = model(ids, labels=labels).loss
        assert abs(loss - expected) < LOGITS * expected
        expected.backward()
        loss.backward()
        check_gradients(hf, model, self.named_on_disk)

    def test_round_trip_is_bit_exact_and_both_generations_of_config_agree(self, folder, model, ids, tmp_path):
        model.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
        before, after = read_tensors(folder), read_tensors(tmp_path / "ours")
        assert before.keys() == after.keys() and len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
        assert all(torch.equal(before[name], after[name]) for name in before)
        expected = model(ids).logits
        assert torch.equal(theirs_logits(theirs(tmp_path / "ours"), ids), theirs_logits(theirs(folder), ids))
        assert torch.equal(self.arch.from_hub(tmp_path / "ours", progress=False)(ids).logits, expected)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(self.earlier_generation(config)))
        earlier = self.arch.from_hub(folder, progress=False)
        assert earlier.config == model.config and torch.equal(earlier(ids).logits, expected)
        saved = json.loads(json.dumps(model.config.to_hf()))
        assert self.arch.config_class.from_hf(saved) == model.config
        assert self.arch.config_class.from_hf(self.earlier_generation(config)) == model.config

    def shallow(self, tiny):
        """`tiny` with a single block."""
        return {**tiny, "num_hidden_layers": 1}

    def earlier_generation(self, config):
        """The config.json that transformers 4 would have written for this one of transformers 5."""
        config = dict(config)
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
        return config

    def named_on_disk(self, tensors):
        """Tensors by transformers' parameter names in memory -> by the names on disk."""
        return tensors

    # For the first entry of TINY and those in ALSO

    def test_the_embedding_leaves_the_row_of_the_pad_token_alone(self, folder, ids):
        edit_config(folder, pad_token_id=ids[0, 3].item())
        hf, model = theirs(folder), self.arch.from_hub(folder, progress=False)
        for count in (100, torch.tensor(100)):  # and the loss over the items of a whole step
            hf.zero_grad()
            model.zero_grad()
            expected = hf(ids, labels=ids, num_items_in_batch=torch.tensor(100)).loss
            loss = model(ids, labels=ids, num_items_in_batch=count).loss
            assert abs(loss - expected) < LOGITS * expected
        expected.backward()
        loss.backward()
        check_gradients(hf, model, self.named_on_disk)

    def greedy(self):
        return dict(do_sample=False, eos_token_id=None, pad_token_id=0, **self.GENERATE)

    def test_greedy_tokens(self, hf, model, ids):
        expected = hf.generate(ids[:, :9], max_new_tokens=40, **self.greedy())
        assert torch.equal(model.generate(ids[:, :9], max_new_tokens=40, eos_token_id=[]), expected)

    def test_cached_decoding_equals_the_full_forward(self, model, ids):
        if tables_depend_on_length(model):
            pytest.skip("cached keys were rotated by the tables of shorter texts")
        full = model(ids).logits
        cache = model.new_cache(2, 24)
        steps = [model(part, past_key_values=cache).logits for part in ids.split([11, 6, 1, 1, 1, 1, 1, 1, 1], dim=1)]
        assert relative(torch.cat(steps, dim=1), full) < LOGITS

    def test_a_decode_loop_by_hand(self, hf, model, ids):
        """With the cache of the output before."""
        if tables_depend_on_length(model):
            pytest.skip("cached keys were rotated by the tables of shorter texts")

        def tokens(forward):
            chosen, past = [ids[:, :9]], None
            for _ in range(14):
                logits, past = forward(chosen[-1], past)
                chosen.append(logits[:, -1].argmax(-1, keepdim=True))
            return torch.cat(chosen[1:], dim=1)

        def whole(new, past):
            output = model(input_ids=new, past_key_values=past)
            return output.logits, output.past_key_values

        def base(new, past):
            output = model.model(new, past_key_values=past)
            return model.lm_head(output.last_hidden_state), output.past_key_values

        expected = hf.generate(ids[:, :9], max_new_tokens=14, **self.greedy())[:, 9:]
        assert torch.equal(tokens(whole), expected)  # with gradients, as many write it
        with torch.no_grad():
            assert torch.equal(tokens(base), expected)

    @pytest.mark.parametrize("recompute", ["none", "block"])
    def test_hooks_and_wrappers_see_and_change_the_hidden_state(self, hf, model, ids, recompute):
        # transformers does not call cross-attention blocks without images.
        crossing = getattr(model.config, "cross_attention_layers", ())
        watched = [i for i in range(len(model.decoder.layers)) if i not in crossing]
        if len(watched) < 2:
            pytest.skip("one block is watched, another wrapped")
        first, last = watched[0], watched[-1]
        found = []
        for one, options in ((hf, {}), (model, dict(return_logits=True))):
            layers, seen = one.get_decoder().layers, []
            layers[first].register_forward_hook(lambda block, args, output, seen=seen: seen.append((args[0], output)))
            direction = torch.linspace(-1, 1, model.config.get_text_config().hidden_size)
            layers[first].register_forward_hook(lambda block, args, output, by=direction: output + by)
            layers[last].register_forward_pre_hook(lambda block, args: (args[0] * 1.1, *args[1:]))
            layers[first].register_full_backward_hook(lambda block, i, o, seen=seen: seen.append((i[0], o[0])))
            layers[last] = Wrapper(layers[last])
            if one is model and recompute == "block":
                model.gradient_checkpointing_enable()
            output = one(ids, labels=ids, output_hidden_states=True, **options)
            output.loss.backward()
            found.append((output, [state for pair in seen for state in pair]))
        (expected, wanted), (output, seen) = found
        assert relative(output.logits, expected.logits) < LOGITS
        assert all(relative(a, b) < GRADIENTS for a, b in zip(seen, wanted, strict=True))
        states = self.comparable_states(model, output.hidden_states)
        assert all(relative(a, b) < LOGITS for a, b in zip(states, expected.hidden_states, strict=True))
        for layers in (hf.get_decoder().layers, model.decoder.layers):
            layers[last] = layers[last].block
        check_gradients(hf, model, self.named_on_disk)

    def test_blocks_run_one_by_one_as_calibration_runs_them(self, hf, model, ids):
        """The loop of GPTQ, AWQ, Wanda and SparseGPT, and the logits of a state, as a logit lens computes them."""
        layers, expected = model.get_decoder().layers, hf(ids, output_hidden_states=True)

        def states(use_cache):
            layers[0] = catcher = Catcher(layers[0])
            with contextlib.suppress(StopIteration):
                model(ids, use_cache=use_cache)
            layers[0], (state, kept) = catcher.layer, catcher.kept
            for layer in layers:
                yield state
                output = layer(state, **kept)
                state = output[0] if isinstance(output, tuple) else output
            yield state

        *before, last = states(use_cache=False)
        found = [*before, model.get_decoder().norm(last)]
        wanted = expected.hidden_states
        assert all(relative(a, b) < LOGITS for a, b in zip(self.comparable_states(model, found), wanted, strict=True))
        assert relative(model.lm_head(found[-1]), hf.lm_head(wanted[-1])) < LOGITS
        with pytest.raises(InputError, match="takes no cache"):
            [*states(use_cache=True)]

    def test_padding_on_either_side_changes_nothing(self, hf, model, ids):
        alone = model(ids[1:, :15]).logits
        mask = torch.ones(2, 24, dtype=torch.long)
        mask[1, :9] = 0
        left = torch.cat([ids[1:, :9], ids[1:, :15]], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        batch = torch.cat([ids[:1], left])
        if not tables_depend_on_length(model):
            assert relative(model(batch, mask, positions).logits[1:, 9:], alone) < LOGITS
            assert relative(model(batch, mask.flip(1), None).logits[1:, :15], model(batch).logits[1:, :15]) < LOGITS
        gaps = mask.clone()
        gaps[0, 3:8] = gaps[0, 11] = 0
        if model.config.ropes["full"]["rope_type"] == "dynamic" or self.GAPS_DIFFER:
            gaps = mask  # transformers keeps the frequencies of the longest text so far
        for shown in (mask, gaps):
            positions, tokens = (shown.cumsum(1) - 1).clamp(min=0), shown.bool()
            expected = theirs_logits(hf, batch, attention_mask=shown, position_ids=positions)
            assert relative(model(batch, shown, positions).logits[tokens], expected[tokens]) < LOGITS

    def test_left_padding_gives_finite_gradients_and_the_same_tokens(self, hf, model, ids):
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, :5] = 0
        ids = ids[:, :12]
        labels = ids.masked_fill(mask == 0, -100)
        labels[1, 5] = -100  # else the last position of the padding would have to predict it
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, mask, positions, labels=labels).loss.backward()
        hf(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels).loss.backward()
        check_gradients(hf, model, self.named_on_disk)
        expected = hf.generate(ids, attention_mask=mask, max_new_tokens=12, **self.greedy())
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=12, eos_token_id=[]), expected)

    def test_packed_equals_separate(self, model, ids):
        if tables_depend_on_length(model):
            pytest.skip("the longest sequence of a batch decides on the tables of all")
        parts = [ids[:1, :10], ids[1:, :3], ids[1:, 3:14]]
        packed = torch.cat(parts, dim=1)
        positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
        bounds = torch.tensor([0, 10, 13, 24], dtype=torch.int32)
        expected = torch.cat([model(part).logits for part in parts], dim=1)
        assert relative(model(packed, position_ids=positions).logits, expected) < LOGITS
        assert relative(model(packed, cu_seqlens=bounds, max_seqlen=11).logits, expected) < LOGITS
        rows = packed.reshape(2, 12)
        assert relative(model(rows, position_ids=positions.reshape(2, 12)).logits[0, :10], expected[0, :10]) < LOGITS
        total = sum(model(part, labels=part, num_items_in_batch=1).loss for part in parts)
        loss = model(packed, position_ids=positions, labels=packed, num_items_in_batch=1).loss
        assert abs(loss - total) < LOGITS * total
        # Without the head, as TRL calls it, and by the names of the collators.
        inside = model.model(packed, position_ids=positions).last_hidden_state
        collated = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=11, max_length_k=11, seq_idx=None)
        for forward in (model, model.model):
            output = forward(packed, output_attentions=None, return_dict=True, output_hidden_states=True, **collated)
            assert relative(output.last_hidden_state, inside) < LOGITS

    def test_logits_beside_the_loss_hidden_states_and_the_last_positions(self, hf, model, ids):
        output = model(ids, labels=ids, return_logits=True, output_hidden_states=True)
        assert list(output)[:2] == ["loss", "logits"] and type(output)(dict(output)).loss is output.loss
        assert abs(output.loss - model(ids, labels=ids).loss) < LOGITS * output.loss
        expected = hf(ids, output_hidden_states=True).hidden_states
        states = self.comparable_states(model, output.hidden_states)
        assert all(relative(a, b) < LOGITS for a, b in zip(states, expected, strict=True))
        assert torch.equal(model.base_model(ids).last_hidden_state, output.last_hidden_state)
        assert relative(model(ids, logits_to_keep=3).logits, output.logits[:, -3:]) < LOGITS

    def test_embeddings_stand_for_ids(self, model, ids):
        embedded = model.get_input_embeddings()(ids)
        assert relative(model(inputs_embeds=embedded).logits, model(ids).logits) < LOGITS

    def comparable_states(self, model, states):
        """Those that transformers returns too."""
        return states

    def test_a_copy_stands_on_its_own(self, model, ids):
        original, twin = model(ids).logits, copy.deepcopy(model)
        expected = twin(ids).logits  # weights that are mapped from a file are multiplied one by one
        assert relative(expected, original) < LOGITS
        assert twin.state_dict().keys() == model.state_dict().keys() == dict(weights.named_weights(model)).keys()
        with torch.no_grad():
            for _, weight in weights.named_weights(model):
                weight.zero_()
        assert torch.equal(twin(ids).logits, expected)

    def test_what_trainers_ask_for(self, model, ids):
        output = model(**model.prepare_inputs_for_generation(ids, use_cache=True))
        assert output.past_key_values.get_seq_length() == 24
        table = model.get_input_embeddings().weight
        assert model.num_parameters(exclude_embeddings=True) == model.num_parameters() - table.numel()
        for forward in (model, model.model):
            with pytest.raises(InputError, match="no argument 'wibble'"):
                forward(ids, wibble=3)
            with pytest.raises(InputError, match="no argument 'input_embeds'; did you mean 'inputs_embeds'"):
                forward(input_embeds=ids)

    def test_a_bf16_model_keeps_what_must_be_fp32(self, hf, folder, ids):
        """Rotary tables and the loss; norms round where transformers' do."""
        model = self.arch.from_hub(folder, dtype=torch.bfloat16, progress=False)
        positions = torch.arange(0, 30000, 997)[None]
        rotary = hf.get_decoder().rotary_emb
        tables = {"full": model.decoder.rotary_emb, **model.decoder.ropes}
        for name in {model.config.rope(layer) for layer in range(model.config.num_hidden_layers)}:
            of_type = (f"{name}_attention",) if model.config.default_ropes else ()
            wanted = rotary(torch.zeros(1), positions, *of_type)
            for ours, expected in zip(tables[name](positions), wanted, strict=True):
                assert ours.dtype == torch.float32 and torch.equal(ours, expected[..., : ours.shape[-1]])
        norm, expected = model.decoder.norm, hf.to(torch.bfloat16).get_decoder().norm
        x = torch.randn(64, model.config.hidden_size, dtype=torch.bfloat16)
        assert torch.equal(norm(x), expected(x))
        output = model(ids, labels=ids, return_logits=True)
        assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == torch.float32

    # For the first entry of TINY alone

    def test_the_whole_model_compiles_without_a_graph_break(self, first, tmp_path):
        folder = write_checkpoint(self.shallow(first), tmp_path / "hf", norm=self.NORM)
        check_compiled(self.arch.from_hub(folder, progress=False).train(), torch.randint(3, 90, (2, 24)))

    def test_random_weights_follow_the_seed_and_leave_no_memory_as_it_was(self, first):
        config = self.arch.config_class.from_hf(first)
        model = self.arch.from_config(config, dtype=torch.float32, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        model.init_weights(seed=1)
        same, other = (self.arch.from_config(config, dtype=torch.float32, seed=seed).state_dict() for seed in (1, 2))
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all() and torch.equal(parameter, same[name]), name
            scale = parameter + model.decoder.norm.offset if "norm" in name and "weight" in name else parameter
            low, high = (0.01, 0.04) if parameter.numel() > 8 else (0.0, 0.06)  # few numbers may lie close together
            drawn = parameter.numel() == 1 or low < parameter.std() < high or name.endswith("A_log")
            assert (scale == 1).all() or (parameter == 1).all() or not parameter.any() or drawn, name
        drawn = []
        for seed in (7, 7, None):  # without a seed from torch's generator, which goes on
            if seed is not None:
                torch.manual_seed(seed)
            drawn.append(self.arch.from_config(config, dtype=torch.float32).state_dict())
        head = next(name for name in other if name.endswith("embed_tokens.weight"))
        assert all(torch.equal(x, drawn[1][name]) for name, x in drawn[0].items())
        assert len({float(weights[head].sum()) for weights in (other, same, *drawn)}) == 4

    def test_defaults_are_those_of_transformers(self, first):
        sizes = ("model_type", "vocab_size", "intermediate_size", "num_hidden_layers")
        given = {**{name: first[name] for name in sizes}, "hidden_size": 64, "num_attention_heads": 32}
        ours, expected = self.arch.config_class.from_hf(given), transformers.AutoConfig.for_model(**given)
        expected.allow_global_per_layer_attribute_access = True
        for name in ours.field_names() - {"rope_parameters", "dtype"}:
            if getattr(expected, name, None) is not None and not name.endswith("_token_id"):
                assert getattr(ours, name) == getattr(expected, name), name
        assert {**ours.rope_parameters, **expected.rope_parameters} == ours.rope_parameters

    def test_real_configurations(self, real):
        """Exact counts; both generations of the file are read alike and without a warning."""
        name, count = real
        configs = []
        for path in (FIXTURES / f"{name}.json", FIXTURES / "v5" / f"{name}.json"):
            values = json.loads(path.read_text())
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                configs.append(self.arch.config_class.from_hf(values))
            assert configs[-1].torch_dtype == getattr(torch, values.get("dtype") or values["torch_dtype"])
        assert configs[0] == configs[1] == self.arch.config_class.from_hf(json.loads(json.dumps(configs[0].to_hf())))
        model = self.arch.from_config(configs[0], device="meta")
        assert model.num_parameters() == count
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert model.dtype == configs[0].torch_dtype

    def training_batch(self, tiny, seed=0):
        """Arguments of a training step for the tests on a GPU."""
        ids = torch.randint(3, 90, (1, 10), generator=torch.Generator().manual_seed(seed))
        return dict(input_ids=ids, labels=ids)

    @pytest.mark.gpu
    def test_bf16_on_a_gpu_is_as_near_to_fp32_as_transformers(self, hf, folder, tiny):
        """The medians of 15 short texts: in one text a token that a router sends elsewhere, or a softmax that tips
        over, can outweigh all roundings, on either side. The bounds are from nine texts on a CPU, where transformers'
        errors were exceeded by up to 1.08 (logits) and 1.29 times (gradients), mostly undercut."""
        ours = self.arch.from_hub(folder, dtype=torch.bfloat16, device="cuda", progress=False)
        eager = theirs(folder).to("cuda", torch.bfloat16)
        trained = dict(ours.named_parameters())
        regions = [region for region in weights.regions(ours, self.arch.DISK_NAMES) if region.param in trained]
        # transformers 5.17 does not read it in qwen3_vl_moe's config
        asked = {"output_router_logits": True} if getattr(ours.config, "output_router_logits", False) else {}

        def cut(tensors):
            return {region.source: region.to_disk(tensors[region.param][region.index]) for region in regions}

        def results(model, batch, named):
            """Logits, and all gradients in one vector in the order of the names on disk."""
            model.zero_grad()
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            output = model(**batch, **asked, **(dict(return_logits=True) if model is ours else {}))
            output.loss.backward()
            grads = named({
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for name, parameter in model.named_parameters()
            })  # fmt: skip
            flat = torch.cat([grads[name].double().cpu().flatten() for name in sorted(grads)])
            return output.logits.detach().double().cpu(), flat

        errors = []
        for seed in range(15):
            batch = self.training_batch(tiny, seed)
            exact = results(hf, batch, self.named_on_disk)
            found = results(ours, batch, cut), results(eager, batch, self.named_on_disk)
            errors.append([[(a - b).norm() for a, b in zip(one, exact, strict=True)] for one in found])
        actual, allowed = torch.tensor(errors).median(0).values
        assert (actual < torch.tensor([1.25, 1.5]) * allowed).all(), (
            f"logits, gradients: {actual} against {allowed} in transformers"
        )

    @pytest.mark.gpu
    def test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(self, model, tiny):
        # The checker does not see the one synchronisation there is, on the event that follows the count of labels.
        model = model.cuda()
        batch = {name: tensor.cuda() for name, tensor in self.training_batch(tiny).items()}
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

        def step(forward):
            for parameter in trained.values():
                parameter.grad = None
            loss = forward(**batch).loss
            loss.backward()
            return [loss.detach(), *(parameter.grad for parameter in trained.values())]

        def check(found):
            far = {}
            for name, a, b in zip(["loss", *trained], found, expected, strict=True):
                # The gradient of a gate is one number, a sum over all elements whose terms cancel. That of a router
                # that chooses one expert, whose weight is 1, is 0.
                distance, allowed = (a.double() - b.double()).norm(), GRADIENTS * (10 if b.numel() == 1 else 1)
                if not distance <= allowed * b.double().norm():
                    far[name] = relative(a, b)
            assert not far, far

        step(model)
        # Without cross-attention blocks, nothing reads the image tower.
        trained = {name: parameter for name, parameter in trained.items() if parameter.grad is not None}
        assert trained
        with never_waits():
            expected = [tensor.clone() for tensor in step(model)]
        torch.compiler.reset()  # each compilation here is of another model, and Dynamo gives up after eight
        # Inductor takes half a minute, so that the graphs of most entries run as they are.
        compiled = [self.TINY[name] for name in (next(iter(self.TINY)), *self.ALSO)]
        check(step(torch.compile(model, fullgraph=True, backend="inductor" if tiny in compiled else "aot_eager")))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(model)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(model)
        graph.replay()
        check(captured)


def suites(others):
    """{model_type: the class over `Suite` in tests/arch/test_NAME.py of arch/NAME.py} of texts not in `others`."""
    found = {}
    for model_type, arch in ARCHS.items():
        if model_type not in others and not arch.extra_inputs:
            tests = importlib.import_module(f"tests.arch.test_{arch.__module__.rpartition('.')[2]}")
            of_arch = (one for one in vars(tests).values() if getattr(one, "arch", None) is arch)
            suite = next((one for one in of_arch if issubclass(one, Suite)), None)
            assert suite is not None and hasattr(suite, "SWITCHED_ON") and hasattr(suite, "SWITCHED_OFF"), (
                f"{tests.__file__} needs a class over Suite with arch = {arch.__name__}, SWITCHED_ON and SWITCHED_OFF, "
                "which docs/adding.md explains"
            )
            found[model_type] = suite
    return found


class RoutedSuite(Suite):
    """Of mixtures of experts, which transformers 5 stacks in memory; on disk each projection of an expert is a tensor.

    ROUTER, EXPERTS, PROJECTIONS: the names on disk, after that of the block.
    """

    # With a cache, transformers' balancing loss fails on an attention_mask, which is longer than the new tokens.
    GENERATE = {"output_router_logits": False}
    ROUTER, EXPERTS = "mlp.gate.weight", "mlp.experts"
    PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

    def named_on_disk(self, tensors):
        if (family := self.arch.config_class.model_type) in STACKED:
            return {name: x if x is None else on_disk(family, name, x) for name, x in tensors.items()}
        return self.by_expert(tensors)

    def by_expert(self, tensors):
        gate, up, down = self.PROJECTIONS
        found = {}
        for name, tensor in tensors.items():
            block, _, rest = name.partition("mlp.")
            experts = [f"{block}{self.EXPERTS}.{e}." for e in range(len(tensor) if tensor.dim() == 3 else 0)]
            if rest == "gate.weight":
                found[block + self.ROUTER] = tensor
            elif rest == "experts.gate_up_proj":
                for expert, rows in zip(experts, tensor, strict=True):
                    found[f"{expert}{gate}.weight"], found[f"{expert}{up}.weight"] = rows.chunk(2)
            elif rest == "experts.down_proj":
                found |= {f"{expert}{down}.weight": rows for expert, rows in zip(experts, tensor, strict=True)}
            else:
                found[name] = tensor
        return found

    def test_packed_equals_separate(self, model, ids):
        model.config.output_router_logits = False  # that loss is of a batch as a whole, not a sum over its sequences
        super().test_packed_equals_separate(model, ids)

    @pytest.mark.parametrize("apart", [False, True], ids=["stacked", "by expert"])
    def test_other_layouts_load_and_are_written_as_the_released_one(self, folder, hf, model, ids, apart, tmp_path):
        tensors = hf.state_dict()
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors)
        if hf.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        tensors = {name: x.contiguous() for name, x in (self.by_expert(tensors) if apart else tensors).items()}
        check_other_layout(model, folder, tensors, dict(input_ids=ids), tmp_path / "again")

    @pytest.mark.parametrize(("side", "checkpointing"), [("none", False), ("left", True), ("right", False)])
    def test_the_balancing_loss_is_that_of_transformers(self, folder, side, checkpointing):
        edit_config(folder, router_aux_loss_coef=0.2, output_router_logits=False)
        hf, model = theirs(folder), self.arch.from_hub(folder, progress=False)
        config, ids, mask = model.config, torch.randint(3, 90, (2, 24)), torch.ones(2, 24, dtype=torch.long)
        mask[1, :9] = 0
        mask = {"none": None, "left": mask, "right": mask.flip(1)}[side]
        labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
        if side == "left":
            labels = labels.index_fill(1, torch.tensor([9]), -100)  # else the padding would have to predict it
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        inputs = dict(attention_mask=mask, position_ids=positions, labels=labels, output_router_logits=True)
        if checkpointing:
            model.gradient_checkpointing_enable()
            for module in model.train().modules():
                if hasattr(module, "jitter_noise"):
                    module.jitter_noise = 0.0
        expected, output = hf(ids, **inputs), model(ids, **inputs)
        tokens = torch.ones(48, dtype=torch.bool) if mask is None else mask.bool().flatten()
        for found, wanted in zip(output.router_logits, expected.router_logits, strict=True):
            assert found.shape == (48, config.num_experts) and relative(found[tokens], wanted[tokens]) < LOGITS
        for name in ("aux_loss", "loss"):
            assert abs(output[name] - expected[name]) < LOGITS * expected[name], name
        plain = model(ids, mask, positions, labels)
        assert plain.aux_loss is plain.router_logits is None
        assert abs(output.loss - plain.loss - 0.2 * output.aux_loss) < LOGITS * output.loss
        plain.loss.backward()
        names = ("mlp.gate.weight", "mlp.router.weight")
        router = next(p for name, p in model.named_parameters() if name.endswith(names))
        without = router.grad.clone()
        model.zero_grad()
        output.loss.backward()
        # Its part of the gradients is no rounding error, unless all experts get all tokens.
        assert relative(router.grad, without) > 100 * GRADIENTS or config.num_experts_per_tok == config.num_experts
        expected.loss.backward()
        check_gradients(hf, model, self.named_on_disk)
