"""What the Makefile hands on reaches the tools as it was given."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each holds something that a shell, or make itself, would rewrite.
PROMPTS = ['print("a b")', "x = `date`", "$(pwd) $HOME ${HOME} $$", "it's \\n 'so' \\", "# a  comment; exit 1", "*"]


@pytest.fixture
def environment_folder(tmp_path: Path) -> Path:
    """A virtual environment with nothing to install, whose interpreter prints what it is called with."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    return tmp_path


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_prompt_is_not_rewritten(environment_folder: Path, prompt: str, how: str) -> None:
    line = ["make", "--no-print-directory", "--silent", "generate", f"VENV={environment_folder}"]
    # A `make test` that runs this would hand its own flags on.
    variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "PROMPT")}
    if how == "argument":
        line.append(f"PROMPT={prompt}")
    else:
        line.append("--environment-overrides")
        variables["PROMPT"] = prompt
    done = subprocess.run(line, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arguments = done.stdout.splitlines()
    assert arguments[arguments.index("--prompt") + 1] == prompt


def test_without_a_prompt_there_is_one(environment_folder: Path) -> None:
    line = ["make", "--no-print-directory", "--silent", "generate", f"VENV={environment_folder}"]
    done = subprocess.run(line, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    arguments = done.stdout.splitlines()
    assert arguments[arguments.index("--prompt") + 1] == "def read_file(path):"
