"""What griffe, which reads the code for the API's pages, needs to know of this project."""

import re
from pathlib import Path

from griffe import Extension, Module

_DEFINITION = re.compile(r"^(\w[\w, ]*|\*\*?\w+): ")


class Docstrings(Extension):
    """Makes lists of lines at the margin that start with `name: `, and a section of what follows "Options:".

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
            text = re.sub(r"^Options:$", "Keyword Args:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = "\n\n".join(map(_listed, re.split(r"\n\s*\n", text)))


def _listed(paragraph: str) -> str:
    """A line is a definition where an indented line follows it, or where all lines at the margin look like one."""
    lines = paragraph.split("\n")
    margin = [line for line in lines if not line.startswith(" ")]
    every = len(margin) > 1 and all(map(_DEFINITION.match, margin))
    listed, inside = [], False
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        if _DEFINITION.match(line) and (every or next_line.startswith("    ")):
            listed += [""] * (not inside) + [_DEFINITION.sub(r"- **\1**: ", line)]
            inside = True
        else:
            inside = inside and line.startswith("    ")
            listed += [""] * (bool(listed) and listed[-1].startswith(("- **", "    ")) and not inside) + [line]
    return "\n".join(listed)
