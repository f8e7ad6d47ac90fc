"""What is trained, against transformers' masks and against the text that the assistant says."""

import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from ligermodels.errors import InputError, TokenizerError
from ligermodels.recipes.data.examples import IGNORED, Example, best_fit, encode, packed_batch, show
from ligermodels.recipes.data.formats import Conversation, Text, Tokens
from ligermodels.text import Tokenizer
from tests.text import folders
from tests.text.families import FAMILIES, theirs
from tests.text.templates import CALL, CONVERSATIONS, FIND, HARMONY, LLAMA_3, QWEN_3, SAID, SYSTEM, USER, WEATHER

LINE_BREAK = "{% endgeneration %}{{ '\\n' }}"
MARKED = QWEN_3.replace(LINE_BREAK, "{{ '\\n' }}{% endgeneration %}")  # as TRL marks a turn
LATEST = (
    MARKED.replace("messages if m.role == 'user' %}{%", "messages %}{% if m.role == 'user' %}{%")
    .replace("loop.index0 %}{%", "loop.index0 %}{% endif %}{%")
    .replace("if thought or loop.last", "if loop.index0 > ns.last and (thought or loop.last)")
)  # as Qwen 3's own
ALWAYS = LATEST.replace("and (thought or loop.last)", "")  # as Qwen 3.5's: there is a thought, if an empty one
ROUNDS = [SYSTEM, USER, SAID | {"reasoning": "hm"}, USER, SAID, USER, SAID | {"content": "Yes."}]


def trained_text(tokenizer, example):
    """What is trained, "|" between the stretches that are not next to each other."""
    assert all(label in (index, IGNORED) for index, label in zip(example.ids, example.labels, strict=True))
    runs = [list(run) for trained, run in itertools.groupby(example.labels, lambda x: x != IGNORED) if trained]
    return "|".join(map(tokenizer.decode, runs))


# ---- conversations ----


@pytest.fixture(scope="module")
def qwen(folder_of):
    """A tokenizer whose stop tokens include <|im_end|>."""
    return Tokenizer.from_folder(folder_of("qwen 2.5")), AutoTokenizer.from_pretrained(folder_of("qwen 2.5"))


TALKS = {name: chat for name, chat in CONVERSATIONS.items() if any(m["role"] == "assistant" for m in chat)}
TALKS["rounds"] = ROUNDS
TALKS["tools"] = [
    USER, {"role": "assistant", "reasoning_content": "hm", "tool_calls": [CALL]}, {"role": "tool", "content": "here"},
    SAID | {"reasoning_content": "so"}, USER, SAID,
]  # fmt: skip


def without_marks(template):
    return re.sub(r"\{%-? *(end)?generation *-?%\}", "", template)


@pytest.mark.parametrize("marked", [MARKED, LATEST, ALWAYS], ids=["all", "latest", "always"])
@pytest.mark.parametrize("name", TALKS)
def test_marks_and_prefixes_give_the_masks_of_transformers(qwen, name, marked):
    ours, theirs = qwen
    chat = [{key: value for key, value in message.items() if value is not None} for message in TALKS[name]]
    expected = theirs.apply_chat_template(
        TALKS[name], chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    labels = [i if m else IGNORED for i, m in zip(expected["input_ids"], expected["assistant_masks"], strict=True)]
    assert set(labels) != {IGNORED}
    for template in (marked, without_marks(marked)):
        found = encode(Conversation(chat), ours, template=template)
        assert (found.ids, found.labels, found.ends) == (expected["input_ids"], labels, True), template is marked


def random_chat(draw):
    """Some have tool calls, some reasoning in some messages."""
    chat, calls, thinks = [], draw.choice((0, 2)), draw.choice((0, 0.5))
    for _ in range(draw.randint(1, 3)):
        turn = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "here"}]
        for message in (USER, *turn * draw.randint(0, calls), SAID):
            more = {"reasoning_content": f"hm {draw.random()}"} if draw.random() < thinks else {}
            chat.append(message | (more if message["role"] == "assistant" else {}))
    return chat


TRLS = ("qwen3", "glm4moe", "qwen3_vl", "qwen2_5_vl", "llama3", "gemma3", "phi3_5", "lfm2_v2", "qwen3_instruct_2507")
"""Templates that begin a turn as they ask for it; others write <think> into a prompt, and TRL trains it."""


@pytest.mark.parametrize("name", ["latest", "always", *(pytest.param(name, marks=pytest.mark.slow) for name in TRLS)])
def test_random_chats_are_trained_as_the_marks_say(qwen, name):
    """Of our templates, and of those that TRL has marked."""
    draw, encoded = random.Random(0), 0
    if name in TRLS:
        folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
        marked = (folder / f"{name}_training.jinja").read_text()
    else:
        marked = {"latest": LATEST, "always": ALWAYS}[name]
    for _ in range(40):
        chat = Conversation(random_chat(draw))
        try:
            expected = encode(chat, qwen[0], template=marked)
        except (InputError, TokenizerError):  # reasoning or tools that it does not write
            continue
        encoded += 1
        assert encode(chat, qwen[0], template=without_marks(marked)) == expected
    assert encoded > (5 if name in TRLS else 39)


TALK = [
    USER | {"content": "Hi"},
    SAID | {"content": "Yes."},
    USER | {"content": "Why?"},
    SAID | {"content": "It is the cat"},
]
ENDS = {  # the stop, and the line break that a template writes after it
    "llama 2": "</s>", "llama 3.1": "<|eot_id|>", "mistral 0.3": "</s>", "nemo": "</s>",
    "gemma 1": "<end_of_turn>\n", "gemma 2": "<end_of_turn>\n", "qwen 2.5": "<|im_end|>\n", "phi 3": "<|end|>",
    "phi 4": "<|im_end|>",
}  # fmt: skip
PHI = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' }}{% endfor %}"
TEMPLATES = {
    "phi 3": PHI + "{{ '<|assistant|>' if add_generation_prompt else eos_token }}",
    "phi 4": PHI.replace("<|end|>", "<|im_end|>") + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(folder_of, name):
    tokenizer, end, template = Tokenizer.from_folder(folder_of(name)), ENDS[name], {}
    if name in TEMPLATES:
        tokenizer.chat_template = template["chat_template"] = TEMPLATES[name]
    ids = theirs(name, folder_of(name)).apply_chat_template(TALK, **template)["input_ids"]
    last = "<|end|><|endoftext|>" if name == "phi 3" else end  # its template ends the text as well
    silent = [*TALK[:3], TALK[3] | {"train": False}]
    for talk, expected in ((TALK, f"Yes.{end}|Itisthecat{last}"), (silent, f"Yes.{end}")):
        found = encode(Conversation(talk), tokenizer)
        assert found.ids == ids and found.ends
        assert trained_text(tokenizer, found).replace(" ", "") == expected
    found = encode(Conversation(TALK), tokenizer, every_token=True)
    assert (found.ids, found.labels, found.ends) == (ids, [IGNORED, *ids[1:]], True)


FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
CALLS = ' to=functions.find<|channel|>commentary json<|message|>{"what":"the<mat>","count":3}<|call|>'
ASKS = {"role": "assistant", "tool_calls": [CALL]}
HARMONIES = {
    "answer": ([USER, SAID], f"{FINAL}SAID<|return|>"),
    "reasoning": (
        [SYSTEM, USER, SAID | {"thinking": "hm"}], f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}SAID<|return|>"
    ),
    "rounds": (  # <|end|>, with which the template ends earlier answers, stops nothing and is not trained
        [SYSTEM, USER, SAID | {"reasoning": "no"}, USER, SAID, USER, SAID | {"reasoning_content": "hm"}],
        f"{FINAL}SAID|{FINAL}SAID|{ANALYSIS}hm<|end|><|start|>assistant{FINAL}SAID<|return|>",
    ),
    "call": (
        [USER, ASKS | {"thinking": "hm"}, {"role": "tool", "content": "here"}],
        f"{ANALYSIS}hm<|end|><|start|>assistant{CALLS}",
    ),
    "call and answer": (
        [USER, ASKS | {"thinking": "no"}, {"role": "tool", "content": "here"}, SAID | {"thinking": "hm"}, USER],
        f"{CALLS}|{FINAL}SAID",
    ),
    "calls with content": (
        [USER, ASKS | {"content": "no"}, {"role": "tool", "content": "here"}, ASKS, {"role": "tool", "content": "here"},
         SAID, USER, ASKS | {"content": "hm"}, {"role": "tool", "content": "here"}, SAID],
        f"{CALLS}|{CALLS}|{FINAL}SAID|{CALLS}|{FINAL}SAID<|return|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMONIES)
@pytest.mark.parametrize("source", ["ours", "released"])
def test_gpt_oss(tmp_path, name, source):
    """What the model says after `<|start|>assistant`, and nothing else; "released" is the template as TRL has it."""
    template, (chat, expected) = HARMONY, HARMONIES[name]
    if source == "released":
        template = (Path(pytest.importorskip("trl").__file__).parent / "chat_templates" / "gptoss.jinja").read_text()
    tokenizer = Tokenizer.from_folder(folders.harmony(tmp_path, template))
    found = encode(Conversation(chat), tokenizer)
    assert found.ends
    said = SAID["content"].replace(" ", "")
    assert trained_text(tokenizer, found).replace(" ", "") == expected.replace(" ", "").replace("SAID", said)
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode(found.ids) == rendered
    assert tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True).endswith(
        "<|end|><|start|>assistant"
    )
    assert tokenizer.convert_ids_to_tokens(list(tokenizer.chat_stop_ids)) == ["<|return|>", "<|endoftext|>", "<|call|>"]


def test_a_header_at_the_end_of_every_text_is_not_trained(byte_level):
    """As in the old template of Llama 3, whether it is to begin an answer or not."""
    condition = re.compile(r"\{%- if add_generation_prompt %\}(.*)\{% endif %\}", re.DOTALL)
    always = condition.sub(r"\1", LLAMA_3)
    for talk in (TALK[:2], TALK):
        found = encode(Conversation(talk), byte_level, template=always)
        asked = byte_level.apply_chat_template(talk, chat_template=LLAMA_3, add_generation_prompt=True)
        expected = encode(Conversation(talk), byte_level, template=LLAMA_3)
        assert found.ids == asked and expected.trained and found.ends
        assert found.labels == expected.labels + [IGNORED] * (len(asked) - expected.size)


ONE_OF_THREE = [USER, SAID | {"content": "one"}, USER, SAID | {"content": "two", "train": False}, USER, SAID]


def test_messages_that_are_not_trained_under_a_marked_template(qwen):
    results = [encode(Conversation(ONE_OF_THREE), qwen[0], template=text) for text in (MARKED, without_marks(MARKED))]
    assert results[0] == results[1]
    text = trained_text(qwen[0], results[0])
    assert text.startswith("one<|im_end|>\n|<think>") and "two" not in text


def test_a_stop_token_that_is_not_trained(qwen):
    outside = QWEN_3.replace("{{ '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}")
    plain = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    for template in (outside, plain):
        found = encode(Conversation([USER, SAID]), qwen[0], template=template)
        assert found.trained and found.ends is False


LATE_SYSTEM = (
    "{% set system = messages[0].content %}{% for m in messages[1:] %}"
    "{{ '[INST]' ~ (system if loop.last else '') ~ m.content ~ '[/INST]' if m.role == 'user' else m.content }}"
    "{% endfor %}"
)
"""Mistral's: the system prompt stands beside a last message of the user only."""
GROWING = "{% for m in messages %}{{ m.content ~ ('' if loop.last else messages | length) }}{% endfor %}"
CHANGING = "{% for m in messages %}{{ m.content | upper if loop.last else m.content }}{% endfor %}"
LAST = "{{ messages[-1].content }}"
BEFORE = r"changes the conversation before messages\[{}\] once that message follows.* a system prompt or tools"
CHANGED = r"changes messages\[{}\] once there are messages after it"
ONE_CALL = QWEN_3.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
THINKS = SAID | {"reasoning": "hm"}
PLAIN = PHI + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
CALLS = {"role": "assistant", "tool_calls": [CALL, CALL]}
REFUSED = {
    "system late": (Conversation([SYSTEM, *TALK]), dict(template=LATE_SYSTEM), BEFORE.format(2)),
    "last alone": (Conversation(TALK[:2]), dict(template=LAST), BEFORE.format(1)),
    "calls left out": (Conversation([USER, CALLS]), dict(template=PLAIN), r"leaves out messages\[1\].tool_calls: find"),
    "one call left out": (Conversation([USER, CALLS]), dict(template=ONE_CALL), r"leaves out messages\[1\].tool_calls"),
    "tools left out": (
        Conversation([*TALK], [FIND, WEATHER]), dict(template=PLAIN, every_token=True), "leaves out tools: find, weath"
    ),
    "reasoning left out": (
        Conversation([USER, THINKS, USER, SAID]), dict(template=PLAIN), r"leaves out messages\[1\].reasoning, so"
    ),

    "growing": (Conversation(TALK), dict(template=GROWING), CHANGED.format(1)),
    "changing": (Conversation([TALK[0] | {"content": "HI"}, *TALK[1:]]), dict(template=CHANGING), CHANGED.format(1)),
    "assistant first": (Conversation([SAID, USER]), {}, "the first message is the assistant's; start with a user"),
    "every": (Conversation([*TALK[:3], SAID | {"train": False}]), dict(every_token=True), "every token is trained"),
    "surrogate": (Text("\ud800"), {}, "lone surrogate"),
    "foreign id": (Tokens([5, 99999], [5, 99999]), {}, "99999 is not an id of the tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained(byte_level, case):
    item, how, message = REFUSED[case]
    with pytest.raises((InputError, TokenizerError), match=message):
        encode(item, byte_level, **how)


def test_a_tokenizer_without_eos(tmp_path):
    folder = folders.byte_level(tmp_path)
    (folder / "generation_config.json").unlink()
    settings = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(settings.replace('"eos_token": "<|eot_id|>", ', ""))
    with pytest.raises(InputError, match="has no eos token"):
        encode(Text("a"), Tokenizer.from_folder(folder))


# ---- texts and tokens ----


def test_texts_and_tokens(byte_level):
    bos, eos = byte_level.bos_token_id, byte_level.eos_token_id
    plain = byte_level.encode("the cat sat on", add_special_tokens=False)
    whole, completion = encode(Text("the cat sat on"), byte_level), encode(Text(" sat on", "the cat"), byte_level)
    assert whole == Example([bos, *plain, eos], [IGNORED, *plain, eos])
    assert encode(Text("<|begin|>the cat sat on<|eot_id|>"), byte_level) == whole  # none is doubled
    assert completion.ids == whole.ids and trained_text(byte_level, completion) == " sat on<|eot_id|>"
    assert encode(Text(" sat on", "the cat"), byte_level, every_token=True).labels == whole.labels
    assert encode(Text("", "the cat"), byte_level).labels[-1] == eos
    assert encode(Tokens([5, 6, 7], [5, IGNORED, 7]), byte_level) == Example([5, 6, 7], [IGNORED, IGNORED, 7], None)


def test_a_tokenizer_that_adds_eos(tmp_path):
    tokenizer = Tokenizer.from_folder(
        folders.sentencepiece_folder(tmp_path, folders.sentencepiece_model(), add_eos_token=True)
    )
    found = encode(Text(" sat", "the cat"), tokenizer)
    assert found.ids == tokenizer.encode("the cat sat") and found.ids.count(tokenizer.eos_token_id) == 1
    assert show(found, tokenizer).startswith("<s> the cat[ sat</s>]")  # with the spaces of sentencepiece


# ---- what is shown ----


def test_show(byte_level):
    chat = [{"role": "user", "content": "a\x1b[2J\rb"}, {"role": "assistant", "content": "🦊 mat"}]
    example = encode(Conversation(chat), byte_level)
    text = show(example, byte_level)
    head = "<|begin|><|start_header_id|>user<|end_header_id|>\n\na\\x1b[2J\\rb<|eot_id|>"
    head += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert text == f"{head}[🦊 mat<|eot_id|>]\n({example.trained} of {len(example.ids)} tokens are trained)"
    fox = byte_level.encode("🦊", add_special_tokens=False)
    assert len(fox) == 4  # bytes: a run may end inside a character
    assert show(Example(fox, [IGNORED, IGNORED, *fox[2:]]), byte_level).startswith("\ufffd[🦊]")


# ---- batches ----


def test_best_fit():
    """The longest first, into the fullest bin with space; what fits nowhere is alone. Beside TRL's: tests/tools."""
    assert best_fit([2, 3, 6, 7, float("inf")], 10) == [[4], [3, 1], [2, 0]]


def test_packed_batch():
    batch = packed_batch([Example([5, 6], [IGNORED, 6]), Example([7], [IGNORED])], pad_id=9, multiple=4)
    assert {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.items()} == {
        "input_ids": [[5, 6, 7, 9]],
        "labels": [[IGNORED, 6, IGNORED, IGNORED]],
        "cu_seqlens": [0, 2, 3, 4],
        "max_seqlen": 2,
    }
    assert batch["cu_seqlens"].dtype == torch.int32 and batch["input_ids"].dtype == torch.int64
    empty = packed_batch([], pad_id=9, multiple=3)
    assert empty["input_ids"].tolist() == [[9, 9, 9]] and empty["cu_seqlens"].tolist() == [0, 3]
