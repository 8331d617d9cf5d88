"""The README's own commands on the quickstart model and its real data."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fbt_megatron.config.loader import load_config
from fbt_megatron.planner import plan_run
from tests.pretrain.runs import ROOT, environment, pretrain, records, steps

pytestmark = [pytest.mark.training, pytest.mark.slow]

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def quickstart_data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that point the quickstart at data made by the Makefile's commands."""
    out = tmp_path_factory.mktemp("quickstart")
    for tool, arguments in (
        ("train_tokenizer.py", ["--vocab-size", "4096", "--out", str(out / "tokenizer")]),
        (
            "build_shards.py",
            ["--tokenizer", str(out / "tokenizer"), "--out", str(out), "--shards", "4", "--workers", "2"],
        ),
    ):
        command = [sys.executable, str(ROOT / "tools" / tool), "python-stdlib", *arguments]
        subprocess.run(command, env=environment(), check=True, capture_output=True)
    return [f"data.train={out / 'train'}", f"data.validation={out / 'validation'}"]


def test_two_processes_equal_one(quickstart_data: list[str], tmp_path: Path) -> None:
    options = [*quickstart_data, "train.steps=20", "evaluation.batches=1"]
    pretrain(QUICKSTART, tmp_path / "one", *options, timeout=900).check()
    expected = steps(tmp_path / "one")
    assert {record["passes"] for record in expected} == {1, 2, 3}
    for zero_stage in (0, 1):
        run_dir = tmp_path / f"zero{zero_stage}"
        stage = f"parallel.zero_stage={zero_stage}"
        pretrain(QUICKSTART, run_dir, *options, stage, processes=2, timeout=900).check()
        for one, two in zip(expected, steps(run_dir), strict=True):
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.timeout(1800)
def test_whole_run(quickstart_data: list[str], tmp_path: Path) -> None:
    """The validation loss of pass 1 falls by at least 35%, and passes occur in the planned shares."""
    pretrain(QUICKSTART, tmp_path / "run", *quickstart_data, timeout=1700).check()
    validation = [record for record in records(tmp_path / "run") if record.get("kind") == "validation"]
    assert validation[-1]["val_loss_pass_1"] < 0.65 * validation[0]["val_loss_pass_1"]
    planned = plan_run(load_config(QUICKSTART)).steps
    assert Counter(record["passes"] for record in steps(tmp_path / "run")) == planned
