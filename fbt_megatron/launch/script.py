"""The batch script of a launch: what is asked of SLURM, the settings of this launch, and the text that all share."""

from __future__ import annotations

import shlex
from pathlib import Path

from fbt_megatron.launch.plan import LaunchPlan
from fbt_megatron.launch.schema import ARRAY_PLACEHOLDER

_SHARED_TEXT = Path(__file__).with_name("batch_script.sh")
_PEER_SECONDS = 120
"""When one task has ended, the others have this long to end by themselves, each with its own message and status."""


def render_script(plan: LaunchPlan) -> str:
    """The whole script for sbatch, as text."""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in map(_quote_option, sbatch_options(plan))),
        "",
        f"# Written by tools/launch_slurm.py from {plan.source}.",
        *_settings(plan),
        "",
    ]
    return "\n".join(lines) + _SHARED_TEXT.read_text(encoding="utf-8")


def sbatch_options(plan: LaunchPlan) -> list[str]:
    """The options of sbatch, one string each."""
    job, restarts = plan.config.job, plan.config.restarts
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": plan.tasks_per_node,
        "cpus-per-task": plan.cpus_per_task,
        "gpus-per-node": job.gpus_per_node or None,
        "mem": job.memory,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "time": job.time,
        "array": job.array,
        "signal": f"B:USR1@{restarts.signal_seconds}",  # B: to the script, which tells the step once
        "chdir": plan.workdir,
        "output": plan.log_path("%A_%a" if job.array_numbers else "%j"),
        "open-mode": "append",
        "export": "ALL",
    }
    flags = ["--exclusive"] if job.exclusive else []
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*given, *flags, "--requeue", *job.options]


def _settings(plan: LaunchPlan) -> list[str]:
    """What the shared text expects: variables, arrays and two functions."""
    environment = plan.config.environment
    variables = {"OMP_NUM_THREADS": plan.config.job.cpus_per_process, **environment.variables}
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()]
    return [
        *_identity(plan),
        f"max_crashes={plan.config.restarts.max_crashes}",
        f"modules=({' '.join(map(shlex.quote, environment.modules))})",
        "set_up() {",
        *(f"    {line}" for line in environment.setup or [":"]),
        "}",
        "set_variables() {",
        *(f"    {line}" for line in exports),
        "}",
        *_array("srun_options", _srun_options(plan)),
        *_array("command", _command(plan)),
    ]


def _identity(plan: LaunchPlan) -> list[str]:
    """Number and run directory of the job; a task of an array has both for itself."""
    numbers = plan.config.job.array_numbers
    if not numbers:
        return ["job=$SLURM_JOB_ID", f"run_dir={shlex.quote(plan.run_dirs[0])}"]
    run_dirs = (f"[{number}]={shlex.quote(run_dir)}" for number, run_dir in zip(numbers, plan.run_dirs, strict=True))
    return [
        "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",  # the number of a task alone may mean the whole array
        f"run_dirs=({' '.join(run_dirs)})",
        "run_dir=${run_dirs[$SLURM_ARRAY_TASK_ID]}",
    ]


def _srun_options(plan: LaunchPlan) -> list[str]:
    job, container = plan.config.job, plan.config.environment.container
    options = [
        f"--nodes={job.nodes}",
        f"--ntasks={job.nodes * plan.tasks_per_node}",
        f"--ntasks-per-node={plan.tasks_per_node}",
        f"--cpus-per-task={plan.cpus_per_task}",
        "--distribution=block",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        f"--wait={_PEER_SECONDS}",
    ]
    if job.gpus_per_node:
        options.append(f"--gpus-per-node={job.gpus_per_node}")
    if container.image is not None and container.runtime == "pyxis":
        options += [f"--container-image={container.image}", f"--container-workdir={plan.workdir}"]
        options += [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
    return options


def _command(plan: LaunchPlan) -> list[str]:
    """What each task runs."""
    training, container = plan.config.training, plan.config.environment.container
    command = [plan.python]
    if training.launcher == "torchrun":
        agent = plan.repository / "fbt_megatron" / "launch" / "node_agent.py"
        # -P: the folder of the agent is no place to import from.
        command += ["-P", str(agent), f"--processes={plan.config.job.processes}"]
    command += [str(plan.repository / "pretrain_fbt.py"), "--config", training.config, *training.overrides]
    for key in training.allow_config_change:
        command += ["--allow-config-change", key]
    if container.image is not None and container.runtime == "apptainer":
        gpus = ["--nv"] if plan.config.job.gpus_per_node else []
        mounts = [part for mount in container.mounts for part in ("--bind", mount)]
        command = ["apptainer", "exec", *gpus, *mounts, "--pwd", str(plan.workdir), container.image, *command]
    return command


def _array(name: str, words: list[str]) -> list[str]:
    return [f"{name}=(", *(f"    {_word(word)}" for word in words), ")"]


def _word(text: str) -> str:
    """`text` as one word of the shell; the placeholder becomes the number of the array task."""
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in text.split(ARRAY_PLACEHOLDER))


def _quote_option(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else name
