"""`ligermodels inspect`, `convert` and `verify`."""

import argparse
import dataclasses
import errno
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ligermodels.cli.arguments import check_source, dtype
from ligermodels.cli.output import readable_size, say
from ligermodels.errors import HubError, InputError, LigermodelsError, MismatchError

if TYPE_CHECKING:
    from ligermodels.conversion import Inspection, Report

_EPILOG = """\
layouts, detected from the files in the folder:
  Hugging Face  model.safetensors, or model-*.safetensors and their index
  pickled       pytorch_model*.bin, with --allow-pickle
  Meta          consolidated.NN.pth and params.json, with --allow-pickle
  Mistral       consolidated*.safetensors and params.json
  GGUF          one file.gguf, or a folder that holds one; dequantised
  distributed   .metadata and *.distcp; with --config where there is no config.json, as for a trainer's weights alone
  LoRA adapter  adapter_config.json: for inspect, for convert BASE DST --adapter DIR, and for chat and generate

a DST whose name ends in .gguf is a GGUF file, another one a folder

exit status:
  0    done
  1    the weights do not match: their model, or each other by more than a cast
  2    wrong usage
  3    a source that cannot be used
  4    no space left
  5    the Hub, the network or the file system refused
  130  interrupted"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the three commands to the parser."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--allow-pickle", action="store_true", help="read pickled weights too, as plain tensors only")
    shared.add_argument("--json", action="store_true", help="print the report as JSON")
    shared.add_argument(
        "--config",
        metavar="DIR",
        help="folder of config.json and tokenizer, for a distributed checkpoint or a trainer's weights without them",
    )
    shared.add_argument(
        "--rope-factor",
        metavar="X",
        type=float,
        help="of Meta's use_scaled_rope, for a model of a size that Meta has not published; as 8 in Llama 3.1",
    )

    parser_options: dict[str, Any] = dict(
        parents=[shared],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    inspect = commands.add_parser(
        "inspect",
        help="what a checkpoint holds and how to load it, from its headers alone",
        description="Prints parameters by part, dtypes, files, the configuration, and the call or command that\n"
        "reads SRC. No weights are read.",
        **parser_options,
    )
    inspect.add_argument(
        "src", metavar="SRC", help="folder, GGUF file, or repository on the Hub, whose weights are not fetched"
    )
    inspect.add_argument("--revision", help="branch, tag or commit of SRC")
    inspect.add_argument("--local-files-only", action="store_true", help="use what is cached, never the network")
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser(
        "convert",
        help="write a checkpoint in another layout, dtype or sharding",
        description="Converts the checkpoint SRC. DST appears when it is complete. Memory holds one tensor of the\n"
        "result and its sources.",
        **parser_options,
    )
    convert.add_argument(
        "src", metavar="SRC", help="folder, GGUF file, or repository on the Hub; its layout is detected"
    )
    convert.add_argument(
        "dst",
        metavar="DST",
        nargs="?",
        help="folder to write, or a GGUF file if its name ends in .gguf; may be left out with --dry-run",
    )
    convert.add_argument(
        "--to",
        choices=["hf", "dcp", "gguf"],
        help="layout to write: Hugging Face's, a torch distributed checkpoint, or one GGUF file for llama.cpp "
        "(default: gguf where DST ends in .gguf, else hf)",
    )
    convert.add_argument(
        "--name", help="of the model, for people, in a GGUF file (default: of the repository or folder SRC)"
    )
    convert.add_argument(
        "--dtype", type=dtype, default="auto", help="cast to this, such as bf16 or float32 (default: auto, no cast)"
    )
    division = convert.add_mutually_exclusive_group()
    division.add_argument("--max-shard-size", metavar="SIZE", help="per file, as 5GB or 500MiB (default 5GB)")
    division.add_argument("--like", action="store_true", help="shard as SRC is sharded")
    convert.add_argument("--adapter", metavar="DIR", help="LoRA adapter, as PEFT saves it, to merge into SRC")
    convert.add_argument("--revision", help="branch, tag or commit of SRC")
    convert.add_argument(
        "--verify",
        choices=["none", "keys", "bytes", "logits"],
        default="none",
        help="compare the result with SRC before it takes its place: names, shapes and dtypes; every bit too; their "
        "logits in fp32 too, with the whole model in memory, not for gguf (default: none)",
    )
    convert.add_argument("--dry-run", action="store_true", help="check SRC and plan from headers; write nothing")
    convert.add_argument("--overwrite", action="store_true", help="save over what is in DST")
    convert.set_defaults(run=_convert)

    verify = commands.add_parser(
        "verify",
        help="whether two checkpoints, of any layouts, are the same model",
        description="Compares configs, names, shapes, dtypes and bits of A and B, and their logits and likeliest\n"
        "tokens on fixed prompts, in fp32 on the CPU. Rounding explains a difference of up to 5e-5 of their size;\n"
        "0 is usual, and rows of q or k in a wrong order give 2e-4 and more. Tensors that differ in dtype alone, as\n"
        "after convert --dtype, are equal after a cast, which is no mismatch (with --level keys, which reads no\n"
        "values, it is one).",
        **parser_options,
    )
    verify.add_argument("a", metavar="A", help="folder, GGUF file, or repository on the Hub")
    verify.add_argument("b", metavar="B", help="folder, GGUF file, or repository on the Hub")
    verify.add_argument(
        "--level",
        choices=["keys", "bytes", "logits"],
        default="logits",
        help="how far: headers only, every bit too, logits too with a whole model in memory (default: logits)",
    )
    verify.set_defaults(run=_verify)
    for parser in (inspect, convert, verify):
        parser.set_defaults(status=_conversion_status)


def _convert(args: argparse.Namespace) -> int:
    from ligermodels.conversion.options import Options, check_options

    names = [field.name for field in dataclasses.fields(Options) if field.name in args]
    options = Options(**{name: getattr(args, name) for name in names})
    check_options(args.dst, options)
    check_source(args.src)
    from ligermodels.conversion import convert  # and torch

    report = convert(args.src, args.dst, options)
    _report(report, args, "would be written" if args.dry_run else "written")
    return 0


def _verify(args: argparse.Namespace) -> int:
    for src in (args.a, args.b):
        check_source(src)
    from ligermodels.conversion import verify

    reading = {name: getattr(args, name) for name in ("allow_pickle", "config", "rope_factor")}
    report = verify(args.a, args.b, level=args.level, **reading)
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
    for (one, other), count in report.casts.items():
        print(f"{count} tensors differ in dtype alone ({one} in A, {other} in B); equal after the cast")
    if done == "compared":
        same = "the same after a cast" if report.casts else "the same"
        count = len(report.mismatches)
        print(same if report.ok else f"{count} mismatch{'es' * (count > 1)}")


def _text(value: Any) -> str:
    """A detail of a report: of a dtype, also how many numbers have it."""
    return ", ".join(f"{name} ({count:,})" for name, count in value.items()) if isinstance(value, dict) else str(value)


def _conversion_status(error: LigermodelsError) -> int:
    if isinstance(error, MismatchError):
        return 1
    if isinstance(error, InputError):
        return 2
    if isinstance(error, HubError):
        return 4 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 5
    return 3


def _inspect(args: argparse.Namespace) -> int:
    check_source(args.src)
    from ligermodels.conversion import inspect

    names = ("revision", "local_files_only", "allow_pickle", "config", "rope_factor")
    found = inspect(args.src, **{name: getattr(args, name) for name in names})
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        for name, value in {**_checkpoint_rows(found), **_model_rows(found)}.items():
            print(f"{name:15} {value}")
    if found.problem is not None:
        say(f"error: {found.problem}")
    return 0 if found.ok else 1


def _checkpoint_rows(found: "Inspection") -> dict[str, str]:
    return {
        "checkpoint": found.folder,
        "layout": found.layout,
        "to use it": found.use,
        **({"in Python": found.load} if found.load else {}),
        **({"to merge it": found.merge} if found.merge and found.merge != found.use else {}),
        **(_weight_rows(found) if found.tensors else {"weights": "pickles, not read without --allow-pickle"}),
        "files": _files(found.files),
        "tokenizer": _tokenizer(found.tokenizer),
    }


def _weight_rows(found: "Inspection") -> dict[str, str]:
    parts = {f"  {part}": f"{count:,} ({count / found.parameters:.1%})" for part, count in found.parts.items()}
    return {
        "parameters": f"{found.parameters:,}",
        **parts,
        "stored as": _text(found.dtypes),
        "weights": f"{found.tensors} tensors" + f", {'' if found.ok else 'NOT '}as expected" * bool(found.model),
    }


_ADAPTER = {"base": "base model", "r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
"""{field of an adapter: what it is called}."""


def _model_rows(found: "Inspection") -> dict[str, str]:
    """The configuration: config.json, params.json or adapter_config.json."""
    model = found.model
    if not model:
        return {
            _ADAPTER.get(name, name): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in (found.adapter or found.params).items()
        }
    rope = {key: f"[{len(value)}]" if isinstance(value, list) else value for key, value in model["rope"].items()}
    return {
        "architecture": f"{model['model_type']}, ligermodels.{model['architecture']}",
        "lm_head": "tied to the embedding" if model["tied"] else "its own weight",
        "loaded as": f"{model['dtype']} with dtype='auto'",
        "context": f"{model['context']:,} tokens",
        "rope": ", ".join(f"{key} {value}" for key, value in rope.items()),
        "layers": f"{model['layers']} of width {model['hidden_size']}, MLP {model['intermediate_size']}",
        "heads": f"{model['heads']} query and {model['kv_heads']} key-value heads of {model['head_dim']}",
        "vocabulary": f"{model['vocab_size']:,} ids",
    }


def _files(files: dict[str, int]) -> str:
    total = readable_size(sum(files.values()))
    if len(files) == 1:
        return f"{next(iter(files))}, {total}"
    least, most = (readable_size(f(files.values())) for f in (min, max))
    return f"{len(files)} shards of {least} to {most}, {total} in all"


def _tokenizer(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none here"
    if "problem" in found:
        return f"cannot be read: {found['problem']}"
    stops = ", ".join(map(str, found["stop_ids"])) or "none"
    templates = ", ".join(found["chat_templates"]) or "none"
    return f"{found['file']}, {found['vocab_size']:,} ids; stop ids {stops}; chat templates: {templates}"
