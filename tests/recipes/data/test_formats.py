"""Each format is detected from its keys and read; rows that do not fit are named by their field."""

import json

import pytest

from ligermodels.errors import InputError
from ligermodels.recipes.data.formats import FORMATS, Answers, Conversation, Text, Tokens, detect, read
from ligermodels.recipes.data.rows import open_rows


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "mat"}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}


def compared(prompt):
    return Answers((Conversation([*prompt, said("b")]), Conversation([*prompt, said("c")])))


EXAMPLES = [
    ("messages", {"messages": [user("a"), said("b")], "id": 7}, Conversation([user("a"), said("b")])),
    (
        "messages",  # OpenAI's spelling: arguments and tools as texts, weights, nulls
        {
            "messages": [
                user("a"),
                {"role": "assistant", "content": None, "weight": 0, "name": None,
                 "tool_calls": [{"id": "1", **CALL, "function": {"name": "find", "arguments": '{"what": "mat"}'}}]},
                {"role": "tool", "content": "here"},
                said("b", weight=1),
            ],
            "tools": json.dumps([TOOL]),
            "text": None,
        },
        Conversation(
            [user("a"), {"role": "assistant", "tool_calls": [{"id": "1", **CALL}], "train": False},
             {"role": "tool", "content": "here"}, said("b")],
            [TOOL],
        ),
    ),
    ("messages", {"messages": json.dumps([user("a"), said("b")])}, Conversation([user("a"), said("b")])),
    ("messages", {"messages": [{"from": "human", "value": "a"}, said("b")]}, Conversation([user("a"), said("b")])),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": False},
                           {"from": "function_call", "value": json.dumps(CALL["function"])},
                           {"from": "observation", "value": "c"}],
         "system": "s", "tools": ""},
        Conversation([system("s"), user("a"), said("b", train=False), {"role": "assistant", "tool_calls": [CALL]},
                      {"role": "tool", "content": "c"}]),
    ),
    ("sharegpt", {"conversation": [user("a"), said("b")]}, Conversation([user("a"), said("b")])),
    ("prompt-completion", {"prompt": "a", "completion": " b"}, Text(" b", "a")),
    (
        "prompt-completion",
        {"prompt": [user("a"), said("b"), user("c")], "completion": [said("d")]},
        Conversation([user("a"), said("b", train=False), user("c"), said("d")]),
    ),
    (
        "alpaca",
        {"instruction": "a", "input": "b", "output": "c", "system": "s", "history": [["d", "e"]]},
        Conversation([system("s"), user("d"), said("e"), user("a\n\nb"), said("c")]),
    ),
    ("alpaca", {"instruction": "a", "input": "", "output": "c"}, Conversation([user("a"), said("c")])),
    ("text", {"text": "a", "source": "web"}, Text("a")),
    ("tokens", {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, Tokens([5, 6, 7], [-100, 6, 7])),
    ("tokens", {"input_ids": "[5, 6]", "attention_mask": [1, 1]}, Tokens([5, 6], [5, 6])),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}, Answers((Text("b", "a"), Text("c", "a")))),
    ("pairs", {"prompt": [user("a"), said("x"), user("y")], "chosen": [said("b")], "rejected": [said("c")]},
     compared([user("a"), said("x", train=False), user("y")])),
    ("pairs", {"prompt": [user("a")], "chosen": "b", "rejected": "c"}, compared([user("a")])),
    (
        "pairs",  # the prompt in all three, and once more as a text
        {"prompt": "a", "chosen": [system("s"), user("a"), said("b")],
         "rejected": [system("s"), user("a"), said("c")], "messages": [user("a"), said("b")]},
        compared([system("s"), user("a")]),
    ),
    ("pairs", {"prompt": "a", "chosen": [said("b")], "rejected": [said("c")]}, compared([user("a")])),
    ("pairs", {"chosen": "Q: a\nA: It is", "rejected": "Q: a\nA: I am"},
     Answers((Text(" It is", "Q: a\nA:"), Text(" I am", "Q: a\nA:")))),
    ("pairs", {"chosen": "Q: a b", "rejected": "Q: a b c"}, Answers((Text(" b", "Q: a"), Text(" b c", "Q: a")))),
    ("pairs", {"chosen": "Q: a b c", "rejected": "Q: a bx"}, Answers((Text(" b c", "Q: a"), Text(" bx", "Q: a")))),
    ("unpaired", {"prompt": "a", "completion": "b", "label": True}, Answers((Text("b", "a"),), True)),
    ("unpaired", {"prompt": "a", "completion": "b", "label": "False"}, Answers((Text("b", "a"),), False)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "expected"), EXAMPLES, ids=lambda x: x if isinstance(x, str) else "")
def test_formats(write, name, row, expected):
    before = json.dumps(row)
    rows = open_rows(write("a.jsonl", [row]))
    assert detect(rows) == (name, rows.where(0))
    assert read(row) == expected
    assert json.dumps(row) == before  # the row is not changed
    assert {name for name, _, _ in EXAMPLES} == set(FORMATS)


def test_detection_passes_over_bad_rows(write):
    rows = open_rows(write("a.jsonl", '{"x": 1}\n{"text"\n{"text": "a"}\n'))
    assert detect(rows) == ("text", rows.where(2))
    for bad, message in (
        ({"x": 1}, r"jsonl:1: no format has the keys \['x'\]\. .*alpaca: instruction, output.*keys of the rows$"),
        ({"conversation": "x", "answer_text": "y"}, r"no format has the keys .* conversation to conversations$"),
        ({"prompts": "a", "message": [], "x": 1}, r"the keys of the rows, message to messages, prompts to prompt$"),
        ({"prompt": "a", "completion": None, "label": None, "x": 1},
         r"jsonl:1: no format has the keys \['prompt', 'x'\] \(completion, label is null\)"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            detect(open_rows(write("b.jsonl", [bad] * 101 + [{"text": "a"}])))


def chat(*messages, **more):
    return {"messages": list(messages), **more}


BAD = [
    (chat(), "messages: it is empty"),
    ({"messages": {"role": "user"}}, "messages: expected a list, not {'role': 'user'}"),
    ({"messages": "hello"}, "messages: not valid JSON in UTF-8: Expecting value: .*: 'hello'"),
    (chat("hello"), r"messages\[0\]: expected a dict with role and content, not 'hello'"),
    (chat(user("a"), {"content": "b"}), r"messages\[1\]\.role: expected a text"),
    (chat(user("a"), said("b") | {"role": "Assistant"}), r"messages\[1\]\.role: expected 'assistant', not 'Assi"),
    (chat(user("a") | {"role": "sytem"}, said("b")), r"messages\[0\]\.role: expected 'system', not 'sytem'"),
    (chat(user("a"), {"role": "assistant"}), r"messages\[1\]\.content is missing"),
    (chat(user("a"), said(None)), r"messages\[1\]\.content is null"),
    (chat(user(3)), r"messages\[0\]\.content: expected a text, not 3"),
    (chat(user([{"type": "video", "video": "a.mp4"}])), r"content\[0\]: expected a part of the type"),
    (chat(user([{"type": "text"}])), r"content\[0\]: expected"),
    (chat(user("a"), said("b"), videos=["a.mp4"]), "videos: recipes train on texts and images only"),
    (chat(user("a") | {"train": True}), r"messages\[0\]: train, weight: .*assistant's messages alone"),
    (chat(said("a", weight=0.5)), r"messages\[0\]: train, weight: expected true or false.*0.5"),
    (chat(said("a", tool_calls=[{"function": {"name": "f", "arguments": "{x"}}])), r"\.arguments: not valid JSON"),
    (chat(said("a", tool_calls=[{"name": "f", "arguments": [1]}])), r"\[0\]\.arguments: expected a JSON object"),
    (chat(said("a", tool_calls=["f"])), r"tool_calls\[0\]: expected"),
    (chat(user("a"), tools=["f"]), "tools: expected a list of JSON schemas"),
    (chat(user("a"), chat_template_kwargs={"x": 1}), "chat_template_kwargs"),
    ({"conversations": [{"from": "alien", "value": "a"}]}, r"conversations\[0\]\.from: 'alien' is none of human"),
    ({"conversations": [{"from": "human"}]}, r"conversations\[0\]\.content is missing"),
    ({"prompt": "a", "completion": [said("b")]}, "prompt, completion: one is a text, the other a list"),
    ({"prompt": "a", "completion": ""}, "completion: it is empty"),
    ({"instruction": "", "output": "b"}, "instruction: it is empty"),
    ({"instruction": "a", "output": "b", "history": ["x"]}, r"history\[0\]: expected \[instruction, answer\]"),
    ({"text": ["a"]}, r"text: expected a text, not \['a'\]"),
    ({"text": ""}, "text: it is empty"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "labels: expected the id itself or -100 .*not shifted"),
    ({"input_ids": [1, 2], "labels": [1]}, "labels: expected the id itself or -100 for each id"),
    ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask: it has zeros"),
    ({"input_ids": ["a"]}, r"input_ids: expected integers, not \['a'\]"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both are the same"),
    ({"chosen": "b", "rejected": "c"}, "prompt: it is missing"),
    ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected: it is missing, or empty without"),
    ({"chosen": "b", "rejected": [said("c")]}, "one is a text, the other a list"),
    ({"prompt": "x", "chosen": [user("a"), said("b")], "rejected": [user("a"), said("c")]}, "prompt: it is not what"),
    ({"prompt": "a", "completion": "b", "label": "good"}, "label: expected true or false, not 'good'"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_name_the_field(write, row, message):
    rows = open_rows(write("a.jsonl", [row]))
    detect(rows)
    with pytest.raises(InputError, match=message):
        read(rows[0])
