"""A small data set of real text, built once by the tool."""

from __future__ import annotations

import email
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretrain.runs import ROOT, environment, write_config


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source of three packages of the standard library, as bytes."""
    out = tmp_path_factory.mktemp("data")
    sources = [str(Path(module.__file__ or "").parent) for module in (email, json, logging)]
    build = [
        sys.executable,
        str(ROOT / "tools" / "build_shards.py"),
        *sources,
        "--tokenizer",
        "bytes",
        "--out",
        str(out),
    ]
    options = ["--workers", "1", "--shards", "2", "--validation-fraction", "0.1"]
    done = subprocess.run([*build, *options], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The tiny configuration on that data."""
    return write_config(tmp_path_factory.mktemp("config") / "tiny.yaml", data)
