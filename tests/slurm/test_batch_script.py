"""What a batch script does on a node, with stand-ins for SLURM's commands."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from fbt_megatron.parallel.launcher import ephemeral_ports, find_launch, job_port
from tests.slurm.fakes import FakeSlurm, script_in

LISTEN = 'trap "echo told >>$FAKE/told; exit 138" USR1; touch "$FAKE/ready"; while :; do sleep 0.05; done'
"""A step that leaves with status 138 when it is told to."""


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "fake")


def save_checkpoint(run_dir: Path, name: str) -> None:
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run_dir / "checkpoints" / "latest").write_text(f"{name}\n")


@pytest.mark.parametrize(
    "outer",
    [
        {"SLURM_CPUS_PER_TASK": "3", "SLURM_TRES_PER_TASK": "cpu:1", "SLURM_NTASKS": "1"},
        {"SLURM_CPUS_PER_TASK": "3", "SRUN_CPUS_PER_TASK": "5", "SLURM_MEM_PER_CPU": "1", "SLURM_MEM_PER_NODE": "2"},
        {"SLURM_NTASKS": "64", "SLURM_NPROCS": "64", "SLURM_NTASKS_PER_NODE": "64"},
        {},
    ],
    ids=["disagreeing CPUs", "CPUs and memory", "tasks", "nothing set"],
)
@pytest.mark.parametrize(("launcher", "tasks", "cpus"), [("srun", 4, 3), ("torchrun", 2, 6)])
def test_the_step_is_given_its_numbers(tmp_path, slurm, outer, launcher, tasks, cpus):
    job = slurm.run(script_in(tmp_path, training={"launcher": launcher}), **outer)
    assert job.status == 0, job.output
    arguments = slurm.lines("srun.arguments")
    expected = ["--nodes=2", f"--ntasks={tasks}", f"--ntasks-per-node={tasks // 2}", f"--cpus-per-task={cpus}"]
    assert arguments[:4] == expected
    left = slurm.noted_environment().keys() & outer.keys()
    assert not left


def test_variables_of_an_outer_launcher_do_not_reach_the_processes(tmp_path, slurm):
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    slurm.run(script_in(tmp_path), **torchrun)
    environment = slurm.noted_environment()
    assert environment["MASTER_ADDR"] == "node7"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & environment.keys()


def test_commands_of_the_two_launchers(tmp_path, slurm):
    changes = {"overrides": ["train.seed=3", "data.tokenizer=it's $HOME"], "allow_config_change": ["train.steps"]}
    slurm.run(script_in(tmp_path, training=changes))
    direct = slurm.lines("srun.arguments")
    assert "--kill-on-bad-exit=0" in direct
    rest = ["--config", "train.yaml", *changes["overrides"], "--allow-config-change", "train.steps"]
    assert direct[-len(rest) - 1 :] == [direct[-len(rest) - 1], *rest]
    assert direct[-len(rest) - 1].endswith("/pretrain_fbt.py")

    slurm.run(script_in(tmp_path, training=changes | {"launcher": "torchrun"}))
    through_agent = slurm.lines("srun.arguments")
    assert through_agent[-len(rest) - 1 :] == direct[-len(rest) - 1 :]
    assert through_agent[-len(rest) - 2] == "--processes=2"


def test_what_the_processes_find_is_what_the_launcher_reads(tmp_path, slurm):
    slurm.run(script_in(tmp_path))
    task = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    launch = find_launch(slurm.noted_environment() | task)
    assert launch.address == "node7"
    assert slurm.lines("hostnames.argument") == ["node[7-8]"]
    assert f"processes meet at node7:{launch.port}" in slurm.run(script_in(tmp_path)).output


@pytest.mark.parametrize("job_id", [1, 16384, 1234567, 2147483647])
def test_the_port_is_that_of_the_job(tmp_path, slurm, job_id):
    low, high = ephemeral_ports()
    slurm.run(script_in(tmp_path), SLURM_JOB_ID=job_id)
    port = int(slurm.noted_environment()["MASTER_PORT"])
    assert not low <= port <= high
    preferred = job_port(job_id, step_id=0, ephemeral=(low, high))
    assert port == preferred or not _is_free(preferred)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_two_jobs_with_the_same_first_choice_take_different_ports(tmp_path, slurm):
    low, high = ephemeral_ports()
    count = len(range(10000, low)) + len(range(high + 1, 65536))
    first, second = slurm, FakeSlurm(tmp_path / "other")
    held = first.start(script_in(tmp_path), step=LISTEN, SLURM_JOB_ID=77)
    first.wait_for_file("ready")
    other = second.start(script_in(tmp_path), step=LISTEN, SLURM_JOB_ID=77 + count)
    second.wait_for_file("ready")
    ports = [int(one.noted_environment()["MASTER_PORT"]) for one in (first, second)]
    assert job_port(77, step_id=0, ephemeral=(low, high)) == job_port(77 + count, step_id=0, ephemeral=(low, high))
    assert ports[0] != ports[1]
    assert not any(low <= port <= high for port in ports)
    for job in (held, other):
        job.process.send_signal(signal.SIGUSR1)
        job.finish()
    # The lock goes with the job.
    slurm.run(script_in(tmp_path), SLURM_JOB_ID=77 + count)
    assert int(slurm.noted_environment()["MASTER_PORT"]) == ports[0]


def test_a_port_that_something_listens_on_is_not_taken(tmp_path, slurm):
    slurm.run(script_in(tmp_path), SLURM_JOB_ID=1003)
    port = int(slurm.noted_environment()["MASTER_PORT"])
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, port)):
            slurm.run(script_in(tmp_path), SLURM_JOB_ID=1003)
        assert int(slurm.noted_environment()["MASTER_PORT"]) != port


def test_a_port_whose_lock_belongs_to_someone_else_is_not_taken(tmp_path, slurm):
    slurm.run(script_in(tmp_path), SLURM_JOB_ID=2003)
    port = int(slurm.noted_environment()["MASTER_PORT"])
    lock = Path(f"/tmp/fbt_port_{port}.lock")
    lock.unlink()
    lock.mkdir()  # cannot be opened for writing, not even by root
    try:
        assert slurm.run(script_in(tmp_path), SLURM_JOB_ID=2003).status == 0
    finally:
        lock.rmdir()
    assert int(slurm.noted_environment()["MASTER_PORT"]) != port


def test_variables_are_literal_and_win(tmp_path, slurm):
    variables = {"NOTE": 'it\'s "$HOME" `id`; a', "OMP_NUM_THREADS": 1, "MASTER_ADDR": "node7-ib"}
    slurm.run(script_in(tmp_path, environment={"variables": variables}))
    environment = slurm.noted_environment()
    assert {name: environment[name] for name in variables} == {name: str(value) for name, value in variables.items()}
    slurm.run(script_in(tmp_path))
    assert slurm.noted_environment()["OMP_NUM_THREADS"] == "3"  # CPUs of a process


def test_setup_runs_before_the_processes_start(tmp_path, slurm):
    setup = [
        'for word in a b; do echo "$word" >>"$FAKE/setup"; done',
        'export FOUND="$(cat "$FAKE/setup" | tr "\\n" -)"',
    ]
    slurm.run(script_in(tmp_path, environment={"setup": setup}))
    assert slurm.noted_environment()["FOUND"] == "a-b-"


def test_modules(tmp_path, slurm):
    script = script_in(tmp_path, environment={"modules": ["cuda/12.8", "nccl"]})
    loaded = slurm.run(script, **{"BASH_FUNC_module%%": '() { echo "$@" >"$FAKE/modules"; }'})
    assert loaded.status == 0, loaded.output
    assert slurm.lines("modules") == ["load cuda/12.8 nccl"]
    failed = slurm.run(script, **{"BASH_FUNC_module%%": "() { return 1; }"})
    assert (failed.status, failed.requeued) == (2, [])
    assert "the modules cannot be loaded: cuda/12.8 nccl. Correct environment.modules." in failed.output


def test_pyxis_is_asked_by_options_of_srun(tmp_path, slurm):
    container = {"image": "/images/fbt.sqsh", "mounts": ["/a:/a", "/b:/c"]}
    slurm.run(script_in(tmp_path, environment={"container": container}))
    arguments = slurm.lines("srun.arguments")
    assert "--container-image=/images/fbt.sqsh" in arguments
    assert "--container-mounts=/a:/a,/b:/c" in arguments
    assert f"--container-workdir={tmp_path}" in arguments
    assert arguments[arguments.index("--config") - 2] == "python"


@pytest.mark.parametrize("gpus", [0, 2])
def test_apptainer_runs_the_command(tmp_path, slurm, gpus):
    container = {"image": "fbt.sif", "runtime": "apptainer", "mounts": ["/a:/a"]}
    script = script_in(tmp_path, environment={"container": container, "python": "python3"}, job={"gpus_per_node": gpus})
    slurm.run(script, step='while [ "${1#--}" != "$1" ]; do shift; done; "$@"')
    first = ["exec", *(["--nv"] if gpus else []), "--bind", "/a:/a", "--pwd", str(tmp_path), "fbt.sif", "python3"]
    assert slurm.lines("apptainer.arguments")[: len(first)] == first


@pytest.mark.parametrize(
    ("status", "requeued", "word"),
    [
        (0, False, "training has ended"),
        (2, False, "another start would end in the same way"),
        (3, False, "another start would end in the same way"),
        (4, False, "another start would end in the same way"),
        (5, False, "another start would end in the same way"),
        (130, False, "stopped on request"),
        (143, False, "stopped on request"),
        (138, True, "stopped before the time limit"),
        (1, True, "crashed"),
        (6, True, "crashed"),
        (7, True, "crashed"),
        (134, True, "crashed"),
        (137, True, "crashed"),
        (139, True, "crashed"),
    ],
)
def test_what_follows_an_exit_status(tmp_path, slurm, status, requeued, word):
    job = slurm.run(script_in(tmp_path), step=f"exit {status}")
    assert job.status == status
    assert job.requeued == (["4711"] if requeued else [])
    assert word in job.output


COUNTED = "crashed or saved nothing since the last checkpoint"


def test_crashes_in_a_row_are_bounded(tmp_path, slurm):
    """Two are allowed here; each line is one start of the job."""
    script = script_in(tmp_path)
    jobs = [slurm.run(script, step="exit 1", SLURM_RESTART_COUNT=count) for count in range(3)]
    assert "start 1 on" in jobs[0].output
    assert "start 3 on" in jobs[2].output
    assert len(jobs[-1].requeued) == 2
    assert f"crashed; requeued (2 of 2 starts that {COUNTED})" in jobs[1].output
    assert f"crashed; not requeued: more than restarts.max_crashes=2 starts {COUNTED}" in jobs[2].output
    # Submitted again it is another job, with crashes of its own.
    assert len(slurm.run(script, step="exit 1", SLURM_JOB_ID=4712).requeued) == 3


def test_a_new_checkpoint_starts_the_count_again(tmp_path, slurm):
    script, run_dir = script_in(tmp_path), tmp_path / "runs" / "tiny"
    save = 'echo "$NAME" >runs/tiny/checkpoints/latest; exit 1'
    save_checkpoint(run_dir, "step_00000000")
    for number in range(1, 6):
        job = slurm.run(script, step=save, NAME=f"step_0000000{number}")
        assert len(job.requeued) == number
        assert f"crashed; requeued (1 of 2 starts that {COUNTED})" in job.output
    slurm.run(script, step="exit 1")
    assert "not requeued" in slurm.run(script, step="exit 1").output


def test_a_time_limit_does_not_count_where_something_was_trained(tmp_path, slurm):
    script, run_dir = script_in(tmp_path, restarts={"max_crashes": 0}), tmp_path / "runs" / "tiny"
    save_checkpoint(run_dir, "step_00000000")
    save = 'echo "$NAME" >runs/tiny/checkpoints/latest; exit 138'
    for number in range(1, 4):
        job = slurm.run(script, step=save, NAME=f"step_0000000{number}")
        assert len(job.requeued) == number
        assert f"requeued (0 of 0 starts that {COUNTED})" in job.output
    idle = slurm.run(script, step="exit 138")
    assert len(idle.requeued) == 3
    assert f"not requeued: more than restarts.max_crashes=0 starts {COUNTED}" in idle.output


def test_a_job_that_is_being_cancelled_is_not_requeued(tmp_path, slurm):
    for state in ("COMPLETING", "CANCELLED", ""):
        job = slurm.run(script_in(tmp_path), step="exit 137", STATE=state)
        assert job.requeued == []
        assert f"not requeued, because the job is {state or 'gone'}" in job.output


def test_a_job_that_has_just_been_signalled_is_requeued(tmp_path, slurm):
    assert slurm.run(script_in(tmp_path), step="exit 138", STATE="SIGNALING").requeued == ["4711"]


def test_a_preempted_job_is_requeued(tmp_path, slurm):
    job = slurm.run(script_in(tmp_path), step="exit 143", PREEMPTED="2026-11-29T12:00:00")
    assert job.requeued == ["4711"]
    assert "preempted; requeued" in job.output


def test_the_signal_is_handed_on_once_and_requeues_once(tmp_path, slurm):
    job = slurm.start(script_in(tmp_path), step=LISTEN.replace("exit 138", "sleep 0.5; exit 138"))
    slurm.wait_for_file("ready")
    job.process.send_signal(signal.SIGUSR1)
    slurm.wait_for_file("told")
    job.process.send_signal(signal.SIGUSR1)
    job.finish()
    assert slurm.lines("told") == ["told"]
    assert job.requeued == ["4711"]
    assert "the time limit is near" in job.output


def test_training_that_ends_while_it_is_told_to_stop_is_not_requeued(tmp_path, slurm):
    job = slurm.start(script_in(tmp_path), step=LISTEN.replace("exit 138", "exit 0"))
    slurm.wait_for_file("ready")
    job.process.send_signal(signal.SIGUSR1)
    job.finish()
    assert (job.status, job.requeued) == (0, [])


def test_a_signal_before_the_processes_start_is_not_lost(tmp_path, slurm):
    setup = ["touch $FAKE/setup", "while [ ! -e $FAKE/go ]; do sleep 0.01; done"]
    job = slurm.start(script_in(tmp_path, environment={"setup": setup}), step=LISTEN)
    slurm.wait_for_file("setup")
    job.process.send_signal(signal.SIGUSR1)
    (slurm.folder / "go").touch()
    job.finish()
    assert (job.status, job.requeued) == (138, ["4711"])
    assert "the time limit came before training started" in job.output
    assert slurm.lines("srun.arguments") == []


def test_tasks_of_an_array_are_runs_of_their_own(tmp_path, slurm):
    training = {"overrides": ["train.run_dir=runs/it's {array}", "train.seed={array}"]}
    script = script_in(tmp_path, job={"array": "2,4"}, training=training)
    array = {"SLURM_ARRAY_JOB_ID": 90, "SLURM_ARRAY_TASK_ID": 4, "SLURM_JOB_ID": 90}
    job = slurm.run(script, step="exit 1", **array)
    assert slurm.lines("srun.arguments")[-2:] == ["train.run_dir=runs/it's 4", "train.seed=4"]
    assert job.requeued == ["90_4"]  # 90 alone would be both tasks
    assert (tmp_path / "runs" / "it's 4" / "slurm_restarts").read_text() == "90_4 1\n"
