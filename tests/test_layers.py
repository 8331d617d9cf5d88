"""Imports go one way, and third-party packages are met where the map says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fbt_megatron"

# Lower numbers may not know higher ones, and packages of one number may not know each other.
LAYERS = {
    "activity": 0,
    "errors": 0,
    "files": 0,
    "config": 1,
    "parallel": 2,
    "model": 3,
    "launch": 3,
    "optim": 3,
    "data": 3,
    "checkpoint": 4,
    "planner": 4,
    "rank_plan": 4,
    "hf": 5,
    "inference": 6,
    "evaluation": 7,
    "training": 8,
}

# Files that go with an exported model and are run from there: they know nothing of this package.
SHIPPED = ("hf/configuration_fbt.py", "hf/modeling_fbt.py")

# Where a third-party package may be imported: path prefixes below fbt_megatron/.
OWNERS = {
    "deepspeed": ("training/engine.py",),
    "webdataset": ("data/",),
    "jinja2": ("data/chat_template.py",),
    "tokenizers": ("data/", "hf/tokenizer_files.py"),
    "transformers": SHIPPED,
    "lm_eval": ("evaluation/harness.py", "evaluation/harness_model.py"),
    "math_verify": ("evaluation/answers.py",),
    "safetensors": ("hf/safetensors_files.py",),
    "megatron.core.parallel_state": ("parallel/",),
    "megatron": ("parallel/", "model/", "training/forward_backward.py"),
}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if path.relative_to(PACKAGE).as_posix() in SHIPPED and node.level == 1:
                continue  # beside each other, wherever the exported folder is
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _part(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "fbt_megatron" and len(parts) > 1 else None


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in _imports(path):
        part = _part(module)
        if own == "__init__" or part is None or part == own or part == "__version__":
            continue
        assert LAYERS[part] < LAYERS[own], f"{path.relative_to(ROOT)} imports {module}: {own} may not know {part}"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_stand_alone(name: str) -> None:
    assert not [module for module in _imports(PACKAGE / name) if _part(module) is not None]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_third_party_packages_stay_where_they_belong(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    for module in _imports(path):
        for package, owners in OWNERS.items():
            if module == package or module.startswith(package + "."):
                assert relative.startswith(owners), f"{relative} imports {module}; only {owners} may"


def test_every_part_has_a_layer() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert parts <= set(LAYERS)
