"""What a checkpoint is said to hold is what was saved; damage and differences are found and have an exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fbt_megatron.checkpoint.inspection import TensorDifference, compare, open_checkpoint
from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.schema import CheckpointConfig
from fbt_megatron.errors import CheckpointError
from tests.checkpoint.toy import DAMAGES, SHAPES, Cut, Run, share, whole_tensors
from tools import inspect_checkpoint

ROOT = Path(__file__).parent.parent.parent

STATE: dict[str, Any] = {
    "counters": {"step": 10, "tokens": 640},
    "data": {"cycle": 10, "cursors": {"0": {"epoch": 0, "offset": 3}, "1": {"epoch": 0, "offset": 5}}},
}
CONFIG = "model:\n  num_layers: 2\nfeedback:\n  schedule:\n  - until: 1.0\n    mix:\n      1: 1.0\n"


def save(
    folder: Path, values: dict[str, torch.Tensor], *, step: int = 10, state: Any = STATE, config: str = CONFIG
) -> Path:
    """A run directory with one checkpoint of whole tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
    cut = Cut(shapes, {name: [(0, tensor.numel())] for name, tensor in values.items()}, values)
    manager = CheckpointManager(folder / "checkpoints", config=CheckpointConfig(), log=lambda line: None)
    manager.prepare()
    manager.save(Manifest(step, state, config, {"torch": "2"}, {}), cut.shards)
    return folder


@pytest.fixture
def run_dir(process_group: None, tmp_path: Path) -> Path:
    return save(tmp_path / "run", whole_tensors(10))


# One checkpoint


def test_the_tensors(run_dir: Path) -> None:
    checkpoint = open_checkpoint(run_dir)
    assert {entry.name: entry.shape for entry in checkpoint.tensors} == SHAPES
    assert {entry.dtype for entry in checkpoint.tensors} == {"float32"}
    assert {entry.name: entry.num_bytes for entry in checkpoint.tensors}["weights/matrix"] == 80
    for name, values in whole_tensors(10).items():
        assert torch.equal(checkpoint.read(name), values)
    assert checkpoint.manifest.state == STATE
    assert checkpoint.damage() == []


def test_the_ways_to_name_a_checkpoint(process_group: None, tmp_path: Path) -> None:
    run = Run(tmp_path / "checkpoints")
    run.save(10)
    run.save(20)
    assert open_checkpoint(tmp_path).manifest.step == 20
    assert open_checkpoint(tmp_path / "checkpoints").manifest.step == 20
    assert open_checkpoint(tmp_path / "checkpoints" / "step_00000010").manifest.step == 10
    run.save(15)  # the run went back: `latest` decides
    assert open_checkpoint(tmp_path).manifest.step == 15


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=f"{name}: there is no checkpoint"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.json"])
def test_damage_of_each_file_is_found(
    run_dir: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    """Also through the name of the run: whoever looks wants to know of the newest, not of one before it."""
    DAMAGES[damage](run_dir / "checkpoints" / "step_00000010" / name)
    for arguments in ([str(run_dir), "--verify"], [str(run_dir), "--verify", "--json"]):
        assert inspect_checkpoint.main(arguments) == CheckpointError.exit_status
        message = capsys.readouterr().err
        assert message.startswith("CheckpointError: ")
        assert name in message
        assert "step_00000010" in message
    assert inspect_checkpoint.main([str(run_dir), str(run_dir)]) == CheckpointError.exit_status


def test_the_listing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_checkpoint.main([str(run_dir), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == ["step 10", "counters: step 10, tokens 640", "data: cycle 10, 2 cursors"]
    assert lines[4] == "versions: torch 2"
    assert lines[5].endswith("all as they were written")
    assert lines[6] == "tensors: 3, 180 bytes"
    assert [line.split() for line in lines[7:]] == [
        ["optimizer/momentum", "float32", "3", "x", "6", "72"],
        ["weights/matrix", "float32", "5", "x", "4", "80"],
        ["weights/vector", "float32", "7", "28"],
    ]


def test_the_listing_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_checkpoint.main([str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(run_dir / "checkpoints" / "step_00000010")
    assert (found["step"], found["state"], found["versions"]) == (10, STATE, {"torch": "2"})
    assert found["config"]["model"] == {"num_layers": 2}
    assert set(found["files"]) == {".metadata", "__0_0.distcp"}
    assert found["tensors"][1] == {"name": "weights/matrix", "shape": [5, 4], "dtype": "float32", "num_bytes": 80}
    assert found["damage"] is None


def test_a_key_of_the_configuration(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["--key", "model.num_layers"], "2\n"),
        (["--key", "model"], "num_layers: 2\n"),
        (["--config"], CONFIG),
        (["--key", "model.num_layers", "--json"], "2\n"),
    ):
        assert inspect_checkpoint.main([str(run_dir), *arguments]) == 0
        assert capsys.readouterr().out == expected
    assert inspect_checkpoint.main([str(run_dir), "--key", "model.layers"]) == 2
    assert "model.layers: the configuration in the checkpoint has no such key" in capsys.readouterr().err


# Two checkpoints


def test_a_checkpoint_equals_itself_in_another_place(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run_dir, tmp_path / "copy")
    assert inspect_checkpoint.main([str(run_dir), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "tensors: 3 equal bit for bit, 0 not",
        "step, counters, data: equal",
        "configuration: equal",
        "versions: equal",
    ]


def _changed(name: str, index: int, value: float) -> dict[str, torch.Tensor]:
    values = whole_tensors(10)
    values[name].view(-1)[index] = value
    return values


def test_one_changed_element_and_its_distance(run_dir: Path, tmp_path: Path) -> None:
    values = _changed("weights/vector", 3, 0.0)
    other = save(tmp_path / "other", values)
    found = compare(open_checkpoint(run_dir), open_checkpoint(other))
    (difference,) = found.tensors
    original = whole_tensors(10)["weights/vector"].double()
    expected = float(original[3] / values["weights/vector"].double().norm())
    assert (difference.name, difference.reason) == ("weights/vector", "values")
    assert difference.distance == pytest.approx(expected, rel=1e-12)
    assert (found.num_equal, found.same_state) == (2, False)


@pytest.mark.parametrize(("one", "other", "equal"), [(0.0, -0.0, False), (torch.nan, torch.nan, True)])
def test_values_are_compared_bit_for_bit(
    process_group: None, tmp_path: Path, one: float, other: float, equal: bool
) -> None:
    runs = [save(tmp_path / name, _changed("weights/matrix", 7, value)) for name, value in (("a", one), ("b", other))]
    found = compare(*(open_checkpoint(run) for run in runs))
    assert found.same_state is equal
    assert [difference.distance for difference in found.tensors] == ([] if equal else [0.0])


def test_a_distance_that_is_no_number(process_group: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [save(tmp_path / "a", whole_tensors(1)), save(tmp_path / "b", _changed("weights/matrix", 0, torch.inf))]
    assert inspect_checkpoint.main([*map(str, runs), "--json"]) == 1
    tensors = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["tensors"]
    assert {entry["name"]: entry["distance"] for entry in tensors}["weights/matrix"] is None


def test_other_tensors_and_shapes(run_dir: Path, tmp_path: Path) -> None:
    values = whole_tensors(10)
    values["weights/more"] = values.pop("optimizer/momentum")
    values["weights/matrix"] = values["weights/matrix"].t().contiguous()
    found = compare(open_checkpoint(run_dir), open_checkpoint(save(tmp_path / "other", values)))
    assert found.tensors == [
        TensorDifference("optimizer/momentum", "only in the first"),
        TensorDifference("weights/matrix", "float32 [5, 4] and float32 [4, 5]"),
        TensorDifference("weights/more", "only in the second"),
    ]


def test_state_counts_and_configuration_does_not(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save(tmp_path / "config", whole_tensors(10), config=CONFIG.replace("num_layers: 2", "num_layers: 3"))
    assert inspect_checkpoint.main([str(run_dir), str(other)]) == 0
    assert "configuration: 1 values differ\n  model.num_layers: 2 and 3\n" in capsys.readouterr().out
    moved = json.loads(json.dumps(STATE))
    moved["data"]["cursors"]["1"]["offset"] = 6
    other = save(tmp_path / "state", whole_tensors(10), state=moved)
    assert inspect_checkpoint.main([str(run_dir), str(other)]) == 1
    assert "step, counters, data: 1 values differ\n  data.cursors.1.offset: 5 and 6\n" in capsys.readouterr().out
    other = save(tmp_path / "step", whole_tensors(10), step=11)
    assert inspect_checkpoint.main([str(run_dir), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == {"step": [10, 11]}


def test_a_part_of_two_checkpoints_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        inspect_checkpoint.main([str(run_dir), str(run_dir), "--key", "model"])
    assert caught.value.code == 2
    assert "one checkpoint, not two" in capsys.readouterr().err


def test_other_parts_in_a_process_without_a_group(process_group: None, tmp_path: Path) -> None:
    """The whole tool, on the same values in one part and in two."""
    Run(tmp_path / "one").save(10)
    halved = Run(tmp_path / "two")
    halved.ranges = {name: share(0, 2)[name] + share(1, 2)[name] for name in SHAPES}
    halved.save(10)
    command = [sys.executable, str(ROOT / "tools" / "inspect_checkpoint.py"), "--json"]
    done = subprocess.run([*command, str(tmp_path / "two"), str(tmp_path / "one")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["num_equal"], found["same_state"]) == (3, True)
