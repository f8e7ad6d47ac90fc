"""Random options of `generate` give what transformers gives. A case is drawn from its number alone.

`pytest "tests/generation/test_random_cases.py::test_generate[17]"` repeats one; a failure prints what the case was.
"""

import random
import warnings

import pytest
import torch
import transformers

import ligermodels
from ligermodels.generation import generate_many

VOCAB, CASES, QUICK = 97, 500, 60
CLOSE = dict(rtol=1e-4, atol=2e-4)  # logits are about 5; fp32 sums in another order
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip
LONGROPE = dict(
    rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.1, 1.3, 1.6], long_factor=[1.4, 2.5, 5.0, 9.0],
    original_max_position_embeddings=16,
)  # fmt: skip
ARCHS = {
    "Llama": dict(),
    "Gemma2": dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=8, initializer_range=0.15),
    "Qwen2": dict(use_sliding_window=False),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "Phi3": dict(rope_parameters=LONGROPE, original_max_position_embeddings=16, sliding_window=None),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Architecture -> (transformers' model, ours) of one checkpoint."""
    made = {}
    for arch, options in ARCHS.items():
        torch.manual_seed(3)
        folder = tmp_path_factory.mktemp(arch)
        config = getattr(transformers, f"{arch}Config")(**{**SIZES, **options})
        model_class = getattr(transformers, f"{arch}ForCausalLM")
        model_class(config).save_pretrained(folder)
        theirs = model_class.from_pretrained(folder, attn_implementation="eager")
        made[arch] = theirs, ligermodels.load(folder, progress=False)
    return made


class Case:
    """What a number draws: an architecture, and a prompt with its mask."""

    def __init__(self, seed, masks):
        self.random = random.Random(seed)
        self.tensors = torch.Generator().manual_seed(seed)
        self.arch = self.random.choice(list(ARCHS))
        self.rows, self.width = self.random.choice([1, 2, 3]), self.random.randint(2, 24)
        self.ids = self.tokens(self.rows, self.width)
        self.mask_kind = self.random.choice(masks)
        self.mask = self.draw_mask()

    def tokens(self, *shape):
        return torch.randint(3, VOCAB, shape, generator=self.tensors)

    def chance(self, share):
        return self.random.random() < share

    def draw_mask(self):
        """[rows, width], 1 at tokens; None where the call has none."""
        if self.mask_kind == "none":
            return None
        mask = torch.ones(self.rows, self.width, dtype=torch.int64)
        for row in mask:
            count = self.random.randint(0, self.width - 1)
            if self.mask_kind == "left":
                row[:count] = 0
            else:  # anywhere but in the last column
                row[torch.randperm(self.width - 1, generator=self.tensors)[:count]] = 0
        return mask

    def draws(self, count):
        """`count` token ids, all different."""
        return self.random.sample(range(3, VOCAB), count)


def options_of_generate(case):
    """Options that transformers and generate have, processors of transformers among them."""
    r, options, processors = case.random, {}, []

    def processor(name, *arguments, **own):
        processors.append(getattr(transformers, f"{name}LogitsProcessor")(*arguments, **own))
        return dict(logits_processor=processors)

    new = r.randint(1, 12)
    options.update(r.choice([dict(max_new_tokens=new), dict(max_length=case.width + new)]))
    options["eos_token_id"] = r.choice([2, case.draws(1)[0], case.draws(20), case.draws(40)])
    if case.chance(0.3):
        options["pad_token_id"] = r.choice([0, 5, VOCAB - 1])
    for share, drawn in (
        (0.2, lambda: dict(min_new_tokens=r.randint(0, 9))),
        (0.15, lambda: dict(min_length=r.randint(0, case.width + 9))),
        (0.3, lambda: dict(repetition_penalty=r.choice([0.7, 1.1, 1.8]))),
        (0.2, lambda: dict(no_repeat_ngram_size=r.randint(1, 3))),
        (0.2, lambda: dict(suppress_tokens=case.draws(30))),
        (0.15, lambda: dict(begin_suppress_tokens=case.draws(60))),
        (0.1, lambda: dict(renormalize_logits=True)),
        (0.2, lambda: processor("NoBadWords", [case.draws(r.randint(1, 3)) for _ in range(30)])),
        (0.1, lambda: dict(labels=case.ids)),
    ):
        if case.chance(share):
            options.update(drawn())
    if case.chance(0.4):
        options.update(do_sample=True, temperature=r.choice([0.5, 1.0, 2.5]), top_k=r.choice([0, 7, 50]))
        for name, values in dict(
            top_p=[0.3, 0.9], min_p=[0.02, 0.3],
        ).items():  # fmt: skip
            if case.chance(0.3):
                options[name] = r.choice(values)
        options["num_return_sequences"] = r.choice([1, 1, 2])
    return options


def run(model, ids, **options):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(ids, return_dict_in_generate=True, output_scores=True, **options)


def assert_same_steps(found, expected, start):
    """Scores are equal while the tokens are; a token of greedy decoding differs only where two are as likely. The least
    likely token that min_p or top_p keeps may be cut on one side by rounding alone: a row is compared no further."""
    together, compared = (torch.ones(len(found.sequences), dtype=torch.bool) for _ in range(2))
    for step, (ours, theirs) in enumerate(zip(found.scores, expected.scores, strict=False)):
        cut = ours.isneginf() != theirs.isneginf()
        kept = torch.maximum(ours, theirs)
        least = kept.masked_fill(kept.isneginf(), float("inf")).amin(1, keepdim=True)
        compared &= ~((cut & (kept <= least + CLOSE["atol"])).any(1) & (cut.sum(1) == 1))
        torch.testing.assert_close(ours[together & compared], theirs[together & compared], **CLOSE)
        column = start + step
        together &= (found.sequences[:, column] == expected.sequences[:, column]) | ~compared
    assert together.all(), (found.sequences, expected.sequences)
    if compared.all():
        assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(QUICK, CASES))]
)
def test_generate(pairs, seed):
    case = Case(seed, ["none", "none", "pad ids", "left", "between"])
    theirs, ours = pairs[case.arch]
    options, r = options_of_generate(case), case.random
    ids, mask = case.ids, case.mask
    how = r.choice(["plain", "plain", "plain", "no cache", "chunks", "embeds", "continued", "many"])
    if case.arch == "Phi3" and how == "many":
        how = "plain"  # longrope chooses its frequencies by the longest row
    if mask is not None:
        ids = ids * mask
    if case.arch == "Phi3" and mask is not None and mask.sum(1).max() <= 16:
        how = "short"  # transformers counts padding where it looks for the original length
        options.update(max_new_tokens=1, max_length=None)
    if mask is not None and (case.mask_kind != "pad ids" or how == "continued"):
        options["attention_mask"] = mask
    print(f"{case.arch}, {how}, mask {case.mask_kind}\nids = {ids.tolist()}\n{options}")
    own = {}
    if how == "many" and not options.get("do_sample"):
        prompts = [row if mask is None else row[mask[i].bool()] for i, row in enumerate(ids)]
        for name in ("attention_mask", "logits_processor"):
            options.pop(name, None)
        if "max_length" in options:
            options["max_length"] = case.width + 5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            size, chunk = r.randint(1, 3), r.choice([None, 4])
            found = generate_many(ours, prompts, batch_size=size, prefill_chunk_size=chunk, **options)
        for row, new in zip(prompts, found, strict=True):
            expected = run(theirs, row[None], attention_mask=torch.ones_like(row)[None], **options)
            assert new.tolist() == expected.sequences[0, len(row) :].tolist()
        return
    if how == "no cache":
        own = dict(use_cache=False)
    elif how == "chunks":
        own = dict(prefill_chunk_size=r.randint(1, 9))
    elif how == "embeds":
        own = dict(inputs_embeds=ours.get_input_embeddings()(ids))
    elif how == "continued":
        mask = torch.ones_like(ids) if mask is None else mask  # an id that is the pad id is a token
        past = run(ours, ids, attention_mask=mask, max_new_tokens=r.randint(1, 4), eos_token_id=[])
        ids = torch.cat([past.sequences, case.tokens(case.rows, r.randint(1, 5))], 1)
        own = dict(past_key_values=past.past_key_values)
        new = mask.new_ones(case.rows, ids.shape[1] - case.width)
        options.update(max_new_tokens=5, max_length=None, attention_mask=torch.cat([mask, new], 1))
    assert_same_steps(run(ours, ids, **own, **options), run(theirs, ids, **options), ids.shape[1])
