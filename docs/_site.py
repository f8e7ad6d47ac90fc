"""What mkdocs does beyond its plugins: pages of the API, of notebooks and of models/, and links to the code.

The API's pages list what `__init__.py` of each package exports, read from the text of its imports: building the site
imports nothing of ligermodels but its options.
"""

import ast
import json
import posixpath
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = ["tune_chats", "compose_hybrid"]
API = {
    "models": "Models",
    "text": "Tokenizers, images, errors",
    "train": "train",
    "layers": "Layers",
    "kernels": "Kernels",
    "training": "Training loops",
    "generation": "Generation",
}
"""Page -> its title."""


def on_config(config: Any) -> Any:
    """Fills the menu."""
    sections = {
        "Notebooks": [f"notebooks/{name}.md" for name in NOTEBOOKS],
        "Models": sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob("models/*.md")),
        "API": [{title: f"api/{name}.md"} for name, title in API.items()],
    }
    for entry in config.nav:
        for title in set(sections) & set(entry if isinstance(entry, dict) else ()):
            entry[title] = sections[title]
    config.nav = [entry for entry in config.nav if not isinstance(entry, dict) or all(entry.values())]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from code."""
    for name, title in API.items():
        make = {"models": models, "text": text_and_errors, "train": train_page, "kernels": kernels}.get(name, package)
        files.append(File.generated(config, f"api/{name}.md", content=f"# {title}\n\n{make(f'ligermodels.{name}')}"))
    for name in NOTEBOOKS:
        text = notebook_page(f"examples/{name}.ipynb")
        files.append(File.generated(config, f"notebooks/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Sends links that leave docs/ to the repository, and raises where their target does not exist."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    folder = "examples" if folder == "docs/notebooks" else folder

    def linked(match: re.Match[str]) -> str:
        path, hash, anchor = match[1].partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / target).exists():
            raise PluginError(f"{page.file.src_uri} links to {match[1]}, which is not there")
        if target.startswith("docs/"):
            here = posixpath.dirname(page.file.src_uri)
            return f"]({posixpath.relpath(target.removeprefix('docs/'), here or '.')}{hash}{anchor})"
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"]({others['config'].repo_url}/{kind}/main/{target}{hash}{anchor})"

    return re.sub(r"\]\(((?:\.\./)+[^)\s]*)\)", linked, markdown)


def parsed(name: str) -> ast.Module:
    """The file of a module or package."""
    path = ROOT / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text("utf-8"))


def exports(name: str) -> dict[str, list[str]]:
    """{module: names that the package exports from it}: those of `__all__`, or imported `x as x`."""
    tree, names = parsed(name), dict[str, list[str]]()
    listed: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            public = [each.name for each in node.names if each.asname or each.name in listed]
            names.setdefault(node.module, []).extend(public)
    return names


def shown(path: str, **options: Any) -> str:
    """A block that mkdocstrings replaces by the docstring of an object."""
    lines = "".join(f"      {name}: {json.dumps(value)}\n" for name, value in options.items())
    return f"::: {path}\n    options:\n{lines}\n" if lines else f"::: {path}\n\n"


def package(name: str) -> str:
    """The docstring of the package, then all that it exports."""
    objects = (f"{module}.{each}" for module, names in exports(name).items() for each in names)
    return f"{ast.get_docstring(parsed(name))}\n\n{''.join(map(shown, objects))}"


def kernels(name: str) -> str:
    """As `package`, with the docstrings of modules, which explain an operation, and without references."""
    text = f"{ast.get_docstring(parsed(name))}\n\n"
    for module, names in exports(name).items():
        if members := [each for each in names if not each.endswith("_reference")]:
            text += shown(module, members=members)
    return text


def models(name: str) -> str:
    """What loads a model, what all models have, and the families with their configs."""
    text = f"{ast.get_docstring(parsed('ligermodels'))}\n\n{shown('ligermodels.arch.load')}"
    for module, names in exports("ligermodels.arch").items():
        for each in names:
            text += shown(
                f"{module}.{each}", **({"inherited_members": True} if each == "CausalLM" else {"members": False})
            )
    return text


def text_and_errors(name: str) -> str:
    errors = [f"ligermodels.errors.{each}" for each in exports("ligermodels")["ligermodels.errors"]]
    return "".join(map(shown, ["ligermodels.text.Tokenizer", "ligermodels.vision.Processor", *errors]))


def train_page(name: str) -> str:
    """The docstring of `train` as `help` shows it, which the code completes with the options of all recipes."""
    sys.path.insert(0, str(ROOT))
    from ligermodels.recipes.entry import train

    options = (train.__doc__ or "").partition("\nOptions of every recipe\n")[2]
    return f"{shown('ligermodels.recipes.entry.train')}## Options of every recipe\n\n```text\n{options.strip()}\n```\n"


def notebook_page(path: str) -> str:
    """A notebook with its stored outputs, as Markdown."""
    notebook, parts = json.loads((ROOT / path).read_text("utf-8")), list[str]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += map(output_of, cell.get("outputs", ()))
    head, *rest = parts
    return "\n\n".join([head, f"This is [{path}](../{path}), as it ran on a CPU.", *rest])


def output_of(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="output" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        return f"<div>{''.join(data['text/html'])}</div>"
    return f"<pre><code>{escape(''.join(output.get('text') or data['text/plain']))}</code></pre>"
