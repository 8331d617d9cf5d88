"""The range of versions that the modeling file states: the newest is the installed one, the oldest is tried as well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from fbt_megatron.hf.export import CODE_FILES, export_checkpoint
from tests.hf.check_folder import observe
from tests.hf.models import config_of, draw_model, save_model

ROOT = Path(__file__).parent.parent.parent
TEXTS = ["def first(", "import second", "x"]


def stated_range() -> tuple[str, str]:
    text = (ROOT / "fbt_megatron" / "hf" / CODE_FILES[1]).read_text()
    match = re.search(r'TRANSFORMERS_VERSIONS = \("(\S+)", "(\S+)"\)', text)
    assert match is not None
    return match[1], match[2]


def test_the_newest_version_is_the_installed_one() -> None:
    """All other tests of this folder run with it; whoever raises the pin raises the stated range."""
    assert stated_range()[1] == version("transformers")
    assert f"transformers=={stated_range()[1]}\n" in (ROOT / "requirements.txt").read_text()


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the oldest version and what it needs, but for torch."""
    folder = tmp_path_factory.mktemp("oldest")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    try:
        subprocess.run([*command, f"transformers=={stated_range()[0]}"], check=True, capture_output=True, timeout=1200)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        reason = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        pytest.skip(f"transformers {stated_range()[0]} cannot be installed: {' '.join(reason) or error}")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_oldest_version(topology, tmp_path: Path, oldest: Path) -> None:
    """Same ids, logits, texts and refusals."""
    for name, changes in {"windowed": {"sliding_window": 12}, "bare": {}}.items():
        config = config_of(name, vocab_size=257, **changes)
        run = save_model(tmp_path / name, draw_model(config, topology), config, topology)
        out = tmp_path / f"exported_{name}"
        export_checkpoint(run, out, max_shard_bytes=50_000)
        noted = tmp_path / f"{name}.json"
        noted.write_text(json.dumps({**observe(out, TEXTS), "texts": TEXTS}))
        script = ROOT / "tests" / "hf" / "check_folder.py"
        environment = os.environ | {
            "PYTHONPATH": str(oldest),
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        result = subprocess.run(
            [sys.executable, str(script), str(out), str(noted), stated_range()[0]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, result.stderr[-3000:]
