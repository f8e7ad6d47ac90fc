"""`ligermodels eval`: the tasks of lm-eval, answered by a model of ours."""

import argparse
import contextlib
import importlib
import importlib.util
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.checkpoint import hub
from ligermodels.checkpoint.files import write_errors
from ligermodels.cli.arguments import UsageError
from ligermodels.cli.models import load_model, load_tokenizer, model_options, resolve_adapter
from ligermodels.cli.output import say
from ligermodels.errors import HubError, InputError, did_you_mean

if TYPE_CHECKING:
    from ligermodels.text import Tokenizer

_EPILOG = """\
example:
  ligermodels eval tuned/model --tasks hellaswag,arc_easy --limit 200 --output scores.json
Tasks are names of lm-eval, of groups, or with * of several; or files of your own, such as task.yaml. `lm-eval ls tasks`
lists the names. Data sets of tasks come from the Hub. Prints lm-eval's table to stdout.
Exit status: 0 done, 2 wrong options, 3 another error, 130 stopped by Ctrl-C.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "eval",
        parents=[model_options()],
        help="score a model on tasks of lm-eval",
        description="Scores MODEL on tasks of lm-eval (EleutherAI's LM Evaluation Harness).",
        epilog=_EPILOG,
    )
    option = parser.add_argument
    option("--tasks", metavar="A,B", required=True, help="names of tasks or groups, or YAML files of tasks")
    option("--include-path", metavar="DIR", help="a folder of further tasks, which --tasks may name")
    option("--num-fewshot", type=_number(int, 0), metavar="N", help="examples before each question (the task's own)")
    option("--limit", type=_number(float, 0), metavar="X", help="questions of each task, or a fraction below 1 (all)")
    option("--batch-size", type=_batch_size, default=8, metavar="N", help="rows of a forward, or auto (8)")
    option("--apply-chat-template", action="store_true", help="ask in the model's chat template")
    option("--system-instruction", metavar="TEXT", help="a system message, with --apply-chat-template")
    option("--output", metavar="FILE", help="also write the results to a JSON file")
    option("--log-samples", action="store_true", help="with every question and answer in that file")
    parser.set_defaults(run=_evaluate)


def _number(kind: type, least: float) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not value >= least or (kind is float and (not 0 < value < 2**53 or (value > 1 and value != int(value)))):
            what = "a number of 0 or more" if kind is int else "a positive number, whole or below 1"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


def _batch_size(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer, or auto")
    return int(text)


def _evaluate(args: argparse.Namespace) -> int:
    if args.system_instruction is not None and not args.apply_chat_template:
        raise UsageError("--system-instruction: it is a message of a chat; add --apply-chat-template")
    if args.kv_cache_dtype != "auto":
        raise UsageError("--kv-cache-dtype: lm-eval calls the model itself, and gives it no such option; leave it out")
    if args.log_samples and args.output is None:
        raise UsageError("--log-samples writes into --output FILE: give one")
    output = None if args.output is None else Path(args.output).expanduser()
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise UsageError(f"--output {output}: it is a folder, or its folder is not there; give the path of a file")
    for package in ("lm_eval", "transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"eval needs the package {package}, which is not installed. Next step: pip install 'ligermodels[eval]'"
            )
    tasks, manager = _tasks(args)
    resolve_adapter(args)
    tokenizer = load_tokenizer(args)
    model = load_model(args)
    lm_eval: Any = importlib.import_module("lm_eval")
    harness: Any = importlib.import_module("lm_eval.models.huggingface")
    utils: Any = importlib.import_module("lm_eval.utils")
    logging.getLogger(harness.__name__).setLevel(logging.ERROR)  # it warns of any model that is loaded already
    with _folder_of(tokenizer, args) as folder:
        lm = harness.HFLM(pretrained=model, tokenizer=str(folder), batch_size=args.batch_size)
        results = lm_eval.simple_evaluate(
            lm, tasks=tasks, task_manager=manager, num_fewshot=args.num_fewshot, batch_size=args.batch_size,
            limit=args.limit, log_samples=args.log_samples, apply_chat_template=args.apply_chat_template,
            system_instruction=args.system_instruction,
        )  # fmt: skip
    results["config"]["model"] = args.model
    if output is not None:
        text = json.dumps(results, indent=2, default=utils.handle_non_serializable, ensure_ascii=False)
        with write_errors(output):
            output.write_text(f"{text}\n", "utf-8")
        say(f"results are in {output}")
    print(utils.make_table(results))
    if results.get("groups"):
        print(utils.make_table(results, "groups"))
    return 0


def _tasks(args: argparse.Namespace) -> tuple[list[Any], Any]:
    """The tasks as `simple_evaluate` takes them, and their manager. Raises UsageError for a name that there is not."""
    config: Any = importlib.import_module("lm_eval.config.evaluate_config")
    if args.include_path is not None and not Path(args.include_path).is_dir():
        raise UsageError(f"--include-path {args.include_path}: there is no such folder")
    names = [name for name in args.tasks.split(",") if name]
    if missing := [name for name in names if name.endswith(".yaml") and not Path(name).is_file()]:
        raise UsageError(f"--tasks: there is no file {missing[0]}")
    chosen = config.EvaluatorConfig(tasks=names, include_path=args.include_path)
    try:
        manager = chosen.process_tasks()
    except ValueError as error:
        known = importlib.import_module("lm_eval.tasks").TaskManager(include_path=args.include_path)
        unknown = [name for name in names if not name.endswith(".yaml") and not known.match_tasks([name])]
        if not unknown:
            raise UsageError(f"--tasks {args.tasks}: {error}") from error
        near = did_you_mean(unknown[0], known.all_tasks)
        raise UsageError(f"--tasks: lm-eval has no task {unknown[0]!r}{near}; `lm-eval ls tasks` lists all") from None
    load = manager.load

    def load_or_say(*arguments: Any, **options: Any) -> Any:
        try:
            return load(*arguments, **options)
        except (OSError, ValueError) as error:  # of the Hub, of datasets
            raise HubError(
                f"the data of --tasks {args.tasks} cannot be read: {type(error).__name__}: {error}\n  Likely: no "
                "network (data sets of tasks come from the Hub; HF_HUB_OFFLINE=1 reads the cache alone, and at once), "
                "or a file that the task names is not there."
            ) from error

    manager.load = load_or_say
    return chosen.tasks, manager


@contextlib.contextmanager
def _folder_of(tokenizer: "Tokenizer", args: argparse.Namespace) -> Iterator[Path]:
    """A folder from which transformers reads the tokenizer, also that of a GGUF file or of an adapter."""
    source = hub.resolve(args.model, revision=args.revision, local_files_only=args.local_files_only, weights=False)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        if (source / "config.json").is_file():
            shutil.copyfile(source / "config.json", Path(folder) / "config.json")
        yield Path(folder)
