"""Qwen2-VL: as a model of text, and with images and videos, against transformers and plain formulas."""

import json
import shutil
import types
import warnings

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

import ligermodels
from ligermodels import ConfigError, InputError
from ligermodels.arch import qwen2_vl
from ligermodels.arch.qwen2_vl import Qwen2VLConfig
from ligermodels.checkpoint import weights
from ligermodels.layers import Batch
from tests.arch import suite
from tests.arch.suite import FIXTURES, GRADIENTS, LOGITS, Suite, read_tensors, relative, saved_bytes, theirs_logits

VOCAB, IMAGE, VIDEO, START, END = 97, 90, 91, 92, 93
FULL, SLIDING = "full_attention", "sliding_attention"


def tiny(vision=None, **changes):
    base = dict(
        model_type="qwen2_vl",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters=rope("default"),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        bos_token_id=None,
        eos_token_id=None,
        vision_config=dict(depth=2, embed_dim=16, num_heads=2, mlp_ratio=2, patch_size=2, hidden_size=32)
        | (vision or {}),
    )
    return {**base, **changes}


def rope(rope_type, sections=(1, 1, 2), **values):
    return {"rope_type": rope_type, "rope_theta": 500.0, "mrope_section": list(sections), **values}


def windowed(**changes):
    return tiny(**{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, **changes})


TINY = {
    "plain": tiny(num_key_value_heads=4),
    "tied": tiny(tie_word_embeddings=True, vocab_size=120),
    "one_key_head": tiny(num_key_value_heads=1, rope_parameters=rope("default", (2, 1, 1))),
    "window_in_the_last_block": windowed(),
    "window_switched_off": windowed(use_sliding_window=False, max_window_layers=0),
    "yarn": tiny(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "dynamic": tiny(max_position_embeddings=16, rope_parameters=rope("dynamic", factor=3.0)),
    "one_frame_and_channel": tiny(dict(temporal_patch_size=1, in_channels=1, depth=1, spatial_merge_size=1)),
    "larger_merge": tiny(dict(spatial_merge_size=3, num_heads=1, mlp_ratio=3, hidden_act="gelu_pytorch_tanh")),
}


@pytest.fixture(autouse=True)
def _as_a_model_of_pictures(monkeypatch):
    """The suite asks transformers for a causal language model."""
    monkeypatch.setattr(suite.transformers, "AutoModelForCausalLM", transformers.AutoModelForImageTextToText)


def write_checkpoint(config, folder, **options):
    """As the suite's; its norms of the tower are drawn around 1, too."""
    suite.write_checkpoint(config, folder, **options)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("ln_q.weight"):
            tensors[name] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function: a folder of one's own with the checkpoint of a configuration, which is made but once."""
    made = {}

    def copy(config):
        key = json.dumps(config)
        if key not in made:
            made[key] = write_checkpoint(config, tmp_path_factory.mktemp("made") / "hf")
        return shutil.copytree(made[key], tmp_path_factory.mktemp("copy") / "hf")

    return copy


def on_disk(tensors):
    """Names of transformers in memory -> those on disk."""
    return {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
    }


def flat(config):
    """The config.json of the Hub, from the one that transformers 5 writes."""
    config = dict(config)
    text = {**config.pop("text_config"), "tie_word_embeddings": config["tie_word_embeddings"]}
    parameters = dict(text.pop("rope_parameters"))
    text["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    text["rope_scaling"] = {"type": "mrope" if kind == "default" else kind, **parameters}
    vision = dict(config["vision_config"])
    vision["in_chans"] = vision.pop("in_channels")
    for name in ("rope_parameters", "model_type", "dtype"):
        vision.pop(name)
    dtype = config.pop("dtype")
    return {**text, **config, "vision_config": vision, "torch_dtype": dtype}


class VisionInputs(dict):
    """Inputs of a model for rows of text and images; `hf` are those of transformers."""

    @property
    def hf(self):
        ids = self["input_ids"]
        return {**self, "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}

    @property
    def real(self):
        return self.get("attention_mask", torch.ones_like(self["input_ids"])).bool()


def inputs(rows, config=None, *, pad="left"):
    """rows: a list of text lengths and ("image" or "video", (frames, rows, columns)), these in tokens, for each row."""
    vision = {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "patch_size": 2}
    vision |= (config or tiny())["vision_config"]
    merge, width = vision["spatial_merge_size"], vision["in_channels"] * vision["temporal_patch_size"] * 4
    sizes, texts = {"image": [], "video": []}, []
    for row in rows:
        text = []
        for part in row:
            if isinstance(part, int):
                text += torch.randint(3, IMAGE, (part,)).tolist()
            else:
                kind, (t, h, w) = part
                sizes[kind].append((t, h * merge, w * merge))
                text += [START] + [IMAGE if kind == "image" else VIDEO] * (t * h * w) + [END]
        texts.append(text)
    longest = max(map(len, texts))
    made = VisionInputs()
    gaps = [[0] * (longest - len(text)) for text in texts]
    sides = (lambda gap, text: gap + text) if pad == "left" else (lambda gap, text: text + gap)
    made["input_ids"] = torch.tensor([sides(gap, text) for gap, text in zip(gaps, texts, strict=True)])
    if any(gaps):
        mask = [sides(gap, [1] * len(text)) for gap, text in zip(gaps, texts, strict=True)]
        made["attention_mask"] = torch.tensor(mask)
    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grid) in names.items():
        if sizes[kind]:
            made[grid] = torch.tensor(sizes[kind])
            made[pixels] = torch.randn(int(made[grid].prod(1).sum()), width)
    return made


def image(*size):
    return "image", (1, *size)


def video(*size):
    return "video", size


CASES = {
    "one_image": [[4, image(2, 2), 3]],
    "images_of_several_sizes": [[3, image(2, 3), 1, image(1, 1), image(4, 1), 3]],
    "of_one_size": [[2, image(2, 3), 2], [2, image(2, 3), 2]],
    "padded": [[5, image(2, 3), 3], [2, image(4, 1), image(1, 2), 1]],
    "with_and_without": [[9], [2, image(2, 2), 1], [4, image(1, 3), 2]],
    "videos": [[3, video(2, 2, 3), 2], [1, video(3, 2, 1), video(5, 1, 1), 6]],
    "mixed": [[2, video(4, 2, 1), 1, image(2, 2), 2], [6, image(1, 3), video(2, 1, 1), 3], [3, image(2, 1), 1]],
}


class TestText(Suite):
    arch = ligermodels.Qwen2VL
    TINY = {name: config for name, config in TINY.items() if name != "larger_merge"}
    REAL = {"Qwen2-VL-2B-Instruct": 2_208_985_600, "Qwen2-VL-7B-Instruct": 8_291_375_616}

    @pytest.fixture
    def folder(self, tiny, written):
        return written(tiny)

    @pytest.fixture
    def ids(self):
        return torch.randint(3, IMAGE, (2, 24))

    def earlier_generation(self, config):
        config = flat(config)
        del config["layer_types"]
        if not config["use_sliding_window"]:
            config["sliding_window"] = 5
        return config

    def named_on_disk(self, tensors):
        return on_disk(tensors)

    def compare_gradients(self, hf, model):
        """Those of the text; without images the tower has none, here as there."""
        found = {name: p.grad for name, p in hf.named_parameters()}
        assert {name for name, grad in found.items() if grad is None} == {n for n in found if "visual" in n}
        assert all(p.grad is None for p in model.model.visual.parameters())
        compare_gradients(hf, model, lambda name: not name.startswith("visual"))

    def test_the_embedding_leaves_the_row_of_the_pad_token_alone(self, folder, ids):
        edit(folder, lambda config: config["text_config"].update(pad_token_id=ids[0, 3].item()))
        hf, model = suite.theirs(folder), self.arch.from_hub(folder, progress=False)
        hf(ids, labels=ids).loss.backward()
        model(ids, labels=ids).loss.backward()
        assert not model.decoder.embed_tokens.weight.grad[ids[0, 3]].any() or model.config.tie_word_embeddings
        self.compare_gradients(hf, model)

    @pytest.mark.parametrize("recompute", ["block", "mlp"])
    def test_checkpointing_gives_the_same_gradients_and_keeps_less(self, model, tiny, recompute, monkeypatch):
        monkeypatch.setattr("ligermodels.training.offload.SMALLEST", 1)
        batch = inputs(CASES["padded"], tiny)
        labels = batch["input_ids"]

        def kept():
            model.zero_grad()
            return saved_bytes(lambda: model(**batch, labels=labels).loss.backward())

        before, expected = kept(), {name: p.grad.clone() for name, p in model.named_parameters()}
        for offload in (True, False):
            model.gradient_checkpointing_enable({"recompute": recompute, "offload": offload})
            less = kept()
            assert less < before
            assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
        tower = model.model.visual.checkpointing
        model.gradient_checkpointing_disable()
        assert kept() == before
        model.model.visual.checkpointing = tower
        tower.prepare(model.model.visual.blocks)
        assert less < kept() < before  # the tower alone
        model.requires_grad_(False).decoder.norm.requires_grad_()
        model.gradient_checkpointing_disable()
        assert kept() < before and not model.model.visual.checkpointing.enabled

    @pytest.mark.gpu
    def test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(self, model, ids):
        width = types.SimpleNamespace(width=model.model.visual.patch_embed.proj.width)
        model.model.visual = torch.nn.Module()  # so that every parameter of the model has a gradient
        model.model.visual.patch_embed = types.SimpleNamespace(proj=width)
        super().test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(model, ids)

    @pytest.mark.gpu
    def test_bf16_on_a_gpu_is_as_near_to_fp32_as_transformers(self, hf, folder, tiny):
        bf16_is_as_near_as_transformers(hf, folder, tiny, "cuda")


def bf16_is_as_near_as_transformers(hf, folder, config, device):
    """As the suite's, with images: medians over 15 texts of the errors of logits and of all gradients together."""
    ours = load(folder, dtype=torch.bfloat16, device=device)
    eager = suite.theirs(folder).to(device, torch.bfloat16)
    regions = weights.regions(ours, ours.DISK_NAMES)

    def cut(tensors):
        return {region.source: tensors[region.param][region.index] for region in regions}

    def results(model, batch, named):
        model.zero_grad()
        there = {name: value.to(model.device) for name, value in batch.items()}
        output = model(**there, labels=there["input_ids"], **({"return_logits": True} if model is ours else {}))
        output.loss.backward()
        found = named({name: parameter.grad for name, parameter in model.named_parameters()})
        gradients = torch.cat([found[name].double().cpu().flatten() for name in sorted(found)])
        return output.logits.detach().double().cpu(), gradients

    errors = []
    for _ in range(15):
        batch = inputs([[3, image(2, 2), 2, video(2, 1, 2), 2]], config)
        exact = results(hf, batch.hf, on_disk)
        found = results(ours, batch, cut), results(eager, batch.hf, on_disk)
        errors.append([[(a - b).norm() for a, b in zip(one, exact, strict=True)] for one in found])
    actual, allowed = torch.tensor(errors).median(0).values
    assert (actual < torch.tensor([1.25, 1.5]) * allowed).all(), f"{actual} against {allowed} in transformers"
    return actual / allowed


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def compare_gradients(hf, model, which=lambda name: True):
    wanted = on_disk({name: p.grad for name, p in hf.named_parameters()})
    parameters = dict(model.named_parameters())
    regions = weights.regions(model, model.DISK_NAMES)
    assert {region.source for region in regions} == set(wanted)
    for region in regions:
        if which(region.source):
            found = relative(parameters[region.param].grad[region.index], wanted[region.source])
            assert found < GRADIENTS, f"{region.source}: relative error {found:.1e}"


def load(folder, rule="5.x", **options):
    """The rule for videos of the transformers that is compared with."""
    model = ligermodels.Qwen2VL.from_hub(folder, progress=False, **options)
    model.config.video_rule = rule
    return model


@pytest.fixture
def folder(written):
    return written(TINY["plain"])


@pytest.fixture
def model(folder):
    return load(folder)


@pytest.mark.parametrize("config", TINY.values(), ids=TINY)
def test_logits_loss_and_every_gradient(config, written):
    folder = written(config)
    hf, model = suite.theirs(folder), load(folder)
    for rows in (CASES["mixed"], CASES["of_one_size"]):
        batch = inputs(rows, config)
        labels = batch["input_ids"].masked_fill(~batch.real, -100)
        labels[torch.arange(len(labels)), batch.real.int().argmax(1)] = -100  # else padding would have to predict it
        expected = hf(**batch.hf, labels=labels)
        output = model(**batch, labels=labels, return_logits=True)
        assert relative(output.logits[batch.real], expected.logits[batch.real]) < LOGITS
        assert abs(output.loss - expected.loss) < LOGITS * expected.loss
        hf.zero_grad()
        model.zero_grad()
        expected.loss.backward()
        model(**batch, labels=labels).loss.backward()
        compare_gradients(hf, model)


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_logits_tokens_and_decoding(rows, folder, model):
    hf, batch = suite.theirs(folder), inputs(rows)
    full = model(**batch).logits
    assert (
        relative(full[batch.real], theirs_logits(hf, batch["input_ids"], **without_ids(batch.hf))[batch.real]) < LOGITS
    )
    expected = hf.generate(**batch.hf, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(model.generate(**batch, max_new_tokens=12, eos_token_id=[]), expected)
    # the tokens that were made, once more in one go
    again = VisionInputs(batch, input_ids=expected.masked_fill(expected >= IMAGE, 5))
    again["input_ids"][:, : full.shape[1]] = batch["input_ids"]
    if "attention_mask" in batch:
        again["attention_mask"] = torch.cat([batch["attention_mask"], torch.ones(len(expected), 12).long()], dim=1)
    whole = model(**again).logits[:, full.shape[1] :]
    cache = model.new_cache(len(expected), 4)
    model(**batch, past_key_values=cache)
    steps, seen = [], full.shape[1]
    for part in again["input_ids"][:, seen:].split([5, 1, 1, 1, 4], dim=1):
        seen += part.shape[1]
        mask = again["attention_mask"][:, :seen] if "attention_mask" in again else None
        steps.append(model(part, mask, past_key_values=cache).logits)
    assert relative(torch.cat(steps, dim=1), whole) < LOGITS


def without_ids(batch):
    return {name: value for name, value in batch.items() if name != "input_ids"}


@pytest.mark.parametrize("pad", ["left", "right"])
def test_padding_changes_nothing(model, pad):
    rows = CASES["mixed"]
    torch.manual_seed(1)
    batch = inputs(rows, pad=pad)
    together = model(**batch).logits
    cut = {"pixel_values": 0, "pixel_values_videos": 0, "image_grid_thw": 0, "video_grid_thw": 0}
    for row, parts in enumerate(rows):
        alone = {"input_ids": batch["input_ids"][row : row + 1, batch.real[row]]}
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            count, sizes = sum(type(part) is tuple and part[0] == kind for part in parts), f"{kind}_grid_thw"
            if count:
                alone[sizes] = batch[sizes][cut[sizes] :][:count]
                patches = int(alone[sizes].prod(1).sum())
                alone[pixels] = batch[pixels][cut[pixels] :][:patches]
                cut[sizes], cut[pixels] = cut[sizes] + count, cut[pixels] + patches
        assert relative(together[row, batch.real[row]], model(**alone).logits[0]) < LOGITS


def test_pictures_may_come_with_a_later_call(model):
    """As in a conversation whose cache is kept; positions go on behind the first image, and behind the padding."""
    torch.manual_seed(2)
    rows = [[3, image(2, 3), 4, image(1, 2), video(3, 1, 1), 2], [2, image(2, 3), 4, image(1, 2), video(3, 1, 1), 2]]
    batch = inputs(rows)
    whole = model(**batch).logits
    first = 3 + 8 + 2  # the rows are padded by one
    mask, cache = batch["attention_mask"], model.new_cache(2, 4)
    grids, patches = batch["image_grid_thw"], 24
    order = [0, 2]
    pixels = batch["pixel_values"].split(batch["image_grid_thw"].prod(1).tolist())
    a = model(
        batch["input_ids"][:, :first],
        mask[:, :first],
        past_key_values=cache,
        pixel_values=torch.cat([pixels[i] for i in order]),
        image_grid_thw=grids[order],
    ).logits
    b = model(
        batch["input_ids"][:, first:],
        mask,
        past_key_values=cache,
        pixel_values=torch.cat([pixels[i] for i in (1, 3)]),
        image_grid_thw=grids[[1, 3]],
        pixel_values_videos=batch["pixel_values_videos"],
        video_grid_thw=batch["video_grid_thw"],
    ).logits
    assert len(pixels[0]) == patches
    assert relative(torch.cat([a, b], dim=1)[batch.real], whole[batch.real]) < LOGITS
    step = torch.tensor([[7], [8]])
    longer = VisionInputs(batch, input_ids=torch.cat([batch["input_ids"], step], 1))
    longer["attention_mask"] = torch.cat([mask, torch.ones(2, 1).long()], 1)
    decoded = model(step, longer["attention_mask"], past_key_values=cache).logits
    assert relative(decoded, model(**longer).logits[:, -1:]) < LOGITS


def test_rows_of_a_cache_change_places(model):
    batch, rows = inputs(CASES["padded"]), torch.tensor([1, 0, 1])
    step, mask = torch.tensor([[7], [8], [9]]), torch.cat([batch["attention_mask"], torch.ones(2, 1).long()], 1)
    cache = model(**batch, use_cache=True).past_key_values
    assert cache.state["rope_deltas"][0] != cache.state["rope_deltas"][1]
    cache.reorder(rows)
    found = model(step, mask[rows], past_key_values=cache).logits
    for row, old in enumerate(rows.tolist()):
        cache = model(**batch, use_cache=True).past_key_values
        expected = model(step[[row, row]], mask, past_key_values=cache).logits
        assert relative(found[row], expected[old]) < LOGITS
    cache = model(step, position_ids=torch.full((3, 1, 1), 4), use_cache=True).past_key_values
    assert cache.state["rope_deltas"].tolist() == [[4], [4], [4]]


PARTS = st.one_of(
    st.integers(1, 5),
    st.tuples(st.just("image"), st.tuples(st.just(1), st.integers(1, 4), st.integers(1, 4))),
    st.tuples(st.just("video"), st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))),
)


def theirs_positions(batch):
    """get_rope_index of transformers, which needs of its model but these."""
    stub = types.SimpleNamespace(
        config=types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=lambda *args, **options: Qwen2VLModel.get_vision_position_ids(None, *args, **options),
    )
    known = {"input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask"}
    return Qwen2VLModel.get_rope_index(stub, **{name: value for name, value in batch.hf.items() if name in known})


def counted_positions(batch, rule):
    """The rule in plain Python, token by token."""
    grids = {IMAGE: batch.get("image_grid_thw", []), VIDEO: batch.get("video_grid_thw", [])}
    sizes = {token: iter([(t, h // 2, w // 2) for t, h, w in map(list, grids[token])]) for token in grids}
    positions = [[[0] * batch.real.shape[1] for _ in batch.real] for _ in range(3)]
    deltas = []
    for row, (ids, real) in enumerate(zip(batch["input_ids"].tolist(), batch.real.tolist(), strict=True)):
        here, left, largest = 0, [], -1
        for place, (token, counts) in enumerate(zip(ids, real, strict=True)):
            if not counts:
                continue
            if token in sizes and not left:
                t, h, w = next(sizes[token])
                left = [(here + i, here + j, here + k) for i in range(t) for j in range(h) for k in range(w)]
                here += max(t, h, w) if rule == "4.x" else max(h, w)
            if token in sizes:
                now = left.pop(0)
            else:
                now, here = (here,) * 3, here + 1
            largest = max(largest, *now)
            for axis in range(3):
                positions[axis][row][place] = now[axis]
        deltas.append([largest + 1 - sum(real)])
    return torch.tensor(positions), torch.tensor(deltas)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.lists(PARTS, min_size=1, max_size=5), min_size=1, max_size=3), st.sampled_from(["left", "right"]))
def test_positions_of_any_text(rows, pad):
    batch, config = inputs(rows, pad=pad), Qwen2VLConfig.from_hf(tiny())
    batch["input_ids"][~batch.real] = IMAGE  # which counts for nothing there
    known = {name: value for name, value in batch.items() if "pixel" not in name}
    for rule in ("4.x", "5.x"):
        positions, deltas = config.get_rope_index(**known, video_rule=rule)
        expected, expected_deltas = counted_positions(batch, rule)
        assert torch.equal(positions, expected) and torch.equal(deltas, expected_deltas)
    expected, expected_deltas = theirs_positions(batch)
    assert torch.equal(positions, expected) and torch.equal(deltas, expected_deltas)
    # the same rows without their padding, packed into one
    texts = [batch["input_ids"][row, batch.real[row]] for row in range(len(rows))]
    bounds = torch.tensor([0, *map(len, texts)]).cumsum(0, dtype=torch.int32)
    sizes = {name: value for name, value in known.items() if "grid" in name}
    packed, _ = config.get_rope_index(torch.cat(texts)[None], **sizes, cu_seqlens=bounds, video_rule="5.x")
    assert torch.equal(packed[:, 0], torch.cat([positions[:, row, batch.real[row]] for row in range(len(rows))], dim=1))


def test_the_rules_differ_behind_long_videos():
    """Text after 5 frames of 2 x 1 tokens that began at 9 goes on at 14 or at 11: with get_rope_index of transformers
    4.57 and of 5.23."""
    batch, config = inputs([[8, video(5, 2, 1), 2]]), Qwen2VLConfig.from_hf(tiny())
    for rule, then, delta in (("4.x", 14, -5), ("5.x", 11, -8)):
        positions, deltas = config.get_rope_index(batch["input_ids"], None, batch["video_grid_thw"], video_rule=rule)
        assert positions[:, 0, 19].tolist() == [then] * 3 and deltas.item() == delta
    assert config.video_rule == "4.x" and "video_rule" not in config.to_hf()
    other = Qwen2VLConfig.from_hf(tiny(video_rule="5.x"))
    assert other.to_hf()["video_rule"] == "5.x" and Qwen2VLConfig.from_hf(other.to_hf()) == other
    model = ligermodels.Qwen2VL.from_config(tiny(initializer_range=0.3), dtype=torch.float32)
    earlier = model(**batch).logits
    model.config.video_rule = "5.x"
    later = model(**batch).logits
    assert relative(earlier[:, :19], later[:, :19]) < LOGITS < 100 * LOGITS < relative(earlier[:, 19:], later[:, 19:])


def test_packed_rows_equal_separate_ones(model):
    torch.manual_seed(3)
    parts = [inputs([[3, image(2, 3), 2]]), inputs([[7]]), inputs([[1, video(3, 1, 1), image(2, 2), 4]])]
    ids = torch.cat([part["input_ids"] for part in parts], dim=1)
    rest = {
        name: torch.cat([part[name] for part in parts if name in part])
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    }
    lengths = [part["input_ids"].shape[1] for part in parts]
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    text = torch.cat([torch.arange(length) for length in lengths])[None]
    positions, _ = model.config.get_rope_index(ids, rest["image_grid_thw"], rest["video_grid_thw"], cu_seqlens=bounds)
    expected = torch.cat([model(**part).logits for part in parts], dim=1)
    for options in (
        dict(cu_seqlens=bounds, max_seqlen=max(lengths)),
        dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=99, max_length_k=99),
        dict(position_ids=text),
        dict(position_ids=positions, cu_seqlens=bounds),
        dict(position_ids=torch.cat([text[None], positions])),
    ):
        assert relative(model(ids, **rest, **options).logits, expected) < LOGITS
    assert relative(model(ids, **rest).logits, expected) > 100 * LOGITS

    def gradients(calls):
        model.zero_grad()
        losses = [model(**call, labels=call["input_ids"], num_items_in_batch=10).loss for call in calls]
        sum(losses).backward()
        return sum(losses).detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    loss, found = gradients([dict(input_ids=ids, **rest, position_ids=positions, cu_seqlens=bounds)])
    total, wanted = gradients(parts)
    assert abs(loss - total) < LOGITS * total
    assert all(relative(found[name], wanted[name]) < GRADIENTS for name in wanted)


def test_positions_that_a_data_loader_made(model):
    batch = inputs(CASES["mixed"])
    expected = model(**batch, use_cache=True)
    positions, deltas = model.config.get_rope_index(
        batch["input_ids"], batch["image_grid_thw"], batch["video_grid_thw"], batch["attention_mask"]
    )
    output = model(**batch, position_ids=positions, use_cache=True)
    assert torch.equal(output.logits, expected.logits)
    for cache in (output.past_key_values, expected.past_key_values):
        assert torch.equal(cache.state["rope_deltas"], deltas)
    plain = inputs([[9]])["input_ids"]
    threefold = torch.arange(9).expand(3, 1, 9)
    assert torch.equal(model(plain, position_ids=threefold).logits, model(plain).logits)
    assert "rope_deltas" not in model(plain, use_cache=True).past_key_values.state
    assert model(plain, position_ids=threefold * 2, use_cache=True).past_key_values.state["rope_deltas"].item() == 8


LAYOUTS = {
    "in_memory": ("model.language_model.", "model.visual."),
    "twice_nested": ("model.language_model.model.", "model.visual."),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_other_names_on_disk(layout, folder, model, tmp_path):
    tensors, batch = read_tensors(folder), inputs(CASES["mixed"])
    text, tower = layout
    moved = {
        tower + name.removeprefix("visual.") if name.startswith("visual.")
        else text + name.removeprefix("model.") if name.startswith("model.")
        else name: tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    assert sum(name in tensors for name in moved) == 1
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    again = load(folder)
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    again.save_pretrained(tmp_path / "ours")
    saved = read_tensors(tmp_path / "ours")
    assert saved.keys() == tensors.keys() and all(torch.equal(saved[name], tensors[name]) for name in saved)


def test_what_we_write_is_the_same_model_in_transformers(folder, model, tmp_path):
    batch = inputs(CASES["padded"])
    model.save_pretrained(tmp_path / "ours")
    ours, before = suite.theirs(tmp_path / "ours"), suite.theirs(folder)
    assert torch.equal(ours(**batch.hf).logits, before(**batch.hf).logits)
    assert isinstance(ligermodels.load(tmp_path / "ours", progress=False), ligermodels.Qwen2VL)


def wrong_rotation(dtype):
    def change(model, patch):
        right = type(model.model.visual.rotary_pos_emb).forward
        patch.setattr(
            type(model.model.visual.rotary_pos_emb),
            "forward",
            lambda self, x: tuple(t.to(dtype).float() for t in right(self, x)),
        )

    return change


def swap_rows_and_columns(model, patch):
    right = qwen2_vl.patch_cells
    patch.setattr(qwen2_vl, "patch_cells", lambda grids, merge: right(grids, merge).flip(0))


def number_patches_row_by_row(model, patch):
    patch.setattr(qwen2_vl, "patch_cells", lambda grids, merge: ligermodels.layers.multimodal.patch_cells(grids, 1))


def let_frames_see_each_other(model, patch):
    right = qwen2_vl.Batch
    patch.setattr(qwen2_vl, "Batch", lambda cos, sin, **options: right(cos=cos, sin=sin))


def activate_blocks_exactly(model, patch):
    for block in model.model.visual.blocks:
        block.mlp.activation = "gelu"


def activate_the_merger_quickly(model, patch):
    model.model.visual.merger.mlp.activation = "quick_gelu"


def look_ahead_only(model, patch):
    for block in model.model.visual.blocks:
        block.attn.causal = True


def turn_as_text(model, patch):
    patch.setattr(model.model, "_positions", lambda *args: None)


def take_other_sections(model, patch):
    model.decoder.rotary_emb.sections = (2, 1, 1)


WRONG = {
    "bf16 rotation": (wrong_rotation(torch.bfloat16), 50),
    "fp16 rotation": (wrong_rotation(torch.float16), 10),
    "rows for columns": (swap_rows_and_columns, 100),
    "patches not by token": (number_patches_row_by_row, 100),
    "attention across frames": (let_frames_see_each_other, 100),
    "exact gelu in the blocks": (activate_blocks_exactly, 100),
    "quick gelu in the merger": (activate_the_merger_quickly, 100),
    "causal tower": (look_ahead_only, 100),
    "positions of text": (turn_as_text, 100),
    "other sections": (take_other_sections, 100),
}


@pytest.mark.parametrize(("change", "times"), WRONG.values(), ids=WRONG)
def test_what_is_easily_got_wrong_is_seen(change, times, folder, model, monkeypatch):
    batch = inputs([[2, image(3, 4), 3, video(3, 2, 5), 6]])
    expected = theirs_logits(suite.theirs(folder), batch["input_ids"], **without_ids(batch.hf))
    assert relative(model(**batch).logits, expected) < LOGITS
    change(model, monkeypatch)
    assert relative(model(**batch).logits, expected) > times * LOGITS


def test_a_bf16_model_has_fp32_tables(folder):
    hf = suite.theirs(folder).model
    model = load(folder, dtype=torch.bfloat16)
    assert model.model.visual.patch_embed.proj.weight.dtype == torch.bfloat16
    positions = torch.randint(30000, (3, 2, 50))
    for ours, expected in zip(
        model.decoder.rotary_emb(positions), hf.language_model.rotary_emb(torch.zeros(1), positions), strict=True
    ):
        assert ours.dtype == torch.float32 and torch.equal(ours, expected[..., : ours.shape[-1]])
    positions = torch.randint(500, (2, 300))
    for ours, expected in zip(
        model.model.visual.rotary_pos_emb(positions), hf.visual.rotary_pos_emb(positions, positions.T), strict=True
    ):
        assert ours.dtype == torch.float32 and torch.equal(ours, expected[..., : ours.shape[-1]])
    batch = inputs(CASES["mixed"])
    output = model(**batch, labels=batch["input_ids"], return_logits=True)
    assert output.logits.dtype == torch.bfloat16 and relative(output.logits, load(folder)(**batch).logits) < 0.2


def test_drawn_weights(model):
    drawn = ligermodels.Qwen2VL.from_config(tiny(initializer_range=0.02), dtype=torch.float32)
    weight = drawn.model.visual.patch_embed.proj.weight
    assert weight.shape == (16, 3, 2, 2, 2) and 0.015 < weight.std() < 0.025 and abs(weight.mean()) < 0.005
    assert torch.equal(drawn.model.visual.blocks[0].norm1.weight, torch.ones(16))
    assert all(parameter.isfinite().all() for parameter in drawn.parameters())
    assert drawn.extra_inputs == {
        "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_token_type_ids"
    }  # fmt: skip


def test_a_frozen_tower_gets_no_gradient_and_text_the_same(model):
    batch = inputs(CASES["mixed"])
    model(**batch, labels=batch["input_ids"]).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if not name.startswith("model.visual")}
    model.zero_grad()
    model.model.visual.requires_grad_(False)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(p.grad is None for p in model.model.visual.parameters())
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters() if name in expected)
    table = expected["model.language_model.embed_tokens.weight"]
    assert not table[[IMAGE, VIDEO]].any() and table[START].any()


def test_text_compiles_without_a_graph_break():
    config = tiny(dict(depth=1), initializer_range=0.3, num_hidden_layers=1)
    model = ligermodels.Qwen2VL.from_config(config, dtype=torch.float32)
    ids = torch.randint(3, IMAGE, (2, 24))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, labels=ids).loss, model(ids, labels=ids).loss)


def test_frames_of_one_size_are_a_batch_and_others_sequences(model, monkeypatch):
    made = []
    monkeypatch.setattr(qwen2_vl, "Batch", lambda **options: made.append(Batch(**options)) or made[-1])
    model(**inputs(CASES["of_one_size"]))
    assert made[0].cu_seqlens is None and made[0].cos.shape == (2, 24, 4)
    model(**inputs([[image(2, 3), video(3, 1, 1), 2]]))
    assert made[1].cu_seqlens.tolist() == [0, 24, 28, 32, 36] and made[1].max_seqlen == 24
    assert made[1].cu_seqlens.dtype == torch.int32 and made[1].cos.shape == (1, 36, 4)


def change(name, make):
    return lambda batch: VisionInputs(batch, **{name: make(batch.get(name))})


def drop(name):
    return lambda batch: VisionInputs({key: value for key, value in batch.items() if key != name})


NO_INPUT = {
    "a token too few": (
        change("input_ids", lambda x: x.masked_fill((x == IMAGE).cumsum(1) == 3, 5)),
        ["hold", "make 7"],
    ),
    "a token too many": (
        change("input_ids", lambda x: torch.cat([x, x.new_tensor([[IMAGE]])], 1)),
        ["8 tokens", "make 7"],
    ),
    "a video token": (
        change("input_ids", lambda x: torch.cat([x, x.new_tensor([[VIDEO]])], 1)),
        ["3 tokens", "make 2"],
    ),
    "an image too few": (change("image_grid_thw", lambda x: x[1:]), ["[4, 24]", "image_grid_thw"]),
    "a text cut": (change("input_ids", lambda x: x[:, :8]), ["image_token_id 90", "make 7"]),
    "no pixels": (drop("pixel_values"), ["image pixels are none", "floats [28, 24]"]),
    "no sizes": (drop("image_grid_thw"), ["image pixels are floats [28, 24]", "ask for none"]),
    "no image": (lambda batch: VisionInputs(input_ids=batch["input_ids"]), ["7 tokens", "make 0"]),
    "no ids": (
        lambda batch: drop("input_ids")(VisionInputs(batch, inputs_embeds=torch.zeros(1, 23, 32))),
        ["input_ids"],
    ),
    "embeddings, too": (change("inputs_embeds", lambda x: torch.zeros(1, 23, 32)), ["no inputs_embeds"]),
    "pixels of another patch": (change("pixel_values", lambda x: x[:, :12]), ["[28, 12]", "[28, 24]"]),
    "pixels as numpy has them": (change("pixel_values", lambda x: x.numpy()), ["a ndarray", "floats [28, 24]"]),
    "boundaries as a list": (change("cu_seqlens", lambda x: [0, 23]), ["cu_seqlens is a list"]),
    "bytes": (change("pixel_values", lambda x: x.byte()), ["torch.uint8 [28, 24]", "floats [28, 24]"]),
    "sizes of one image": (change("image_grid_thw", lambda x: x[0]), ["[3]", "integers [images, 3]"]),
    "sizes as floats": (change("image_grid_thw", lambda x: x.float()), ["torch.float32", "integers"]),
    "odd rows": (change("video_grid_thw", lambda x: x + 1), ["video_grid_thw holds", "multiples of 2"]),
    "no frame": (change("video_grid_thw", lambda x: x * 0), ["holds [0, 0, 0]", "positive"]),
    "ids as a list": (change("input_ids", lambda x: x.tolist()), ["input_ids is a list"]),
    "ids as floats": (change("input_ids", lambda x: x.float()), ["float32", "int64"]),
    "one text without a batch": (change("input_ids", lambda x: x[0]), ["(23,)", "[batch, sequence]"]),
    "no ids at all": (drop("input_ids"), ["either input_ids or inputs_embeds"]),
    "another cache": (change("past_key_values", lambda x: transformers.DynamicCache()), ["DynamicCache", "KVCache"]),
    "a mask as a list": (change("attention_mask", lambda x: [1] * 23), ["attention_mask is a list"]),
    "labels of another text": (change("labels", lambda x: torch.ones(1, 5).long()), ["labels", "(1, 5)"]),
    "another mask": (change("attention_mask", lambda x: torch.ones(1, 5).long()), ["[1, 5]", "expected [1, 23]"]),
    "four axes too few": (
        change("position_ids", lambda x: torch.zeros(2, 1, 23).long()),
        ["position_ids", "(2, 1, 23)"],
    ),
}


@pytest.mark.parametrize(("change", "words"), NO_INPUT.values(), ids=NO_INPUT)
def test_inputs_that_do_not_fit_together(change, words, model):
    batch = inputs([[3, image(2, 3), 2, image(1, 1), 2, video(2, 1, 1), 1]])
    assert model(**batch).logits.shape[1] == 23
    with pytest.raises(InputError) as error:
        model(**change(batch))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_generate_asks_for_pictures_by_name(model):
    batch = inputs(CASES["one_image"])
    with pytest.raises(InputError, match="pixels: neither an option of generate nor an input of Qwen2VL"):
        model.generate(batch["input_ids"], max_new_tokens=1, pixels=batch["pixel_values"])
    with pytest.raises(InputError, match="4 tokens"):
        model.generate(batch["input_ids"], max_new_tokens=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(vision_config=None), ["vision_config is None", "object"]),
        (dict(vision_config=[1]), ["vision_config is [1]", "object"]),
        (dict(vision_config=dict(hidden_size=32, depth=10**6)), ["depth=1000000", "from 1 to 1024"]),
        (dict(vision_config=dict(hidden_size=32, hidden_act=["gelu"])), ["hidden_act=['gelu']"]),
        (dict(vision_config=dict(hidden_size=32, mlp_ratio=1e-9)), ["mlp_ratio=1e-09", "a number from 1 to 64"]),
        (dict(vision_config=dict(hidden_size=31)), ["hidden_size=32", "31"]),
        (dict(vision_config=dict(hidden_size=32, depth=0)), ["depth=0", "whole"]),
        (dict(vision_config=dict(hidden_size=32, depth="2")), ["depth='2'", "whole"]),
        (dict(vision_config=dict(hidden_size=32, patch_size=[14, 14])), ["patch_size=[14, 14]"]),
        (dict(vision_config=dict(hidden_size=32, mlp_ratio=True)), ["mlp_ratio=True"]),
        (dict(vision_config=dict(hidden_size=32, embed_dim=36, num_heads=16)), ["embed_dim=36", "num_heads=16"]),
        (dict(vision_config=dict(hidden_size=32, hidden_act="relu")), ["hidden_act='relu'", "quick_gelu"]),
        (dict(vision_config=dict(hidden_size=32, in_chans=1, in_channels=3)), ["in_chans=1"]),
        (dict(vision_config=dict(hidden_size=32, rope_parameters={"rope_type": "yarn"})), ["axial"]),
        (dict(vision_config=dict(hidden_size=32, rope_parameters={"rope_type": "axial", "rope_theta": 0})), ["theta"]),
        (dict(rope_parameters=rope("default", (1, 1, 1))), ["mrope_section is [1, 1, 1]", "together 4"]),
        (dict(rope_parameters=rope("default", (2, 2))), ["mrope_section"]),
        (dict(rope_parameters=rope("default", (5, -2, 1))), ["mrope_section"]),
        (dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), ["mrope_section is [16, 24, 24]"]),
        (dict(video_rule="4.57"), ["video_rule='4.57'", "4.x, 5.x"]),
        (dict(text_config="text"), ["text_config is 'text'"]),
        (dict(text_config={"model_type": "llama"}), ["text_config", "qwen2_vl_text"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value)[:60],
)
def test_configs_that_cannot_work(changes, words):
    with pytest.raises(ConfigError) as error:
        Qwen2VLConfig.from_hf({**tiny(), **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_real_files_of_both_generations_are_read_alike_and_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in TestText.REAL:
            paths = (FIXTURES / f"{name}.json", FIXTURES / "v5" / f"{name}.json")
            earlier, later = (Qwen2VLConfig.from_hf(json.loads(path.read_text())) for path in paths)
            assert earlier == later, name
            assert Qwen2VLConfig.from_hf(json.loads(json.dumps(earlier.to_hf()))) == earlier
            written = transformers.AutoConfig.for_model(**earlier.to_hf())
            read = transformers.AutoConfig.for_model(**json.loads(paths[1].read_text()))
            assert written.text_config.rope_parameters == {**read.text_config.rope_parameters}
            for name in ("depth", "embed_dim", "hidden_size", "in_channels", "rope_parameters", "mlp_ratio"):
                assert getattr(written.vision_config, name) == getattr(read.vision_config, name)
            assert written.tie_word_embeddings == read.tie_word_embeddings == earlier.tie_word_embeddings


def test_defaults_are_those_of_transformers():
    given = dict(model_type="qwen2_vl", vocab_size=VOCAB, hidden_size=1024, intermediate_size=64, num_hidden_layers=2)
    given |= dict(num_attention_heads=8, vision_config=dict(hidden_size=1024))
    ours, expected = Qwen2VLConfig.from_hf(given), transformers.AutoConfig.for_model(**given)
    names = ("rms_norm_eps", "max_position_embeddings", "hidden_act", "num_key_value_heads", "sliding_window")
    assert all(getattr(ours, name) == getattr(expected.text_config, name) for name in (*names, "max_window_layers"))
    assert ours.rope_parameters == {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [16, 24, 24]}
    assert expected.text_config.rope_parameters["rope_theta"] == 1e6
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        assert getattr(ours, name) == getattr(expected, name)
    theirs = expected.vision_config.to_dict()
    assert {name: theirs[name] for name in ours.vision_config.to_hf()} == ours.vision_config.to_hf()


def test_a_config_with_text_config_and_remains_of_a_flat_one(folder, model):
    """As transformers 4.57 writes: the text's fields twice, of which those in text_config hold."""
    written = json.loads((folder / "config.json").read_text())
    text = written["text_config"]
    twice = {**text, "sliding_window": 77, "rms_norm_eps": 0.5, **written, "dtype": None, "torch_dtype": "float32"}
    assert Qwen2VLConfig.from_hf(twice) == Qwen2VLConfig.from_hf(written)
    tied = {**written, "tie_word_embeddings": False, "text_config": {**text, "tie_word_embeddings": True}}
    assert Qwen2VLConfig.from_hf(tied).tie_word_embeddings
    with pytest.warns(
        UserWarning, match="vision_config has keys that are kept for saving, but not used here: .'window'"
    ):
        Qwen2VLConfig.from_hf({**written, "vision_config": {**written["vision_config"], "window": 3}})


@pytest.mark.gpu
def test_a_training_step_with_pictures_waits_for_nothing(folder):
    """Sizes on the CPU; the one wait there is, for the number of tokens, is not seen by the checker."""
    batch = inputs(CASES["mixed"])
    expected, model = load(folder), load(folder, device="cuda")
    labels = batch["input_ids"]
    expected(**batch, labels=labels).loss.backward()
    there = {name: value if "grid" in name else value.cuda() for name, value in batch.items()}
    del there["attention_mask"]
    model(**there, labels=there["input_ids"]).loss.backward()
    there = {name: value if "grid" in name else value.cuda() for name, value in batch.items()}
    model.zero_grad()
    model(**there, labels=there["input_ids"]).loss.backward()
    pairs = zip(model.named_parameters(), expected.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        assert relative(ours.grad.cpu(), theirs.grad) < 1e-3, name
    del there["attention_mask"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**there, labels=there["input_ids"]).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(InputError, match="tokens with the image_token_id"):
        model(**{**there, "input_ids": there["input_ids"].masked_fill(there["input_ids"] == IMAGE, 5)})
