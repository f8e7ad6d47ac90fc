"""The layers of the package, read from its imports: nothing imports upward, and only integrations/ transformers."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ligermodels"
MAY_IMPORT = {
    "errors": set(),
    "attr_dict": set(),
    "libraries": set(),
    "processes": {"errors"},
    "kernels": {"errors"},
    "layers": {"kernels", "libraries", "errors"},
    "training": {"layers", "kernels", "checkpoint", "processes", "errors"},
    "checkpoint": {"layers", "kernels", "processes", "errors"},
    "parallel": {"layers", "checkpoint", "processes", "errors"},
    "text": {"checkpoint", "errors"},
    "vision": {"text", "checkpoint", "errors"},
    "generation": {"layers", "kernels", "text", "attr_dict", "errors"},
    "arch": {
        "layers",
        "kernels",
        "training",
        "parallel",
        "checkpoint",
        "generation",
        "attr_dict",
        "libraries",
        "processes",
        "errors",
    },
    "conversion": {"arch", "checkpoint", "text", "errors"},
    "integrations": {"arch", "layers", "kernels", "checkpoint", "errors"},
    "recipes": {
        "arch",
        "conversion",
        "generation",
        "training",
        "parallel",
        "vision",
        "text",
        "layers",
        "checkpoint",
        "processes",
        "errors",
    },
    "cli": {
        "recipes",
        "training",
        "arch",
        "conversion",
        "layers",
        "kernels",
        "checkpoint",
        "generation",
        "text",
        "vision",
        "errors",
    },
    "__main__": {"cli"},
}
WRAPS = {
    "qwen2_vl": {"qwen2"}, "llama_vision": {"llama"}, "qwen3_vl": {"qwen3"}, "qwen3_5_vl": {"qwen3_5"},
    "qwen3_vl_moe": {"qwen3_vl", "qwen3_moe"}, "qwen3_5_moe": {"qwen3_5"},
    "qwen3_5_moe_vl": {"qwen3_5_moe", "qwen3_5_vl"},
}  # fmt: skip
"""Models that are others with a vision tower or with experts."""
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _imports(path: Path) -> set[str]:
    """Modules that the file imports; what only type checkers read is left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        inner for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }  # fmt: skip
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import; write the whole module path"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_upward(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in MAY_IMPORT, f"{room}: say in MAY_IMPORT what this room may import"
    for module in _imports(path):
        assert room == "integrations" or not module.startswith("transformers"), f"{path.name} imports transformers"
        if not module.startswith("ligermodels."):
            continue
        target = _room(module)
        allowed = MAY_IMPORT[room] | {room, "__version__"}
        assert target in allowed, f"{room}/{path.name} imports {module}: {room} may import {sorted(allowed)}"


def test_one_architecture_does_not_import_another():
    files = (PACKAGE / "arch").glob("*.py")
    archs = {path.stem for path in files if 'model_type: ClassVar[str] = "' in path.read_text()}
    assert {"llama", "phi3", "qwen2_vl"} <= archs
    for name in archs:
        for module in _imports(PACKAGE / "arch" / f"{name}.py"):
            others = archs - {name, *WRAPS.get(name, ())}
            assert module not in {f"ligermodels.arch.{other}" for other in others}, f"arch/{name}.py imports {module}"


def test_what_a_checkpoint_holds_is_asked_of_named_weights_alone():
    """It yields persistent buffers too; whoever walks over the parameters forgets them."""
    files = [
        *(PACKAGE / "checkpoint").rglob("*.py"),
        *(PACKAGE / "arch" / name for name in ("placement.py", "pretrained.py")),
    ]
    calls = {path.name: count for path in files if (count := path.read_text().count("named_parameters"))}
    assert calls == {"weights.py": 1}
