"""What griffe, which reads the code for the API's pages, needs to know of this project."""

import re
from pathlib import Path

from griffe import Extension, Module

_DEFINITION = re.compile(r"^(\w[\w, ]*|\*\*?\w+): ")


class Docstrings(Extension):
    """Paragraphs whose lines at the margin all start with `name: ` are lists of definitions.

    And folders without `__init__.py` are packages, also where the package above exports a function of the same name, as
    kernels/ does `attention`.
    """

    def on_module_members(self, *, mod, **others):
        if isinstance(mod.filepath, Path) and mod.filepath.name == "__init__.py":
            for folder in {path.parent for path in mod.filepath.parent.glob("*/*.py")}:
                if not (folder / "__init__.py").exists():
                    mod.set_member(folder.name, Module(folder.name, filepath=[folder]))

    def on_instance(self, *, obj, **others):
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(_listed, re.split(r"\n\s*\n", obj.docstring.value)))


def _listed(paragraph: str) -> str:
    lines = paragraph.split("\n")
    heads = [line for line in lines if not line.startswith(" ")]
    continued = [line for line in lines if line.startswith("    ")]
    if len(heads) + len(continued) != len(lines) or (not continued and len(heads) < 2):
        return paragraph
    if not all(map(_DEFINITION.match, heads)):
        return paragraph
    return "\n".join(line if line.startswith(" ") else _DEFINITION.sub(r"- **\1**: ", line) for line in lines)
