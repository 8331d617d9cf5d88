"""The commands of docs/resuming.md, with a ten-thousandth of their steps, on the tiny model."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.pretrain.runs import ROOT, Outcome, pretrain, records, steps, write_config

pytestmark = pytest.mark.training

PAGE = (ROOT / "docs" / "resuming.md").read_text()
PHASES = [{"until": 5, "mix": {1: 1.0}}, {"until": 1.0, "mix": {2: 0.5, 3: 0.5}}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def run_file(root: Path, data: Path) -> Path:
    """run.yaml: 10 steps, of which the last two cool down, a checkpoint at 5, feedback from 6 on."""
    changes = {
        "feedback": {"schedule": PHASES},
        "lr_schedule": {"warmup_steps": 1},
        "train": {"steps": 10, "run_dir": str(root / "runs" / "main")},
        "checkpoint": {"every": 5},
        "evaluation": {"every": 100, "extra_passes": 0},
    }
    return write_config(root / "run.yaml", data, changes)


def commands(section: str) -> list[list[str]]:
    """The overrides of each `pretrain_fbt.py --config run.yaml` in a section, with small numbers of steps."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = block.replace("\\\n", "").splitlines()
    words = [shlex.split(re.sub(r"step_000(\d)0000", r"step_0000000\1", line)) for line in lines]
    assert all(line[:4] == ["python", "pretrain_fbt.py", "--config", "run.yaml"] for line in words)
    return [[re.sub(r"\b(\d+)0000\b", r"\1", word) for word in line[4:]] for line in words]


def run(root: Path, run_file: Path, overrides: list[str], *more: str) -> Outcome:
    """A command of the page in `root`; without a run directory of its own it is that of run.yaml."""
    placed = [word.replace("=runs/", f"={root}/runs/") for word in overrides]
    own = [word.partition("=")[2] for word in placed if word.startswith("train.run_dir=")]
    rest = [word for word in placed if not word.startswith("train.run_dir=")]
    return pretrain(run_file, Path(own[0]) if own else root / "runs" / "main", *rest, *more, timeout=500.0)


@pytest.fixture(scope="module")
def main_run(root: Path, run_file: Path) -> Path:
    """The run of the page, stopped in its stable phase with a checkpoint at step 5."""
    run(root, run_file, [], "train.stop_step=5").check()
    return root / "runs" / "main"


def test_branch_a_cooldown(root: Path, run_file: Path, main_run: Path) -> None:
    (command,) = commands("Branch a cooldown")
    outcome = run(root, run_file, command).check()
    assert f"branched off from {main_run}/checkpoints/step_00000005" in outcome.output
    (changes,) = [line for line in outcome.output.splitlines() if line.startswith("changes from step 6 on: ")]
    assert changes.endswith("; lr_schedule.cooldown_fraction 0.25 -> 0.166; train.steps 10 -> 6")
    (record,) = steps(root / "runs" / "branch")
    assert (record["step"], record["tokens"], record["lr_normuon"]) == (6, 6 * 8 * 64, 0.0)
    assert record["z_loss"] > 0
    assert len(steps(main_run)) == 5


def test_extend_a_run(run_file: Path, main_run: Path, tmp_path: Path) -> None:
    """In place, in a copy: the cooldown that began at step 9 now begins at 16."""
    copy = shutil.copytree(main_run, tmp_path / "runs" / "main")
    (command,) = commands("Extend a run")
    outcome = run(tmp_path, run_file, command).check()
    assert "changes from step 6 on: train.steps 10 -> 20" in outcome.output
    assert f"resumed from {copy}/checkpoints/step_00000005" in outcome.output
    trained = steps(copy)
    assert [record["step"] for record in trained] == list(range(1, 21))
    rates = [record["lr_normuon"] / 0.01 for record in trained]
    assert rates == pytest.approx([1.0] * 15 + [0.8, 0.6, 0.4, 0.2, 0.0])
    assert [record["passes"] > 1 for record in trained] == [False] * 5 + [True] * 15


def test_start_feedback_late(root: Path, run_file: Path) -> None:
    plain, late = commands("Start feedback late")
    run(root, run_file, plain).check()
    outcome = run(root, run_file, late).check()
    assert "with their initial values: fusion.w_g.weight, fusion.w_u.weight" in outcome.output
    assert [record["passes"] for record in steps(root / "runs" / "plain")] == [1] * 10
    trained = steps(root / "runs" / "late")
    assert [record["step"] for record in trained] == [6, 7, 8, 9, 10]
    assert all(record["passes"] > 1 for record in trained)
    assert {"val_loss_pass_1", "val_loss_pass_3"} <= records(root / "runs" / "late")[-1].keys()
