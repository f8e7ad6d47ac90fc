"""What is trained, against transformers' masks and against the text that the assistant says."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ligermodels.errors import InputError, TokenizerError
from ligermodels.recipes.formats import Answers, Conversation, Text, Tokens
from ligermodels.recipes.masking import IGNORED, Example, encode, show
from ligermodels.text import Tokenizer
from ligermodels.text.batch import mask_of
from tests import real_files
from tests.text import folders
from tests.text.families import FAMILIES, theirs
from tests.text.templates import CALL, CONVERSATIONS, QWEN_3, SAID, SYSTEM, USER

LINE_BREAK = "{% endgeneration %}{{ '\\n' }}"
MARKED = QWEN_3.replace(LINE_BREAK, "{{ '\\n' }}{% endgeneration %}")  # as TRL marks a turn
UNMARKED = re.sub(r"\{%-? *(end)?generation *-?%\}", "", QWEN_3)
ROUNDS = [SYSTEM, USER, SAID | {"reasoning": "hm"}, USER, SAID, USER, SAID | {"content": "Yes."}]


def trained_text(tokenizer, example):
    """What is trained, "|" between the stretches that are not next to each other."""
    kept = [index if label != IGNORED else None for index, label in zip(example.ids, example.labels, strict=True)]
    assert all(label in (index, IGNORED) for index, label in zip(example.ids, example.labels, strict=True))
    runs, run = [], []
    for index in [*kept, None]:
        if index is None:
            runs += [tokenizer.decode(run)] if run else []
            run = []
        else:
            run.append(index)
    return "|".join(runs)


# ---- conversations ----


@pytest.fixture(scope="module")
def qwen(folder_of):
    """A tokenizer whose stop tokens include <|im_end|>."""
    return Tokenizer.from_folder(folder_of("qwen 2.5")), AutoTokenizer.from_pretrained(folder_of("qwen 2.5"))


TALKS = {name: chat for name, chat in CONVERSATIONS.items() if any(m["role"] == "assistant" for m in chat)}
TALKS["rounds"] = ROUNDS


@pytest.mark.parametrize("name", TALKS)
def test_marks_and_prefixes_give_the_masks_of_transformers(qwen, name):
    ours, theirs = qwen
    chat = [{key: value for key, value in message.items() if value is not None} for message in TALKS[name]]
    expected = theirs.apply_chat_template(
        TALKS[name], chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    labels = [i if m else IGNORED for i, m in zip(expected["input_ids"], expected["assistant_masks"], strict=True)]
    assert set(labels) != {IGNORED}
    for template in (MARKED, UNMARKED):
        found = encode(Conversation(chat), ours, template=template)
        assert (found.ids, found.labels, found.ends) == (expected["input_ids"], labels, True), template is MARKED


# What of TALK is trained, by family: also the stop, and the line break that a template writes after it.
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It is the cat"},
]
ENDS = {
    "llama 2": "</s>",
    "llama 3.1": "<|eot_id|>",
    "mistral 0.3": "</s>",
    "nemo": "</s>",
    "gemma 1": "<end_of_turn>\n",
    "gemma 2": "<end_of_turn>\n",
    "qwen 2.5": "<|im_end|>\n",
    "phi 3": "<|end|>",
    "phi 4": "<|im_end|>",
}


PHI = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' }}{% endfor %}"
TEMPLATES = {
    "phi 3": PHI + "{{ '<|assistant|>' if add_generation_prompt else eos_token }}",
    "phi 4": PHI.replace("<|end|>", "<|im_end|>") + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
}
LATE_SYSTEM = (
    "{% set system = messages[0].content %}{% for m in messages[1:] %}"
    "{{ '[INST]' ~ (system if loop.last else '') ~ m.content ~ '[/INST]' if m.role == 'user' else m.content }}"
    "{% endfor %}"
)
"""Mistral's: the system prompt stands beside a last message of the user only."""


@pytest.mark.parametrize("name", FAMILIES)
def test_families(folder_of, name):
    tokenizer, end = Tokenizer.from_folder(folder_of(name)), ENDS[name]
    if name in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[name]
    template = {"chat_template": TEMPLATES[name]} if name in TEMPLATES else {}
    ids = theirs(name, folder_of(name)).apply_chat_template(TALK, **template)["input_ids"]
    last = "<|end|><|endoftext|>" if name == "phi 3" else end  # its template ends the text as well
    found = encode(Conversation(TALK), tokenizer)
    assert found.ids == ids and found.ends
    assert trained_text(tokenizer, found).replace(" ", "") == f"Yes.{end}|Itisthecat{last}"
    silent = [m | {"train": False} if n == 3 else m for n, m in enumerate(TALK)]
    found = encode(Conversation(silent), tokenizer)
    assert found.ids == ids
    assert trained_text(tokenizer, found).replace(" ", "") == f"Yes.{end}"
    found = encode(Conversation(TALK), tokenizer, every_message=True)
    assert (found.ids, found.labels, found.ends) == (ids, [IGNORED, *ids[1:]], True)


def test_messages_that_are_not_trained_under_a_marked_template(qwen):
    chat = [USER, SAID | {"content": "one"}, USER, SAID | {"content": "two", "train": False}, USER, SAID]
    results = [encode(Conversation(chat), qwen[0], template=text) for text in (MARKED, UNMARKED)]
    assert results[0] == results[1]
    text = trained_text(qwen[0], results[0])
    assert text.startswith("one<|im_end|>\n|<think>") and "two" not in text
    doubled = QWEN_3.replace("{{- content }}", "{{- content }}{% endgeneration %}!{% generation %}")
    with pytest.raises(InputError, match="marks 6 stretches as the assistant's, but it has 3 messages"):
        encode(Conversation(chat), qwen[0], template=doubled)


@pytest.mark.parametrize("name", ["tokenizer-qwen3", "tokenizer-llama3_1", "tokenizer-gemma3"])
def test_released_templates(name):
    folder = real_files.path(f"{name}/tokenizer.json").parent
    tokenizer = Tokenizer.from_folder(folder)
    end = {"tokenizer-qwen3": "<|im_end|>\n", "tokenizer-gemma3": "<end_of_turn>\n"}.get(name, "<|eot_id|>")
    found = encode(Conversation(TALK), tokenizer)
    thought = "<think>\n\n</think>\n\n" if "qwen3" in name else ""  # only the last turn has it
    assert trained_text(tokenizer, found) == f"Yes.{end}|{thought}It is the cat{end}"
    assert found.ends
    assert found.ids.count(tokenizer.bos_token_id) == int("qwen3" not in name)
    if "qwen3" in name:
        calls = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                 {"role": "tool", "content": "here"}, SAID | {"content": "There."}]  # fmt: skip
        schema = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
        text = trained_text(tokenizer, encode(Conversation(calls, [schema]), tokenizer))
        assert text == (
            '<tool_call>\n{"name": "find", "arguments": {"what": "the <mat>", "count": 3}}\n</tool_call><|im_end|>\n|'
            "<think>\n\n</think>\n\nThere.<|im_end|>\n"
        )


def test_templates_that_rewrite_earlier_turns(folder_of):
    tokenizer = Tokenizer.from_folder(folder_of("nemo"))
    chat = Conversation([{"role": "system", "content": "Be brief."}, *TALK])
    with pytest.raises(InputError, match=r"changes the conversation up to messages\[2\] .* a system prompt or tools"):
        encode(chat, tokenizer, template=LATE_SYSTEM)
    growing = "{% for m in messages %}{{ m.content ~ ('' if loop.last else messages | length) }}{% endfor %}"
    with pytest.raises(InputError, match=r"up to messages\[1\]"):
        encode(Conversation(TALK), tokenizer, template=growing)
    changing = "{% for m in messages %}{{ m.content | upper if loop.last else m.content }}{% endfor %}"
    with pytest.raises(InputError, match=r"up to messages\[1\]"):
        encode(Conversation([{"role": "user", "content": "HI"}, *TALK[1:]]), tokenizer, template=changing)


def test_the_beginning_of_a_turn_is_not_trained_nor_told(byte_level):
    with pytest.raises(InputError, match="the first message is the assistant's; start with a user message"):
        encode(Conversation([SAID, USER]), byte_level)
    with pytest.raises(InputError, match="every message is trained"):
        encode(Conversation([USER, SAID | {"train": False}]), byte_level, every_message=True)


def test_a_stop_token_outside_the_mask_is_told(qwen):
    outside = QWEN_3.replace("{{ '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}")
    found = encode(Conversation([USER, SAID]), qwen[0], template=outside)
    assert found.trained and found.ends is False
    plain = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    found = encode(Conversation([USER, SAID]), qwen[0], template=plain)
    assert found.trained and found.ends is False


# ---- texts and tokens ----


def test_text_and_completion(byte_level):
    bos, eos = byte_level.bos_token_id, byte_level.eos_token_id
    plain = byte_level.encode("the cat sat on", add_special_tokens=False)
    found = encode(Text("the cat sat on"), byte_level)
    assert found == Example([bos, *plain, eos], [IGNORED, *plain, eos])
    assert encode(Text("<|begin|>the cat sat on<|eot_id|>"), byte_level) == found  # none is doubled
    found = encode(Text(" sat on", "the cat"), byte_level)
    assert found.ids == [bos, *plain, eos]
    assert trained_text(byte_level, found) == " sat on<|eot_id|>"
    assert encode(Text("", "the cat"), byte_level).labels[-1] == eos


def test_texts_of_a_tokenizer_that_adds_eos(tmp_path):
    model = folders.sentencepiece_model()
    tokenizer = Tokenizer.from_folder(folders.sentencepiece_folder(tmp_path, model, add_eos_token=True))
    found = encode(Text(" sat", "the cat"), tokenizer)
    assert found.ids == tokenizer.encode("the cat sat") and found.ids.count(tokenizer.eos_token_id) == 1
    assert trained_text(tokenizer, found).strip() == "sat</s>"


def test_a_tokenizer_that_normalises(tmp_path):
    """The offsets of its tokens are those of the text before that."""
    model = folders.sentencepiece_model(normalization_rule_name="nmt_nfkc")
    tokenizer = Tokenizer.from_folder(folders.sentencepiece_folder(tmp_path, model))
    chat = [{"role": "user", "content": "\uff43\uff41\uff54"}, {"role": "assistant", "content": "the ﬁne mat"}]
    found = encode(Conversation(chat), tokenizer)
    assert found.ids == tokenizer.apply_chat_template(chat) and found.ends
    assert trained_text(tokenizer, found).strip() == "the fine mat </s>"


def test_tokens(byte_level):
    found = encode(Tokens([5, 6, 7], [5, IGNORED, 7]), byte_level)
    assert found == Example([5, 6, 7], [IGNORED, IGNORED, 7], None)
    with pytest.raises(InputError, match="99999 is not an id of the tokenizer"):
        encode(Tokens([5, 99999], [5, 99999]), byte_level)


def test_what_cannot_be_trained(byte_level, tmp_path):
    with pytest.raises(InputError, match=r"answers to compare.*dpo"):
        encode(Answers("a", ("b", "c")), byte_level)
    with pytest.raises(TokenizerError, match="lone surrogate"):
        encode(Text("\ud800"), byte_level)
    folder = folders.byte_level(tmp_path)
    (folder / "generation_config.json").unlink()
    settings = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(settings.replace('"eos_token": "<|eot_id|>", ', ""))
    with pytest.raises(InputError, match="has no eos token"):
        encode(Text("a"), Tokenizer.from_folder(folder))
    byte_level = Tokenizer.from_folder(folder)
    byte_level.chat_template = None
    with pytest.raises(TokenizerError, match="has no chat template"):
        encode(Conversation(TALK), byte_level)


# ---- the mask, and what is shown ----


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=20), st.lists(st.integers(0, 40), unique=True)
)
def test_tokens_with_a_character_of_a_span_are_trained(steps, edges):
    """A token without characters counts as the next one; tokens of one character share its offsets."""
    offsets, at = [], 0
    for back, size in steps:
        if (max(0, at - back), max(0, at - back) + size) >= (offsets[-1] if offsets else (0, 0)):
            offsets.append((max(0, at - back), max(0, at - back) + size))
            at = max(at, offsets[-1][1])
    spans = list(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
    characters = [set(range(start, max(end, start + 1))) for start, end in offsets]
    expected = [int(any(each & set(range(*span)) for span in spans)) for each in characters]
    assume(not offsets or offsets[-1] != (0, 0))
    assert mask_of([*offsets, (0, 0)], spans) == [*expected, 0]  # the last is a special token after the text


def test_show(byte_level):
    chat = [{"role": "user", "content": "a\x1b[2J\rb"}, {"role": "assistant", "content": "🦊 mat"}]
    example = encode(Conversation(chat), byte_level)
    text = show(example, byte_level)
    head = "<|begin|><|start_header_id|>user<|end_header_id|>\n\na\\x1b[2J\\rb<|eot_id|>"
    head += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert text == f"{head}[🦊 mat<|eot_id|>]\n({example.trained} of {len(example.ids)} tokens are trained)"
    assert show(example, byte_level, colour=True).startswith(f"\x1b[2m{head}\x1b[0m\x1b[32m🦊 mat<|eot_id|>\x1b[0m\n")
    fox = byte_level.encode("🦊", add_special_tokens=False)
    assert len(fox) == 4  # bytes: a run may end inside a character
    assert show(Example(fox, [IGNORED, IGNORED, *fox[2:]]), byte_level).startswith("\ufffd[🦊]")


def test_show_keeps_the_spaces_of_sentencepiece(tmp_path):
    tokenizer = Tokenizer.from_folder(folders.sentencepiece_folder(tmp_path))
    assert show(encode(Text(" sat on", "the cat"), tokenizer), tokenizer).startswith("<s> the cat[ sat on</s>]")
