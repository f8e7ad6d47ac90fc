"""`ligermodels inspect`, `convert` and `verify`."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ligermodels.checkpoint.files import readable_size
from ligermodels.cli.arguments import usage_errors
from ligermodels.cli.models import check_source
from ligermodels.cli.output import say

if TYPE_CHECKING:
    from ligermodels.conversion import Inspection, Report

_EPILOG = """\
layouts, detected from the files in a folder:
  Hugging Face  model.safetensors, or model-*.safetensors and their index
  pickled       pytorch_model*.bin, with --allow-pickle
  Meta          consolidated.NN.pth and params.json, with --allow-pickle
  Mistral       consolidated*.safetensors and params.json
  GGUF          one .gguf file, or a folder with one, and with mmproj*.gguf for images; dequantised
  distributed   .metadata and *.distcp; with --config where there is no config.json
  LoRA adapter  adapter_config.json; for inspect, for convert BASE DST --adapter DIR, and for convert DIR out.gguf

exit status:
  0    done
  1    the weights do not match their model, or each other after a cast
  2    wrong options
  3    another error, such as a source that cannot be used, or a Hub that cannot be reached
  130  interrupted"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the three commands to the parser."""
    shared = argparse.ArgumentParser(add_help=False)
    option = shared.add_argument
    option("--allow-pickle", action="store_true", help="also read pickled weights, as plain tensors only")
    option("--json", action="store_true", help="print the report as JSON")
    option(
        "--config",
        metavar="DIR",
        help="folder of config.json and tokenizer, for a distributed checkpoint without, or of an adapter's base",
    )

    def command(name: str, run: Callable[[argparse.Namespace], int], **texts: Any) -> argparse.ArgumentParser:
        parser = commands.add_parser(
            name,
            parents=[shared],
            epilog=_EPILOG,
            **texts,
        )
        parser.set_defaults(run=usage_errors()(run))
        return parser

    source = "folder, GGUF file, or repository on the Hub"
    revision: dict[str, Any] = dict(metavar="NAME", help="branch, tag or commit of SRC")
    parser = command(
        "inspect",
        _inspect,
        help="show what a checkpoint contains and how to load it; reads no weights",
        description="Prints parameters by part, dtypes, files, the configuration, and the call or command that\n"
        "reads SRC. Reads headers, no weights.",
    )
    option = parser.add_argument
    option("src", metavar="SRC", help=source)
    option("--revision", **revision)
    option("--local-files-only", action="store_true", help="use the cache, never the network")

    parser = command(
        "convert",
        _convert,
        help="write a checkpoint in another layout, dtype or sharding",
        description="Converts the checkpoint SRC. DST appears when it is complete. Needs memory for one tensor of the\n"
        "result and its sources.",
    )
    option = parser.add_argument
    option("src", metavar="SRC", help=source)
    option(
        "dst", metavar="DST", nargs="?", help="folder to write, or GGUF file for llama.cpp if the name ends in .gguf"
    )
    option("--name", metavar="TEXT", help="name of the model in a GGUF file (that of the repository or folder SRC)")
    option(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="cast to bf16, float32, ..., or quantise a GGUF file: q8_0, q5_1, q5_0, q4_1, q4_0 (no cast)",
    )
    option("--modelfile", action="store_true", help="also write a Modelfile for Ollama beside a GGUF file")
    option("--mmproj", action="store_true", help="also write the vision tower beside a GGUF file, as mmproj-DST")
    option("--max-shard-size", metavar="SIZE", help="of a file, such as 5GB or 500MiB (5GB)")
    option("--adapter", metavar="DIR", help="LoRA adapter to merge into SRC, in PEFT's format")
    option("--revision", **revision)
    option(
        "--verify",
        choices=["none", "keys", "bytes"],
        default="none",
        help="compare the result with SRC before it replaces DST. keys: names, shapes, dtypes; bytes: also every bit "
        "(none)",
    )
    option("--dry-run", action="store_true", help="check SRC and plan from headers; write nothing; DST may be left out")
    option("--overwrite", action="store_true", help="replace what is in DST")

    parser = command(
        "verify",
        _verify,
        help="compare two checkpoints of any layouts: are they the same model?",
        description="Compares configs, names, shapes, dtypes and bytes of A and B. Tensors that differ only in dtype,\n"
        "as after convert --dtype, are no mismatch if they are equal after the cast (with --level keys, which reads\n"
        "no values, they are one).",
    )
    option = parser.add_argument
    option("a", metavar="A", help=source)
    option("b", metavar="B", help=source)
    option(
        "--level",
        choices=["keys", "bytes"],
        default="bytes",
        help="keys: headers only; bytes: also every bit (bytes)",
    )


def _convert(args: argparse.Namespace) -> int:
    from ligermodels.conversion.options import Options, check_options

    names = [field.name for field in dataclasses.fields(Options) if field.name in args]
    options = Options(**{name: getattr(args, name) for name in names})
    check_options(args.src, args.dst, options)
    check_source(args.src)
    from ligermodels.conversion import convert  # and torch

    report = convert(args.src, args.dst, options)
    _report(report, args, "would be written" if args.dry_run else "written")
    return 0


def _verify(args: argparse.Namespace) -> int:
    for src in (args.a, args.b):
        check_source(src)
    from ligermodels.conversion import verify

    report = verify(args.a, args.b, level=args.level, allow_pickle=args.allow_pickle, config=args.config)
    _report(report, args, "compared")
    return 0 if report.ok else 1


def _report(report: "Report", args: argparse.Namespace, done: str) -> None:
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
        return
    details = "".join(f"{name.replace('_', ' ')}: {_text(value)}\n" for name, value in report.details.items())
    between = " and " if done == "compared" else " -> "
    names = report.source if report.destination is None else f"{report.source}{between}{report.destination}"
    print(f"{names}: {report.tensors} tensors, {readable_size(report.bytes)} {done}\n{details}", end="")
    shown = 10
    for line in report.mismatches[:shown]:
        print(f"MISMATCH {line}")
    if len(report.mismatches) > shown:
        print(f"... and {len(report.mismatches) - shown} more; --json lists them all")
    for (in_a, in_b), count in report.casts.items():
        print(f"{count} tensors differ in dtype alone ({in_a} in A, {in_b} in B); equal after the cast")
    if done == "compared":
        same = "the same after a cast" if report.casts else "the same"
        count = len(report.mismatches)
        print(same if report.ok else f"{count} mismatch{'es' * (count > 1)}")


def _text(value: Any) -> str:
    """A detail of a report; of {dtype: count}, also the counts."""
    return ", ".join(f"{name} ({count:,})" for name, count in value.items()) if isinstance(value, dict) else str(value)


def _inspect(args: argparse.Namespace) -> int:
    check_source(args.src)
    from ligermodels.conversion import inspect

    names = ("revision", "local_files_only", "allow_pickle", "config")
    inspection = inspect(args.src, **{name: getattr(args, name) for name in names})
    if args.json:
        print(json.dumps(inspection.to_json(), indent=2))
    else:
        for name, value in {**_checkpoint_rows(inspection), **_model_rows(inspection)}.items():
            print(f"{name:15} {value}")
    if inspection.problem is not None:
        say(f"error: {inspection.problem}")
    return 0 if inspection.ok else 1


def _checkpoint_rows(inspection: "Inspection") -> dict[str, str]:
    return {
        "checkpoint": inspection.folder,
        "layout": inspection.layout,
        "to use it": inspection.use,
        **({"in Python": inspection.load} if inspection.load else {}),
        **({"to merge it": inspection.merge} if inspection.merge and inspection.merge != inspection.use else {}),
        **(_weight_rows(inspection) if inspection.tensors else {"weights": "pickles, not read without --allow-pickle"}),
        "files": _files(inspection.files),
        "tokenizer": _tokenizer(inspection.tokenizer),
    }


def _weight_rows(inspection: "Inspection") -> dict[str, str]:
    parts = {
        f"  {part}": f"{count:,} ({count / inspection.parameters:.1%})" for part, count in inspection.parts.items()
    }
    return {
        "parameters": f"{inspection.parameters:,}",
        **parts,
        "stored as": _text(inspection.dtypes),
        "weights": f"{inspection.tensors} tensors"
        + f", {'' if inspection.ok else 'NOT '}as expected" * bool(inspection.model),
    }


_ADAPTER = {"base": "base model", "r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
"""{field of an adapter: its label}."""


def _model_rows(inspection: "Inspection") -> dict[str, str]:
    """The configuration: config.json, params.json or adapter_config.json."""
    model = inspection.model
    if not model:
        return {
            _ADAPTER.get(name, name): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in (inspection.adapter or inspection.params).items()
        }
    rope = {key: f"[{len(value)}]" if isinstance(value, list) else value for key, value in model["rope"].items()}
    return {
        "architecture": f"{model['model_type']}, ligermodels.{model['architecture']}",
        "lm_head": "tied to the embedding" if model["tied"] else "its own weight",
        "loaded as": f"{model['dtype']} with dtype='auto'",
        "context": f"{model['context']:,} tokens",
        "rope": ", ".join(f"{key} {value}" for key, value in rope.items()),
        "layers": f"{model['layers']} of width {model['hidden_size']}, {', '.join(model['mlps'])}",
        "heads": f"{model['heads']} query and {model['kv_heads']} key-value heads of {model['head_dim']}",
        "vocabulary": f"{model['vocab_size']:,} ids",
    }


def _files(files: dict[str, int]) -> str:
    total = readable_size(sum(files.values()))
    if len(files) == 1:
        return f"{next(iter(files))}, {total}"
    smallest, largest = (readable_size(f(files.values())) for f in (min, max))
    return f"{len(files)} shards of {smallest} to {largest}, {total} in all"


def _tokenizer(tokenizer: Mapping[str, Any] | None) -> str:
    if tokenizer is None:
        return "none here"
    if "problem" in tokenizer:
        return f"cannot be read: {tokenizer['problem']}"
    stops = ", ".join(map(str, tokenizer["stop_ids"])) or "none"
    templates = ", ".join(tokenizer["chat_templates"]) or "none"
    return f"{tokenizer['file']}, {tokenizer['vocab_size']:,} ids; stop ids {stops}; chat templates: {templates}"
