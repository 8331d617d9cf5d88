"""A disk that is too small for a second checkpoint: one clear error, and the first one stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fbt_megatron.errors import CheckpointError
from tests.checkpoint.disk import SmallDisk, small_disk
from tests.checkpoint.toy import Run

SHAPES = {"weights/matrix": (256, 256), "weights/vector": (1000,)}  # 65 pages, far more than what counts as "full"


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])
def test_a_disk_of_any_size_between_one_and_two_checkpoints(tmp_path: Path, in_background: bool) -> None:
    """The disk fills up at the first page, in the middle, and at each of the small files that complete a save."""
    with small_disk(tmp_path / "disk") as disk:
        _save_on_disks_of_all_sizes(disk, in_background)


def _save_on_disks_of_all_sizes(disk: SmallDisk, in_background: bool) -> None:
    run = Run(disk.path / "checkpoints", in_background=in_background, shapes=SHAPES)
    run.save(10)
    one = disk.used_pages()
    saved = []
    for pages in [one, one + 1, one + one // 2, *range(2 * one - 6, 2 * one + 2)]:
        disk.resize(pages)
        try:
            run.save(20)
        except CheckpointError as error:
            message = str(error)
            assert "No space left on device" in message
            assert f"The newest complete checkpoint is {run.folder / 'step_00000010'}." in message
            assert "Free or change the disk (train.run_dir)" in message
            assert run.newest() == 10
        else:
            saved.append(pages)
            assert run.newest() == 20
        assert not [name for name in run.names() if name.endswith((".tmp", ".old"))]
        disk.resize(4 * one)
        shutil.rmtree(run.folder / "step_00000020", ignore_errors=True)
        run.save(10)
    assert saved, "no disk was large enough: this test would not show a save that always fails"
    assert min(saved) > one + one // 2
