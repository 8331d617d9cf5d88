"""Launch files: what is refused before anything is submitted, what sbatch is asked for, and the tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fbt_megatron.errors import FBTError, SubmissionError
from fbt_megatron.launch.plan import plan_launch
from fbt_megatron.launch.schema import JobConfig, time_seconds
from fbt_megatron.launch.script import render_script, sbatch_options
from fbt_megatron.launch.submit import job_environment, submit
from tests.slurm.fakes import FakeSlurm, plan_in, write_launch
from tools import launch_slurm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "slurm").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_are_sound(path):
    plan = plan_launch(path, workdir=ROOT)
    assert plan.run_dirs
    assert render_script(plan).startswith("#!/bin/bash\n#SBATCH --job-name=")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": {"node": 2}}, "job.node: unknown key. Did you mean job.nodes?"),
        ({"job": {"nodes": 0}}, "job.nodes=0: must be at least 1"),
        ({"job": {"cpus_per_process": 0}}, "job.cpus_per_process=0: must be at least 1"),
        ({"job": {"gpus_per_node": -1}}, "job.gpus_per_node=-1: must not be negative"),
        ({"job": {"processes_per_node": None}}, "job.gpus_per_node is 0 and processes_per_node is null"),
        ({"job": {"processes_per_node": 0}}, "job.processes_per_node=0: must be at least 1"),
        ({"job": {"gpus_per_node": 1}}, "job.processes_per_node=2: must be at most gpus_per_node (1)"),
        ({"job": {"partition": "a b"}}, 'job.partition="a b": must be text without spaces'),
        ({"job": {"name": "%j"}}, 'job.name="%j": must be text without'),
        ({"job": {"time": "soon"}}, "job.time=soon: must be a time limit"),
        ({"job": {"time": 0}}, "job.time=0: must be a time limit"),
        ({"job": {"array": "3-1"}}, "job.array=3-1: must be an array"),
        ({"job": {"array": "0-3%0"}}, "job.array=0-3%0: must be an array"),
        ({"job": {"options": ["-p gpu"]}}, 'job.options="-p gpu": must be one long option of sbatch'),
        ({"job": {"options": ["--signal=USR2@9"]}}, "job.options: --signal=USR2@9 is the script's own"),
        ({"job": {"options": ["--no-requeue"]}}, "job.options: --no-requeue is the script's own"),
        ({"job": {"array": "0-1"}}, "training.overrides: runs/tiny is the run directory of more than one task"),
        ({"environment": {"variables": {"A-B": 1}}}, 'environment.variables: "A-B" is not the name'),
        ({"environment": {"container": {"mounts": ["/a:/a"]}}}, "mounts are given but image is null"),
        ({"training": {"config": ""}}, "training.config is empty"),
        ({"training": {"config": "absent.yaml"}}, "absent.yaml\n  the file cannot be read"),
        ({"training": {"overrides": ["train.stepz=1"]}}, "train.stepz: unknown key. Did you mean train.steps"),
        ({"training": {"overrides": ["train.seed={array}"]}}, "{array} stands for the number of an array task"),
        ({"training": {"launcher": "mpirun"}}, 'training.launcher="mpirun": must be one of torchrun, srun'),
        ({"job": {"nodes": 5}}, "job.nodes=5 with 2 processes each: 10 processes (tensor 1 x pipeline 1 x data 10)"),
        ({"restarts": {"signal_seconds": 0}}, "restarts.signal_seconds=0: must be between 1 and 65535"),
        ({"restarts": {"signal_seconds": 1800}}, "restarts.signal_seconds=1800: must be less than job.time (1800 s)"),
        ({"restarts": {"max_crashes": -1}}, "restarts.max_crashes=-1: must not be negative"),
    ],
)
def test_a_mistake_is_one_error_with_its_key(tmp_path, changes, message):
    with pytest.raises(FBTError) as caught:
        plan_in(tmp_path, **changes)
    assert message in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 5400),
        ("90", 5400),
        ("1:30", 90),
        ("02:00:00", 7200),
        ("2-00", 172800),
        ("1-12:30", 131400),
        ("1-00:00:01", 86401),
        ("1:2:3:4", None),
        ("", None),
        ("infinite", None),
    ],
)
def test_time_limits(text, seconds):
    assert time_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3", (0, 1, 2, 3)),
        ("1,2,5-7%2", (1, 2, 5, 6, 7)),
        ("0-8:4", (0, 4, 8)),
        ("4", (4,)),
        ("1,", ()),
        ("a", ()),
        ("0-3:0", ()),
    ],
)
def test_arrays(text, numbers):
    assert JobConfig(array=text).array_numbers == numbers


def test_options_of_sbatch(tmp_path):
    job = {
        "name": "big",
        "gpus_per_node": 2,
        "memory": "0",
        "exclusive": True,
        "partition": "gpu",
        "account": "lab",
        "qos": "high",
        "constraint": "h100&ib",
        "time": "2-00:00:00",
        "options": ["--reservation=weekend"],
    }
    plan = plan_in(tmp_path, job=job, restarts={"signal_seconds": 300})
    expected = [
        "--job-name=big",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
        "--gpus-per-node=2",
        "--mem=0",
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        "--constraint=h100&ib",
        "--time=2-00:00:00",
        "--signal=B:USR1@300",
        f"--chdir={tmp_path}",
        f"--output={tmp_path}/slurm_logs/big_%j.log",
        "--open-mode=append",
        "--export=ALL",
        "--exclusive",
        "--requeue",
        "--reservation=weekend",
    ]
    assert sbatch_options(plan) == expected
    lines = [line for line in render_script(plan).splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --constraint='h100&ib'" in lines
    assert len(lines) == len(expected)


def test_one_process_per_gpu_unless_said_otherwise():
    assert JobConfig(nodes=3, gpus_per_node=4).world_size == 12
    assert JobConfig(nodes=3, gpus_per_node=4, processes_per_node=2).world_size == 6


def test_the_job_inherits_nothing_of_an_allocation():
    outside = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "7"}
    assert job_environment(outside | {"SLURM_RESTART_COUNT": "3", "SBATCH_ACCOUNT": "lab"}) == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "lab",
    }


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "fake")
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return fake


def test_submission(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "9")
    monkeypatch.setenv("SBATCH_PARTITION", "cpu")
    plan = plan_in(tmp_path, job={"partition": "gpu"})
    assert submit(plan, "#!/bin/bash\necho this\n") == "4711"
    assert slurm.lines("sbatch.arguments") == ["--parsable", *sbatch_options(plan)]  # these win over SBATCH_PARTITION
    assert slurm.lines("sbatch.script") == ["#!/bin/bash", "echo this"]
    assert "SLURM_CPUS_PER_TASK" not in slurm.noted_environment("sbatch")
    assert (tmp_path / "slurm_logs").is_dir()


def test_a_refusal_is_one_error(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("REFUSAL", "sbatch: error: invalid partition specified: gpu")
    with pytest.raises(SubmissionError, match=r"sbatch refused the job .*: sbatch: error: invalid partition"):
        submit(plan_in(tmp_path), "")
    (slurm.folder / "bin" / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(slurm.folder / "bin"))
    with pytest.raises(SubmissionError, match="sbatch is not on PATH"):
        submit(plan_in(tmp_path), "")


def test_a_log_folder_that_cannot_be_made(tmp_path, slurm):
    (tmp_path / "file").touch()
    with pytest.raises(SubmissionError, match=r"job\.log_dir: .*file/logs cannot be made: Not a directory"):
        submit(plan_in(tmp_path, job={"log_dir": "file/logs"}), "")


def test_tool_submits(tmp_path, slurm, capsys):
    path = write_launch(tmp_path, training={"overrides": ["train.run_dir=runs/{array}"]})
    assert launch_slurm.main([str(path), "job.array=0-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "submitted job 4711: 4 processes on 2 nodes"
    assert lines[1:] == [f"run directory runs/{n} | log {tmp_path}/slurm_logs/fbt_4711_{n}.log" for n in (0, 1)]
    assert launch_slurm.main([str(write_launch(tmp_path)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["job_id"], found["world_size"], found["run_dirs"]) == ("4711", 4, ["runs/tiny"])
    assert found["logs"] == [f"{tmp_path}/slurm_logs/fbt_4711.log"]
    assert found["script"] == render_script(plan_in(tmp_path))
    assert slurm.lines("sbatch.script") == found["script"].splitlines()


def test_tool_dry_run_submits_nothing(tmp_path, slurm, capsys):
    assert launch_slurm.main([str(write_launch(tmp_path)), "--dry-run"]) == 0
    assert capsys.readouterr().out == render_script(plan_in(tmp_path))
    assert launch_slurm.main([str(write_launch(tmp_path)), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job_id"] is None
    assert slurm.lines("sbatch.arguments") == []


def test_tool_reports_a_mistake(tmp_path, slurm, capsys):
    assert launch_slurm.main([str(write_launch(tmp_path)), "job.nodes=three"]) == 2
    assert 'job.nodes="three": must be a whole number' in capsys.readouterr().err
    assert launch_slurm.main([str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err
