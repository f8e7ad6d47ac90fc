"""Converts a checkpoint: Hugging Face's layout to the native one or back, another dtype, other shards.

    python convert/convert_checkpoint.py SRC DST [--to native] [--dtype bf16] [--max-shard-size 2GB]
    python convert/convert_checkpoint.py SRC --check

SRC is a folder or a repository of the Hub, in either layout; DST appears when it is complete.
Memory holds one packed tensor and one shard. The result goes to stdout, progress and errors to stderr.

Exit codes: 0 done; 1 the weights do not match the model, nothing is written; 2 wrong arguments; 3 a config or
file that cannot be used; 4 no space left; 5 the Hub, the network or the file system refused.
"""

import argparse
import errno
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ligermodels import checkpoint, hub, weights
from ligermodels.arch import arch_of
from ligermodels.errors import CheckpointError, HubError, InputError, LigermodelsError

DTYPES = {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("src", help="folder, or owner/name on the Hub")
    parser.add_argument("dst", nargs="?", type=Path, help="folder to write")
    parser.add_argument("--to", choices=["hf", "native"], default="hf", help="layout to write (default: hf)")
    parser.add_argument("--dtype", choices=DTYPES, default="keep", help="cast to this (default: keep)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="per file (default: 5GB)")
    parser.add_argument("--revision", help="branch, tag or commit of SRC")
    parser.add_argument("--allow-pickle", action="store_true", help="read pytorch_model.bin if need be")
    parser.add_argument("--check", action="store_true", help="compare names and shapes only, from the headers")
    parser.add_argument("--overwrite", action="store_true", help="save over what is in DST")
    args = parser.parse_args(argv)
    if (args.dst is None) != args.check:
        parser.error("give DST, or --check without it")
    if args.dst and not args.overwrite and args.dst.is_dir() and any(args.dst.iterdir()):
        parser.error(f"{args.dst} is not empty; --overwrite saves over it")
    return args


def run(args: argparse.Namespace) -> int:
    folder = hub.resolve(args.src, revision=args.revision, allow_pickle=args.allow_pickle)
    arch, config = arch_of(folder), checkpoint.read_json(folder / "config.json")
    with torch.device("meta"):
        model = arch(arch.config_class.from_hf(config))
    tied, dtype = model.tied_weights, DTYPES[args.dtype]
    with checkpoint.open_checkpoint(folder, allow_pickle=args.allow_pickle) as reader:
        table = weights.layout(model, arch.WEIGHTS, reader.headers, native=reader.native, also=arch.ALSO_READ)
        try:
            weights.check(model, table, reader.headers, ignore=arch.IGNORE, tied=tied, where=args.src)
        except CheckpointError as error:
            return failed(error, 1)
        infos = [reader.headers[region.source] for region in weights.regions(model, table)]
        size = sum(info.nbytes // info.dtype.itemsize * (dtype or info.dtype).itemsize for info in infos)
        if args.check:
            print(f"{args.src} matches {arch.__name__}: {len(infos)} tensors, {size / 1e9:.2f} GB")
            return 0
        files: dict[str, bytes | Path] = {**checkpoint.companion_files(folder)}
        files["config.json"] = folder / "config.json"
        if (folder / "generation_config.json").is_file():
            files["generation_config.json"] = folder / "generation_config.json"
        if dtype:
            name = str(dtype).removeprefix("torch.")
            files["config.json"] = checkpoint.json_bytes({**config, "dtype": name, "torch_dtype": name})
        convert = weights.pack if args.to == "native" else weights.unpack
        checkpoint.write_checkpoint(
            args.dst,
            passing(convert(model, arch.WEIGHTS, reader, tied=tied, also=arch.ALSO_READ), dtype, size),
            files=files,
            metadata=checkpoint.NATIVE if args.to == "native" else None,
            max_shard_size=args.max_shard_size,
            expected_bytes=size,
            overwrite=args.overwrite,
        )
    with checkpoint.open_checkpoint(args.dst) as written:
        print(f"{args.dst}: {args.to}, {len(written.headers)} tensors, {size / 1e9:.2f} GB")
    return 0


def passing(
    tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None, size: int
) -> Iterator[tuple[str, Tensor]]:
    with tqdm(desc="Converting", total=size, unit="B", unit_scale=True, disable=None) as bar:
        for name, tensor in tensors:
            tensor = tensor.to(dtype or tensor.dtype)
            yield name, tensor
            bar.update(tensor.nbytes)


def failed(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return run(args)
    except InputError as error:
        return failed(error, 2)
    except HubError as error:
        return failed(error, 4 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 5)
    except LigermodelsError as error:
        return failed(error, 3)


if __name__ == "__main__":
    sys.exit(main())
