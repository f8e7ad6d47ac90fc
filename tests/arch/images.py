"""The properties of Qwen's models that read images, on tiny checkpoints that transformers writes."""

import inspect
import types

import pytest
import torch
from hypothesis import strategies as st

from ligermodels.checkpoint import weights
from ligermodels.errors import InputError
from tests.arch.qwen2_vl import CASES, IMAGE, image, inputs, load, token_mask, video
from tests.arch.suite import (
    GRADIENTS,
    LOGITS,
    Tiny,
    check_checkpointing,
    check_gradients,
    relative,
    theirs,
    theirs_logits,
)

PARTS = st.one_of(
    st.integers(1, 5),
    st.tuples(st.just("image"), st.tuples(st.just(1), st.integers(1, 4), st.integers(1, 4))),
    st.tuples(st.just("video"), st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))),
)
ROWS = st.lists(st.lists(PARTS, min_size=1, max_size=5), min_size=1, max_size=3)
PIXELS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def check_positions(rows, pad, tiny, config, theirs_model):
    """Positions are those of get_rope_index of transformers, and of packed rows those of the rows."""
    theirs = theirs_model.__new__(theirs_model)  # of which it needs this alone
    torch.nn.Module.__init__(theirs)
    theirs.config = types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2))
    batch = inputs(rows, tiny, pad=pad)
    tokens = token_mask(batch)
    batch["input_ids"][~tokens] = IMAGE  # which counts for nothing there
    batch = {name: value for name, value in batch.items() if "pixel" not in name}
    expected, expected_deltas = theirs.get_rope_index(**batch)
    del batch["mm_token_type_ids"]
    positions, deltas = config.get_rope_index(**batch)
    assert torch.equal(positions, expected) and torch.equal(deltas, expected_deltas)
    # the same rows without their padding, packed into one
    texts = [batch["input_ids"][row, tokens[row]] for row in range(len(rows))]
    bounds = torch.tensor([0, *map(len, texts)]).cumsum(0, dtype=torch.int32)
    sizes = {name: value for name, value in batch.items() if "grid" in name}
    packed, _ = config.get_rope_index(torch.cat(texts)[None], **sizes, cu_seqlens=bounds)
    assert torch.equal(packed[:, 0], torch.cat([positions[:, row, tokens[row]] for row in range(len(rows))], dim=1))


class ImageSuite(Tiny):
    @pytest.fixture
    def model(self, folder):
        return load(folder)

    def named_on_disk(self, tensors):
        return tensors

    def test_logits_loss_and_every_gradient(self, hf, model, tiny):
        for rows in (CASES["mixed"], CASES["of_one_size"]):
            batch = inputs(rows, tiny)
            tokens = token_mask(batch)
            labels = batch["input_ids"].masked_fill(~tokens, -100)
            labels[torch.arange(len(labels)), tokens.int().argmax(1)] = -100  # else padding would have to predict it
            expected = hf(**batch, labels=labels)
            output = model(**batch, labels=labels, return_logits=True)
            assert relative(output.logits[tokens], expected.logits[tokens]) < LOGITS
            assert abs(output.loss - expected.loss) < LOGITS * expected.loss
            hf.zero_grad()
            model.zero_grad()
            expected.loss.backward()
            model(**batch, labels=labels).loss.backward()
            # 2.8 was seen, of the bias of patches, which sums over all of them.
            check_gradients(hf, model, self.named_on_disk, allowed=4 * GRADIENTS)

    @pytest.mark.gpu
    def test_images_in_bf16_on_a_gpu_are_as_near_to_fp32_as_transformers(self, first, written, monkeypatch):
        """Logits and all gradients: the medians of nine texts, with the bounds of the suite's texts."""
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of their convolution, by default in tf32
        folder = written(first, norm=self.NORM)
        exact, eager = theirs(folder), theirs(folder).to("cuda", torch.bfloat16)
        ours = load(folder, dtype=torch.bfloat16, device="cuda")
        regions = weights.regions(ours, ours.DISK_NAMES)
        taken = inspect.signature(type(exact).forward).parameters

        def results(model, batch):
            batch = {name: x.to(model.device) for name, x in batch.items() if model is ours or name in taken}
            more = dict(return_logits=True) if model is ours else {}
            output = model(**batch, labels=batch["input_ids"], **more)
            model.zero_grad()
            output.loss.backward()
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            if model is ours:
                grads = {region.source: region.to_disk(grads[region.param][region.index]) for region in regions}
            else:
                grads = self.named_on_disk(grads)
            flat = torch.cat([grads[name].double().cpu().flatten() for name in sorted(grads)])
            return output.logits.detach().double().cpu(), flat

        errors = []
        for seed in range(9):
            torch.manual_seed(seed)
            batch = inputs([[4, image(2, 3), 2, image(1, 2), 3]], first)
            wanted = results(exact, batch)
            errors.append([
                [(a - b).norm() for a, b in zip(results(model, batch), wanted, strict=True)] for model in (ours, eager)
            ])  # fmt: skip
        actual, allowed = torch.tensor(errors).median(0).values
        assert (actual < torch.tensor([1.25, 1.5]) * allowed).all(), f"{actual} against {allowed} in transformers"

    @pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
    def test_logits_tokens_and_decoding(self, rows, first, written):
        folder = written(first, norm=self.NORM)
        hf, model, batch = theirs(folder), load(folder), inputs(rows, first)
        full = model(**batch).logits
        tokens = token_mask(batch)
        assert relative(full[tokens], theirs_logits(hf, **batch)[tokens]) < LOGITS
        expected = hf.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(model.generate(**batch, max_new_tokens=12, eos_token_id=[]), expected)
        # The generated tokens, once more in one call.
        again = {**batch, "input_ids": expected.masked_fill(expected >= IMAGE, 5)}
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

    def test_images_of_a_continuation_are_counted(self, first, written):
        model = load(written(first, norm=self.NORM))
        begin, more = inputs([[3, image(1, 2), 2]], first), inputs([[4, image(2, 3), 1]], first)
        cache, ids = model(**begin, use_cache=True).past_key_values, more["input_ids"]
        seen = cache.length
        with pytest.raises(InputError, match=r"6 tokens with the image_token_id .* make 0"):
            model(ids, past_key_values=cache)
        assert model(**more, past_key_values=cache).past_key_values.length == seen + ids.shape[1]
        drawn = model(torch.tensor([[IMAGE]]), past_key_values=cache)  # one that was sampled, as in transformers
        assert drawn.logits.isfinite().all()

    def test_packed_rows_equal_separate_ones(self, first, written):
        torch.manual_seed(3)
        model = load(written(first, norm=self.NORM))
        texts = [[[3, image(2, 3), 2]], [[7]], [[1, video(3, 1, 1), image(2, 2), 4]]]
        parts = [inputs(rows, first) for rows in texts]
        ids = torch.cat([part["input_ids"] for part in parts], dim=1)
        rest = {name: torch.cat([part[name] for part in parts if name in part]) for name in PIXELS}
        lengths = [part["input_ids"].shape[1] for part in parts]
        bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        text = torch.cat([torch.arange(length) for length in lengths])[None]
        sizes = rest["image_grid_thw"], rest["video_grid_thw"]
        positions, _ = model.config.get_rope_index(ids, *sizes, cu_seqlens=bounds)
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

    @pytest.mark.parametrize("recompute", ["block", "mlp"])
    def test_checkpointing_gives_the_same_gradients_and_saves_less(self, recompute, first, written):
        model, batch = load(written(first, norm=self.NORM)), inputs(CASES["padded"], first)
        tower = model.model.visual
        check_checkpointing(model, tower, tower.blocks, {**batch, "labels": batch["input_ids"]}, recompute)
