"""GRPO: its losses beside plain formulas, what is sampled and rewarded, and whole runs. TRL: test_trl.py."""

import copy
import json
import pickle
import shutil

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.layers import policy
from ligermodels.processes import Processes
from ligermodels.recipes import rollout
from ligermodels.recipes.base import decoder_inputs
from ligermodels.recipes.data.rows import Rows
from ligermodels.recipes.grpo import GRPO
from ligermodels.recipes.rewards import Rewards
from ligermodels.recipes.rollout import Completion, Prompt, sample
from ligermodels.text import Tokenizer
from ligermodels.text.harmony import PROMPT_END
from tests.parallel.ranks import one_rank
from tests.recipes import losses, runs
from tests.recipes.runs import CHATS, REWARD, completions, metrics, on_two, run, weights, without_newest
from tests.text.folders import harmony
from tests.text.templates import HARMONY

CPU = torch.device("cpu")

# ---- losses ----


def rewarded(*sizes):
    """Completions of random prompts: (tokens of the prompt, of the completion, truncated)."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for n, (prompt, size, truncated) in enumerate(sizes):
        ids = torch.randint(0, losses.TINY["vocab_size"], (prompt + size,), generator=generator).tolist()
        advantage = (-1.0) ** n * (0.5 + n)
        found.append(Completion(Prompt(ids[:prompt], []), ids[prompt:], "", truncated, advantage=advantage))
    return found


def logprobs(model, one, temperature):
    """Of the tokens of a completion, from all logits."""
    logits = model(torch.tensor([one.prompt.ids + one.ids])).logits[0, one.prompt.size - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(one.ids)), torch.tensor(one.ids)]


def plain(model, reference, completions, o, shifts):
    """The loss by layers.policy, of log probabilities one by one. shifts: what those of the sampling were higher by."""
    shape = len(completions), max(len(one.ids) for one in completions)
    mask = torch.zeros(shape, dtype=torch.bool)
    logp, ref, old = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for n, (one, shift) in enumerate(zip(completions, shifts, strict=True)):
        at = n, slice(len(one.ids))
        mask[at] = not one.truncated
        logp[at], ref[at] = logprobs(model, one, o.temperature), logprobs(reference, one, o.temperature).detach()
        old[at] = logp[at].detach() + shift
    ratio = policy.ratios(o.loss_type, logp, old, mask)
    advantages = torch.tensor([one.advantage for one in completions])
    each = policy.token_losses(o.loss_type, logp, ratio, advantages, **o.clip, **o.weights)
    each = each + o.beta * policy.kl_losses(logp, ref, ratio)
    counts = policy.Counts(mask.sum(), torch.tensor(len(completions)), torch.tensor(1.0))
    return policy.reduce_losses(o.loss_type, each, mask, counts, o.max_completion_length)


def options_of(**given):
    return runs.options_of("grpo", **{"max_completion_length": 9, "max_length": 64, **given})


def grpo_of(options, tokenizer, reward=len):
    """The recipe with one reward."""
    recipe = GRPO(options, tokenizer, rewards=Rewards({"r": reward}))
    recipe.processes, recipe.pad_id = Processes(CPU), 0
    return recipe


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("loss", policy.LOSSES)
def test_loss_and_gradients_are_those_of_the_formula(byte_level, loss, family):
    """Off-policy, so that ratios are clipped; with a softcap and a temperature; truncated completions left out."""
    how = {"sapo": dict(sapo_temperature_neg=2.0), "vespo": dict(vespo_k_pos=1.5)}.get(
        loss, dict(epsilon=0.1, epsilon_high=1.05 if loss == "cispo" else 0.15)
    )
    options = options_of(loss_type=loss, mask_truncated_completions=True, beta=0.3, temperature=0.8, **how)
    model, reference = losses.model(family), losses.model(family, seed=1)
    completions = rewarded((3, 5, False), (1, 1, False), (6, 9, True), (2, 7, False))
    of = grpo_of(options, byte_level)
    of.frozen_model, batch = reference.eval(), of.batch_of(completions)
    shifts = [torch.linspace(-0.3, 0.2, len(one.ids)).double() * (-1) ** n for n, one in enumerate(completions)]
    expected = plain(model, reference, completions, options, shifts)
    with torch.no_grad():  # what the first step keeps
        first = dict(batch)
        of.loss(model, first, of.count(batch))
    old = first["old_logprobs"]
    for n, shift in enumerate(shifts):
        old[n, : len(shift)] += shift
    found, sums = of.loss(model, {**batch, "old_logprobs": old}, of.count(batch))
    losses.check(model, found, expected)
    weighed = {"sapo": None, "vespo": "vespo_weight"}.get(loss, "clipped")
    assert {"clipped", "vespo_weight"} & sums.keys() == ({weighed} if weighed else set())
    assert weighed is None or (sums[weighed][0] > 0 and sums[weighed][1] == 13)
    logged = of.metrics_of(completions)
    assert logged["truncated"] == (1, 4) and logged["completion_length"] == (22, 4)


def test_a_step_in_several_forwards_is_one(byte_level):
    for loss in set(policy.LOSSES) - {"bnpo"}:
        options = options_of(loss_type=loss)
        model, completions = losses.model(), rewarded((3, 5, False), (1, 1, False), (6, 9, True))
        of = grpo_of(options, byte_level)
        parts = [completions, completions[:1], completions[1:], []]
        batches = [of.batch_of(part) for part in parts]
        found = [of.loss(model, batch, of.count(batches[0]))[0] for batch in batches]
        torch.testing.assert_close(sum(found[1:]), found[0], rtol=1e-9, atol=1e-11)


def test_worker_processes_get_neither_rewards_nor_models(byte_level):
    of = grpo_of(options_of(), byte_level, lambda completions: completions)
    of.model = of.frozen_model = losses.model()
    sent = pickle.dumps(of.process)
    assert pickle.loads(sent)({"prompt": "a"}) == of.process({"prompt": "a"})
    assert len(sent) < 2 * len(pickle.dumps(byte_level))


# ---- completions ----


def drawn(model, prompts, copies=1, temperature=1.0, seed=0, **options):
    how = dict(max_new_tokens=3, temperature=temperature, stop_ids=(7, 9), seed=[seed])
    return sample(model, prompts, copies, **how | options)


def test_samples_are_of_the_models_own_distribution():
    """Nothing that the checkpoint's generation_config says of sampling bends it, and training goes on after it."""
    model = losses.model().float()
    for name, value in dict(top_k=2, top_p=0.1, repetition_penalty=3.0, do_sample=True, suppress_tokens=[3]).items():
        setattr(model.generation_config, name, value)
    prompts, copies = [[5, 6], [1]], 1000
    found = drawn(model, prompts, copies, temperature=1.5)
    assert len(found) == 2 * copies and model.training
    for n, prompt in enumerate(prompts):
        first = torch.tensor([ids[0] for ids in found[n * copies : (n + 1) * copies]])
        share = torch.bincount(first, minlength=61) / copies
        expected = (model(torch.tensor([prompt])).logits[0, -1] / 1.5).softmax(-1)
        assert (share - expected).abs().max() < 4 * (0.25 / copies) ** 0.5
    for ids in found:
        assert (len(ids) == 3 or ids[-1] in (7, 9)) and not {7, 9} & set(ids[:-1])


def test_samples_depend_on_the_seed_and_greedy_ones_do_not():
    model, prompts = losses.model().float(), [[5, 6], [1], [2, 3, 4]]
    assert drawn(model, prompts, 3) == drawn(model, prompts, 3) != drawn(model, prompts, 3, seed=1)
    assert drawn(model, prompts, temperature=0.0) == drawn(model, prompts, temperature=0.0, rows=1, seed=2)
    assert len(drawn(model, prompts, 3, rows=3)) == 9


def test_ranks_that_sample_together_stop_when_every_row_has_ended(tmp_path):
    model, prompts, calls = losses.model().float(), [[5, 6], [1]], []
    stops = [ids[1] for ids in drawn(model, prompts, temperature=0.0)]
    expected = drawn(model, prompts, temperature=0.0, stop_ids=stops, max_new_tokens=9)
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    with one_rank(tmp_path):
        found = drawn(model, prompts, temperature=0.0, stop_ids=stops, max_new_tokens=9, together=True)
    assert found == expected and len(calls) == max(map(len, found)) < 9


FUNCTIONS = """
def reward(completions, **others): return [len(text) for text in completions]
def right(completions, answer): return [None if a is None else float(c == a) for c, a in zip(completions, answer)]
def fails(completions, answer): return [1 / (c != 'bad') for c in completions]
def few(completions): return [1]
def nan(completions): return [float('nan')] * len(completions)
def silent(completions): return [None] * len(completions)
def lazy(completions): yield 1.0; raise KeyError(completions[0])
def nothing(completions): pass
def asks(completions, solution): pass
"""
WRONG = {
    "fails": r"fails failed at .*rewards.py:4, for completions of x.jsonl:1 to x.jsonl:2: ZeroDivisionError: div",
    "few": r"the reward few returned .* for completions of x.jsonl:1 to x.jsonl:2, not a list of 2 numbers",
    "nan": r"the reward nan returned nan for x.jsonl:1, not a finite",
    "lazy": r"the reward lazy failed at .*rewards.py:8, .*: KeyError: 'good'",
    "nothing": "the reward nothing returned None for completions of x.jsonl:1 to x.jsonl:2, not a list of 2 numbers",
    "asks": "the reward asks needs the columns solution; the rows have answer, prompts, completions, completion_ids",
    "silent": "x.jsonl:1: no reward function gave its completion 'good' a number",
    "other": "has no function other; it has reward, right, fails",
}


def judged(sources, weights=()):
    """Two completions, with what the functions say of them."""
    rows = zip(["good", "bad"], ["good", None], ["x.jsonl:1", "x.jsonl:2"], strict=True)
    found = [
        Completion(Prompt([1], [], columns={"answer": answer}, where=where), [n], text, False)
        for n, (text, answer, where) in enumerate(rows)
    ]
    Rewards.load(sources, weights).judge(found, chat=False)
    return found


def test_rewards_of_files(write):
    file = write("rewards.py", FUNCTIONS)
    both = judged([str(file), f"{file}:right"], (1.0, 10.0))
    assert [one.rewards for one in both] == [{"reward": 4, "right": 1}, {"reward": 3, "right": None}]
    assert [one.reward for one in both] == [14, 3]
    broken = write("broken.py", "import math\nimport nothing_like_it")
    for source, says in {
        **{f"{file}:{name}": says for name, says in WRONG.items()},
        "no.py": "reward_funcs=no.py: there is no file",
        "reward": "there is no file .*; give FILE.py, or FILE.py:function",
        str(broken): "cannot be imported: ModuleNotFoundError",
    }.items():
        with pytest.raises(InputError, match=says):
            judged([source])


def test_a_reward_of_messages_gets_messages(byte_level):
    def reward(completions):
        return [float([message["role"] for message in one] == ["assistant"]) for one in completions]

    recipe = grpo_of(options_of(num_generations=2), byte_level, reward)
    recipe.model, recipe.chat = losses.model(vocab_size=byte_level.vocab_size).float(), True
    assert recipe.evaluation.check_rows(Rows([{"prompt": CHATS[0][:1]}], "", None)) is None and recipe.evaluation.chat
    found = recipe.roll_out([Prompt([5], [])], 0)
    assert [one.reward for one in found] == [1, 1]
    assert [one.truncated for one in found] == [one.ids[-1] not in recipe.stop_ids for one in found] == [True, True]


def test_rewards_of_answers_with_channels(tmp_path, monkeypatch):
    """They see the final channel, and the reasoning under a key of its own; files of completions have all."""
    tokenizer = Tokenizer.from_folder(harmony(tmp_path, HARMONY))
    answers = [
        "<|channel|>analysis<|message|>the cat<|end|><|start|>assistant<|channel|>final<|message|>sat<|return|>",
        "<|channel|>final<|message|>sat on<|return|>",
        "<|channel|>analysis<|message|>the cat",  # cut
    ]
    seen = []

    def reward(completions):
        seen.extend(completions)
        return [float(message["content"] == "sat") for (message,) in completions]

    recipe = grpo_of(options_of(num_generations=3), tokenizer, reward)
    recipe.model = None
    ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    monkeypatch.setattr(rollout, "sample", lambda *args, **options: ids)
    row = {"prompt": [{"role": "user", "content": "the cat"}]}
    assert recipe.check_rows(Rows([row], "", None)) is None
    prompt, encoded, encode = recipe.process(row), [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **options: encoded.append(args) or encode(*args, **options))
    found = recipe.roll_out([prompt], 0)
    assert encoded == [(PROMPT_END,)], "once for all answers"
    assert seen == [
        [{"role": "assistant", "content": "sat", "thinking": "the cat"}],
        [{"role": "assistant", "content": "sat on"}],
        [{"role": "assistant", "content": "", "thinking": "the cat"}],
    ]
    assert [one.reward for one in found] == [1, 0, 0] and [one.truncated for one in found] == [False, False, True]
    assert [one.ids for one in found] == ids and found[0].text == "[analysis] the cat\n[final] sat"
    recipe.chat, recipe.rewards = False, Rewards({"r": lambda completions: [len(text) for text in completions]})
    (text,) = {one.text for one in recipe.roll_out([recipe.process({"prompt": "the cat"})], 0)[:1]}
    assert text == "analysisthe catassistantfinalsat"  # after a prompt that is a text, as it is


# ---- router replay ----


def sampler_of(model, how):
    """A copy of the model that samples as another engine would: its scores of experts have another order."""
    sampler = copy.deepcopy(model)
    for block, other in zip(sampler.model.layers[1:], model.model.layers[1:], strict=True):
        if how == "in fp32":  # pairs of experts whose scores differ by less than fp32 tells apart
            other.mlp.gate.weight.data[4:] = other.mlp.gate.weight.data[:4] * (1 + 1e-9)
            block.mlp.gate.weight.data.copy_(other.mlp.gate.weight)
        else:
            block.mlp.gate.weight.data += 0.1 * torch.randn_like(block.mlp.gate.weight)
    return sampler.float() if how == "in fp32" else sampler


@pytest.mark.parametrize("how", ["in fp32", "with another router"])
def test_a_step_takes_the_experts_of_the_rollout(byte_level, how):
    torch.manual_seed(0)
    model = losses.model("Qwen3Moe", vocab_size=byte_level.vocab_size)
    recipe = grpo_of(
        options_of(num_generations=3, router_replay=True), byte_level, lambda completions: [1.0, 2.0, 4.0] * 2
    )
    recipe.model = sampler = sampler_of(model, how)
    batch = recipe.batch_of(recipe.roll_out([Prompt([5, 6, 7], []), Prompt([8], [])], 0))
    taken, inputs = batch["experts"], decoder_inputs(batch)
    plain = {name: x for name, x in inputs.items() if name not in ("experts", "labels")}
    in_rollout = taken[1] >= 0
    assert in_rollout.all(1).sum() == batch["input_ids"].numel() - 6  # all but the last of each completion
    chosen = model(**plain, output_experts=True).experts
    assert (chosen != taken)[1:, in_rollout].any() and (taken[0] == -1).all()  # block 0 has no router

    seen = []
    for layer in model.model.layers[1:]:
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    found, _ = recipe.loss(model, batch, recipe.count(batch))
    assert all(torch.equal(x[in_rollout], e[in_rollout].int()) for x, e in zip(seen, taken[1:], strict=True))
    gradients = torch.autograd.grad(found, [*model.parameters()])
    model.gradient_checkpointing_enable({"recompute": "block"})
    again, _ = recipe.loss(model, batch, recipe.count(batch))
    for one, other in zip(gradients, torch.autograd.grad(again, [*model.parameters()]), strict=True):
        assert torch.equal(one, other)
    assert gradients[[n for n, _ in model.named_parameters()].index("model.layers.2.mlp.gate.weight")].any()

    if how == "in fp32":  # the weights are the same, so the ratios to what sampled are 1
        of_rollout = sampler(**inputs, return_logprobs=True).logprobs
        close = dict(rtol=0, atol=1e-4)
        torch.testing.assert_close(model(**inputs, return_logprobs=True).logprobs.float(), of_rollout, **close)
        del inputs["experts"]
        assert (model(**inputs, return_logprobs=True).logprobs - of_rollout).abs().max() > 1e-2


def test_router_replay_needs_a_router(byte_level, tmp_path):
    with pytest.raises(InputError, match="router_replay: Llama has no router"):
        grpo_of(options_of(router_replay=True), byte_level).setup(losses.model(), tmp_path, Processes(CPU))


# ---- runs ----


def test_a_run_with_router_replay_resumes_between_the_steps_of_a_rollout(home, tmp_path):
    shutil.copytree(home / "model", home / "mixture")
    config = json.loads((home / "mixture" / "config.json").read_text())
    mixture = losses.model("Qwen3Moe", vocab_size=config["vocab_size"], max_position_embeddings=128).float()
    mixture.save_pretrained(home / "mixture")
    flags = ("--router-replay", "--num-iterations", "2", "--save-steps", "1", "--max-steps", "4")
    assert run(home, tmp_path / "whole", "grpo", *flags, model="mixture") == 0
    without_newest(tmp_path / "whole", tmp_path / "cut")
    assert run(home, tmp_path / "cut", "grpo", *flags, "--resume", model="mixture") == 0
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_a_constant_reward_teaches_nothing(home, tmp_path, capsys):
    (home / "equal.py").write_text("def reward(prompts, **others):\n    return [0.5] * len(prompts)\n")
    assert run(home, tmp_path / "whole", "grpo", "--reward-funcs", home / "equal.py", "--show", "2") == 0
    whole, said = tmp_path / "whole", capsys.readouterr().err
    assert set(metrics(whole).values()) == {0}
    assert "4 of each prompt, at most 5 tokens, temperature 1\n" in said
    assert "4; 1 for each rollout of 4 prompts, in forwards of at most 64 tokens" in said
    assert said.count(", sampled, reward 0.5:\n") == 2
    assert said.count("warning: the rewards prefer no completion of this step to another") == 1
    lines, lengths = completions(whole), metrics(whole, "completion_length")
    assert len(lines) == 4 * 16 and lengths[1] == sum(line["tokens"] for line in lines[:16]) / 16
    assert metrics(whole, "trained_tokens")[1] == 16 * lengths[1]
    assert "| reward of the evaluation | " in (whole / "model" / "README.md").read_text()
    assert metrics(whole, "eval_reward") == {0: 0.5, 4: 0.5} and metrics(whole, "eval_loss") == {0: -0.5, 4: -0.5}


def test_a_reward_that_fails_loses_nothing(home, tmp_path, capsys):
    """What a run does that is resumed: test_recipes.py."""
    third = tmp_path / "out" / "completions" / "rollout-000001.jsonl"
    (home / "fails.py").write_text(
        f"import pathlib{REWARD}own = reward\ndef reward(**given):\n"
        f"    return 1 / 0 if pathlib.Path({str(third)!r}).is_file() else own(**given)\n"
    )
    assert run(home, tmp_path / "out", "grpo", "--reward-funcs", home / "fails.py") == 3
    said = capsys.readouterr().err
    assert "fails.py:6, for completions of " in said and "ZeroDivisionError" in said
    assert "stopped after step 2 of 4, which is saved" in said and "--resume\n" in said


@pytest.mark.slow
def test_two_processes_sample_together(home, tmp_path, capfd):
    """Under FSDP ranks take the same number of steps; an evaluation of one rank's prompts, and an error on a rank."""
    flags = ("--eval-share", "0.4", "--eval-steps", "2", "--rollout-rows", "4")
    on_two(tmp_path, lambda: run(home, tmp_path / "two", "grpo", *flags))
    assert run(home, tmp_path / "one", "grpo", *flags) == 0
    one, two = (metrics(tmp_path / name, "eval_reward") for name in ("one", "two"))
    assert one[0] == two[0]  # greedy
    assert len(completions(tmp_path / "two")) == 4 * 8  # rank 0's
    (home / "wrong.py").write_text(
        "def reward(completions, letter):\n    assert 'k' not in letter\n    return [1.0 for _ in letter]"
    )
    on_two(tmp_path, lambda: run(home, tmp_path / "wrong", "grpo", "--reward-funcs", home / "wrong.py") - 3)
    assert "AssertionError" in capfd.readouterr().err


def test_defaults_of_each_loss():
    found = {loss: options_of(loss_type=loss) for loss in policy.LOSSES}
    clips = {loss: (o.clip["low"], o.clip["high"]) for loss, o in found.items() if loss not in policy.SOFT}
    assert clips == {
        "grpo": (0.2, 0.2), "bnpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4),
        "cispo": (0.2, 5.0), "luspo": (2e-3, 2.5e-3),
    }  # fmt: skip
    alone = options_of(epsilon=0.1)  # as in TRL, epsilon is also the default of epsilon_high
    assert (*alone.clip.values(), options_of(epsilon=0.1, epsilon_high=0.3).clip["high"]) == (0.1, 0.1, None, 0.3)
    assert options_of(accumulation=8).accumulation == 8 and options_of(prompts=4).accumulation == 4
