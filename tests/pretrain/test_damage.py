"""Damaged checkpoints and full disks, seen from a whole run: it goes on from the one before, or says why it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Container
from pathlib import Path

import pytest

from fbt_megatron.checkpoint.inspection import compare, open_checkpoint
from fbt_megatron.errors import CheckpointError, RunDirError
from tests.checkpoint.disk import PAGE, small_disk
from tests.checkpoint.toy import DAMAGES
from tests.pretrain.ranks import Ranks
from tests.pretrain.runs import records

pytestmark = pytest.mark.training


def run(
    config: Path, run_dir: Path, *overrides: str, expected: int | Container[int] = 0, output: Path | None = None
) -> str:
    """Run to the end in one process; what it printed (to `output`, or beside the run directory)."""
    expected = {expected} if isinstance(expected, int) else expected
    ranks = Ranks(config, run_dir, *overrides, world_size=1, output=output or run_dir.with_suffix(".out"))
    try:
        statuses = ranks.wait(300.0)
    finally:
        ranks.end()
    printed = ranks.output.read_text()
    assert statuses[0] in expected, printed[-6000:]
    return printed


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps with checkpoints at 10 and 20."""
    run_dir = tmp_path_factory.mktemp("damage") / "straight"
    run(config, run_dir, "checkpoint.async=true")
    return run_dir


@pytest.mark.parametrize(
    ("name", "damage"), [("manifest.json", "removed"), (".metadata", "halved"), ("__0_0.distcp", "flipped")]
)
def test_the_run_goes_on_from_the_checkpoint_before(
    config: Path, straight: Path, tmp_path: Path, name: str, damage: str
) -> None:
    run_dir = shutil.copytree(straight, tmp_path / "run")
    DAMAGES[damage](run_dir / "checkpoints" / "step_00000020" / name)
    output = run(config, run_dir)
    assert f"step_00000020 skipped: {run_dir if name == 'manifest.json' else ''}" in output
    assert name in output
    assert "resumed from" in output
    assert "step_00000010" in output.split("resumed from")[1].splitlines()[0]
    assert records(run_dir) == records(straight)
    found = compare(open_checkpoint(run_dir), open_checkpoint(straight))
    assert found.same_state
    assert found.num_equal > 20
    assert open_checkpoint(run_dir).damage() == []


def test_a_run_without_a_sound_checkpoint_never_begins_anew(config: Path, straight: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(straight, tmp_path / "run")
    for step in (10, 20):
        DAMAGES["halved"](run_dir / "checkpoints" / f"step_{step:08d}" / "__0_0.distcp")
    output = run(config, run_dir, expected=CheckpointError.exit_status)
    assert "CheckpointError: No checkpoint in" in output
    assert "step_00000020: __0_0.distcp has" in output
    assert "step_00000010: __0_0.distcp has" in output
    assert "Traceback" not in output
    assert records(run_dir) == records(straight)


def test_a_run_told_to_load_what_is_damaged_never_begins_anew(config: Path, straight: Path, tmp_path: Path) -> None:
    source = shutil.copytree(straight / "checkpoints" / "step_00000020", tmp_path / "step_00000020")
    DAMAGES["flipped"](source / "__0_0.distcp")
    output = run(config, tmp_path / "run", f"checkpoint.load={source}", expected=CheckpointError.exit_status)
    assert f"CheckpointError: {source} cannot be loaded: __0_0.distcp has changed" in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_disk_of_one_and_a_half_checkpoints(config: Path, straight: Path, tmp_path: Path, in_background: str) -> None:
    """The run stops at its second checkpoint, and goes on from the first one when there is space again.

    A log or metrics file that is written beside a save may be the first to find the disk full.
    """
    size = sum(path.stat().st_size for path in (straight / "checkpoints" / "step_00000020").iterdir())
    others = sum(path.stat().st_size for path in straight.iterdir() if path.is_file())
    options = [f"checkpoint.async={in_background}", "checkpoint.keep=1"]
    with small_disk(tmp_path / "disk") as disk:
        run_dir = disk.path / "run"
        disk.resize((size + size // 2 + 2 * others) // PAGE)
        statuses = {CheckpointError.exit_status, *([RunDirError.exit_status] if in_background == "true" else [])}
        output = run(config, run_dir, *options, expected=statuses, output=tmp_path / "first.out")
        assert "No space left on device" in output
        assert "Traceback" not in output
        assert open_checkpoint(run_dir).manifest.step == 10
        assert open_checkpoint(run_dir).damage() == []
        disk.resize(4 * size // PAGE)
        output = run(config, run_dir, *options, output=tmp_path / "second.out")
        assert "resumed from" in output
        assert records(run_dir) == records(straight)
        assert compare(open_checkpoint(run_dir), open_checkpoint(straight)).same_state
        assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"latest", "step_00000020"}
