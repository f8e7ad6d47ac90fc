"""`ligermodels eval`: the scores of transformers' own model on tasks of a file, and what is refused. No network."""

import importlib
import importlib.util
import json

import pytest
import torch

import ligermodels
from ligermodels.training import add_lora, merge_lora, save_adapter
from tests.cli.commands import run

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
from lm_eval.models.huggingface import HFLM  # noqa: E402

from tests.tools.models import letters, theirs, write_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TEXT = """output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["x"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
"""


@pytest.fixture(scope="module", autouse=True)
def one_index_of_tasks():
    """lm-eval reads some thousand files of tasks for each of its managers, which takes 5 s; here once."""
    index = importlib.import_module("lm_eval.tasks._index").TaskIndex
    built, build = {}, index.build

    def build_once(paths, **options):
        found = {}
        for root in paths:
            if "lm_eval" not in root.parts:
                found |= build([root], **options)
            elif root not in built:
                built[root] = build([root], **options)
            found |= built.get(root, {})
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "build", staticmethod(build_once))
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, and tasks of which it answers some."""
    folder = tmp_path_factory.mktemp("eval")
    write_checkpoint(folder / "model", "llama")
    model, tokenizer = ligermodels.load(folder / "model"), ligermodels.Tokenizer.from_hub(folder / "model")
    rows = []
    for n in range(12):
        question = letters(n, 3 + n)
        ids = torch.tensor([tokenizer.encode(question)])
        answer = tokenizer.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :])
        choices = [letters(n + 20, 2), letters(n + 40, 3)]
        rows.append(dict(question=question, choices=choices, gold=n % 2, answer=answer if n % 3 else "no"))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in {"choice": CHOICE, "text": TEXT, "rolling": ROLLING}.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / "rows.jsonl") + text)
    return folder


def scores(results):
    """{task: {metric: value}}, without names of tasks and errors, which are drawn."""
    return {
        task: {name: x for name, x in values.items() if isinstance(x, float | int) and "stderr" not in name}
        for task, values in results["results"].items()
    }


def expected_scores(home, model, tasks, **options):
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=model, tokenizer=str(home / "model"), batch_size=3)
    manager = TaskManager(include_path=str(home))
    return scores(lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options))


@pytest.mark.parametrize("how", ["plain", "limit", "chat", "fewshot"])
def test_scores_are_those_of_transformers(home, tmp_path, capsys, how):
    names = ["choice", "text"] if how in ("chat", "fewshot") else ["choice", "text", "rolling"]
    flags, options = {
        "plain": ((), {}),
        "limit": (("--limit", "5"), {"limit": 5}),
        "chat": (("--apply-chat-template", "--system-instruction", "a b"),
                 {"apply_chat_template": True, "system_instruction": "a b"}),
        "fewshot": (("--num-fewshot", "2", "--limit", "0.5"), {"num_fewshot": 2, "limit": 0.5}),
    }[how]  # fmt: skip
    tasks = ",".join(names if how == "fewshot" else [str(home / f"{name}.yaml") for name in names])
    flags += ("--include-path", home) if how == "fewshot" else ()
    output = tmp_path / "scores.json"
    argv = ("eval", home / "model", "--tasks", tasks, "--batch-size", "3", "--output", output, "--dtype", "fp32")
    status, out, said = run(capsys, *argv, *flags, "--device", "cpu")
    assert status == 0, said
    written = json.loads(output.read_text())
    expected = expected_scores(home, theirs(home / "model", dtype=torch.float32), names, **options)
    found = scores(written)
    assert found.keys() == expected.keys() == set(names)
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert f"|{names[0]}" in out.replace(" ", "") and written["config"]["model"] == str(home / "model")
    if how == "plain":
        assert 0.4 < found["text"]["exact_match,none"] < 0.7 and "samples" not in written  # an answer may have an x


def test_an_adapter(home, tmp_path, capsys):
    model = add_lora(ligermodels.load(home / "model", dtype=torch.float32, device="cpu"), 4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    save_adapter(model, tmp_path / "adapter")
    merged = merge_lora(model).eval()
    tasks, output = home / "choice.yaml", tmp_path / "scores.json"
    argv = ("--tasks", tasks, "--output", output, "--dtype", "fp32", "--device", "cpu", "--log-samples")
    status, _, said = run(capsys, "eval", tmp_path / "adapter", *argv)
    assert status == 0, said
    written = json.loads(output.read_text())
    assert scores(written) == expected_scores(home, merged, ["choice"])
    assert len(written["samples"]["choice"]) == 12


REFUSED = {
    "no task": (("--tasks", "hellaswg"), 2, "lm-eval has no task 'hellaswg'; did you mean 'hellaswag'?"),
    "no file": (("--tasks", "nowhere.yaml"), 2, "--tasks: there is no file nowhere.yaml"),
    "offline": (("--tasks", "hellaswag"), 3, "the data of --tasks hellaswag cannot be read: "),
    "system": (("--tasks", "x", "--system-instruction", "a"), 2, "add --apply-chat-template"),
    "cache": (("--tasks", "x", "--kv-cache-dtype", "fp8"), 2, "--kv-cache-dtype: lm-eval calls the model itself"),
    "samples": (("--tasks", "x", "--log-samples"), 2, "--log-samples writes into --output FILE: give one"),
    "output": (("--tasks", "x", "--output", "/nowhere/at/all.json"), 2, "its folder is not there"),
    "folder": (("--tasks", "x", "--include-path", "/nowhere"), 2, "--include-path /nowhere: there is no such folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(home, capsys, name):
    flags, expected, says = REFUSED[name]
    status, out, said = run(capsys, "eval", home / "model", *flags)
    assert (status, out) == (expected, "") and says in said


@pytest.mark.parametrize("value", ["--limit=0", "--limit=1.5", "--batch-size=0", "--num-fewshot=-1", "--limit=nan"])
def test_numbers_are_checked(home, capsys, value):
    with pytest.raises(SystemExit):
        run(capsys, "eval", home / "model", "--tasks", "x", value)
    assert value.split("=")[0] in capsys.readouterr().err


def test_without_lm_eval_the_command_says_how_to_install_it(home, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "lm_eval" else find(name, *rest)
    )
    status, _, said = run(capsys, "eval", home / "model", "--tasks", "hellaswag")
    assert status == 3 and "eval needs the package lm_eval, which is not installed" in said
    assert "pip install 'ligermodels[eval]'" in said
