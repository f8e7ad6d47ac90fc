"""The tuned model as one GGUF file, for llama.cpp, written by `conversion`; adapters are merged into their base."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from ligermodels.checkpoint.files import companion_files
from ligermodels.recipes.options import TrainOptions

FILE = "model.gguf"


def check(options: TrainOptions, folder: Path, sketch: Any) -> None:
    """Raises what `write` would raise for this model, before it is trained; warns of what llama.cpp leaves out.

    folder: of the model to train. sketch: that model, on the meta device.
    """
    from ligermodels import conversion

    if not getattr(options, "scratch", False):
        conversion.convert(folder, None, conversion.Options(to="gguf", dry_run=True))
        return
    from ligermodels.checkpoint.gguf.reader import package  # there are no weights whose headers could be read
    from ligermodels.checkpoint.gguf.writer import FAMILIES, add_tokenizer, check
    from ligermodels.text import Tokenizer

    check(sketch, options.model)
    writer = package().GGUFWriter(None, FAMILIES[sketch.config.model_type][0])
    add_tokenizer(writer, companion_files(folder), Tokenizer.from_folder, sketch.config.vocab_size, options.model)


def write(options: TrainOptions, folder: Path) -> Path:
    """Writes OUT/model.gguf in the dtype of the weights; returns its path. `check` has said what its warnings say."""
    from ligermodels import conversion
    from ligermodels.checkpoint.gguf.writer import model_name

    out = Path(options.output_dir)
    how = conversion.Options(to="gguf", overwrite=True, name=f"{model_name(options.model)}-{out.resolve().name}")
    source = out / "model"
    if options.lora_r and not options.merge:
        source, how = folder, dataclasses.replace(how, adapter=out / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conversion.convert(source, out / FILE, how)
    return out / FILE
