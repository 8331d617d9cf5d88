"""The README's own commands on the quickstart model and its real data."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fbt_megatron.config.loader import load_config
from fbt_megatron.planner import plan_run
from tests.pretrain.runs import ROOT, environment, pretrain, records, steps

pytestmark = [pytest.mark.training, pytest.mark.slow]

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SHORT = ["train.steps=20", "evaluation.batches=1"]


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


LAYOUTS = {
    "2 replicas, ZeRO 0": (2, ["parallel.zero_stage=0"]),
    "2 replicas, ZeRO 1": (2, ["parallel.zero_stage=1"]),
    "tensor 2 x pipeline 2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
}


@pytest.fixture(scope="module")
def one_process(quickstart_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Steps of one process."""
    run_dir = tmp_path_factory.mktemp("one")
    pretrain(QUICKSTART, run_dir, *quickstart_data, *SHORT, timeout=900).check()
    return steps(run_dir)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.timeout(1000)
def test_layouts_equal_one_process(
    quickstart_data: list[str], one_process: list[dict[str, Any]], tmp_path: Path, name: str
) -> None:
    processes, overrides = LAYOUTS[name]
    run_dir = tmp_path / "run"
    done = pretrain(QUICKSTART, run_dir, *quickstart_data, *SHORT, *overrides, processes=processes, timeout=900)
    done.check()
    assert {record["passes"] for record in one_process} == {1, 2, 3}
    for one, other in zip(one_process, steps(run_dir), strict=True):
        losses = {key for key in one if key.startswith("loss")} | {"grad_norm", "z_loss"}
        assert {key: other[key] for key in losses} == pytest.approx({key: one[key] for key in losses}, rel=1e-4)
    assert done.output.count("optimizer state of") == 1, "once says which rank holds what"


@pytest.mark.timeout(1800)
def test_whole_run(quickstart_data: list[str], tmp_path: Path) -> None:
    """The validation loss of pass 1 falls by at least 35%, and passes occur in the planned shares."""
    pretrain(QUICKSTART, tmp_path / "run", *quickstart_data, timeout=1700).check()
    validation = [record for record in records(tmp_path / "run") if record.get("kind") == "validation"]
    assert validation[-1]["val_loss_pass_1"] < 0.65 * validation[0]["val_loss_pass_1"]
    planned = plan_run(load_config(QUICKSTART)).steps
    assert Counter(record["passes"] for record in steps(tmp_path / "run")) == planned
