"""The model card of a result: README.md, which the Hub shows."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ligermodels.checkpoint.files import read_json, write_errors
from ligermodels.recipes import RECIPES
from ligermodels.recipes.options import IN_MEMORY, TrainOptions

PICTURE = "loss.png"
_METRICS = {
    "loss": "loss", "eval_loss": "evaluation loss", "perplexity": "perplexity of the evaluation", "reward": "reward",
    "eval_reward": "reward of the evaluation", "reward_margin": "reward margin", "reward_accuracy": "reward accuracy",
    "kl": "KL", "entropy": "entropy", "eval_divergence": "divergence of the evaluation",
    "completion_length": "tokens of a completion", "grad_norm": "gradient norm",
}  # fmt: skip
"""Metrics that a card has, by what it calls them. Those of evaluations that are not here keep their names."""
_TAG = "ligermodels"


def write_card(
    options: TrainOptions, facts: Mapping[str, str], saved: Path, source: Path | None = None,
    lines: Sequence[Mapping[str, float]] = (), has_picture: bool = False,
) -> None:  # fmt: skip
    """Writes the card into the folder of the result.

    facts: lines of the plan and the run, by name. source: the folder of the base. lines: of metrics.jsonl. has_picture:
    PICTURE is in the folder.
    """
    base, name = base_of(options, source), options.model.removeprefix(IN_MEMORY)
    sets = [re.split(r"[:*]", source)[0] for source in options.data]
    head = {
        "base_model": base,
        "base_model_relation": "" if not base else "adapter" if saved.name == "adapter" else "finetune",
        "datasets": [each for each in sets if is_repository(each)],
        "library_name": "peft" if saved.name == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": [options.recipe, _TAG],
    }
    header = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items() if value)
    link = f"[{base}](https://huggingface.co/{base})" if base else name
    of = link if base in ("", name) else f"{link}, from {name}" if is_cached(name) else f"{name}, made of {link}"
    picture = f"![curves of the run]({PICTURE})\n\n" * has_picture
    table = "".join(f"| {key} | {text} |\n" for key, text in facts.items())
    kind = RECIPES[options.recipe][-1].partition(":")[0].rstrip(".") if options.recipe in RECIPES else options.recipe
    title = options.run_name or saved.resolve().parent.name
    text = (
        f"---\n{header}---\n\n# {title}\n\n{kind} of {of}, by "
        f"`ligermodels train {options.recipe}`.\n\n{picture}{_results(lines)}## Use\n\n{_use(options, saved, base)}\n"
        f"## The run\n\n| | |\n|---|---|\n{table}\n## Options\n\n```yaml\n{options.dump()}```\n"
    )
    with write_errors(saved / "README.md"):
        (saved / "README.md").write_text(text, "utf-8")


def base_of(options: TrainOptions, source: Path | None) -> str:
    """The repository of the base: MODEL, or where its folder came from, as far as its files say; else "".

    A folder of huggingface_hub's cache has its name. The config.json of transformers 4 names where it was loaded from,
    and the card of a result of ours its base.
    """
    name = options.model.removeprefix(IN_MEMORY)
    if is_repository(name):
        return name
    folder = Path(name) if source is None else source
    if (cached := _cached_name(str(folder.resolve()))) is not None:
        return cached
    if (folder / "config.json").is_file():
        written = read_json(folder / "config.json", lenient=True).get("_name_or_path")
        if isinstance(written, str) and is_repository(written):
            return written
    if (folder / "README.md").is_file():
        head = (folder / "README.md").read_text("utf-8", "replace").split("---\n")[1:2]
        values = dict(re.findall(r"^(\w+): (.*)$", head[0], re.MULTILINE)) if head else {}
        base = values.get("base_model", "").strip('"')
        if f'"{_TAG}"' in values.get("tags", "") and is_repository(base):
            return base
    return ""


def is_repository(name: str) -> bool:
    """Whether a model or data set that a run read has its name on the Hub; else it is a file or folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def is_cached(name: str) -> bool:
    """Whether a path is in huggingface_hub's cache."""
    return _cached_name(name) is not None


def _cached_name(path: str) -> str | None:
    match = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/", f"{path}/")
    return f"{match[1]}/{match[2]}" if match else None


def _results(lines: Sequence[Mapping[str, float]]) -> str:
    """The metrics at the beginning and the end, as a table."""
    names = dict.fromkeys(name for line in lines for name in line)
    shown = [name for name in _METRICS if name in names]
    shown += [name for name in names if name.startswith("eval_") and name not in _METRICS]
    rows = ""
    for name in shown:
        points = [(line["step"], line[name]) for line in lines if name in line]
        (first, before), (last, after) = points[0], points[-1]
        label = _METRICS.get(name, name.replace("_", " "))
        rows += f"| {label} | {before:,.4g} (step {first:g}) | {after:,.4g} (step {last:g}) |\n"
    return f"| | first | last |\n|---|---:|---:|\n{rows}\n" if rows else ""


def _use(options: TrainOptions, saved: Path, base: str) -> str:
    """How the result is opened, as commands and calls."""
    base = base or options.model.removeprefix(IN_MEMORY)
    folder = shlex.quote(str(saved))
    if saved.name == "medusa":
        load = f"heads = ligermodels.training.load_medusa(model, {str(saved)!r})"
        return (
            f"```bash\nligermodels chat {shlex.quote(base)} --medusa {folder}\n```\n\n"
            f"```python\nimport ligermodels\n\nmodel = ligermodels.load({base!r})\n{load}\n```\n"
        )
    command = f"```bash\nligermodels chat {folder}\n```\n\n"
    if saved.name == "adapter":
        return (
            f"{command}```python\nimport ligermodels\n\nmodel = ligermodels.load({base!r})\n"
            f"ligermodels.training.load_adapter(model, {str(saved)!r})\n```\n\nPEFT opens it too.\n"
        )
    return (
        f"{command}```python\nimport ligermodels\n\nmodel = ligermodels.load({str(saved)!r})\n"
        f"tokenizer = ligermodels.Tokenizer.from_hub({str(saved)!r})\n```\n\ntransformers opens it too.\n"
    )
