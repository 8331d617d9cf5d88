"""Submit a pretraining to SLURM: a batch script is made from a YAML file, checked, and handed to sbatch.

Examples:
  python tools/launch_slurm.py configs/slurm/fbt_1b.yaml --dry-run
  python tools/launch_slurm.py configs/slurm/fbt_1b.yaml job.nodes=4 job.account=lab 'training.overrides=[train.seed=2]'
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fbt_megatron.errors import FBTError, report
from fbt_megatron.launch.plan import plan_launch
from fbt_megatron.launch.script import render_script
from fbt_megatron.launch.submit import submit


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        plan = plan_launch(arguments.file, arguments.overrides, workdir=Path.cwd())
        script = render_script(plan)
        job_id = None if arguments.dry_run else submit(plan, script)
    except FBTError as error:
        return report(error)
    numbers = plan.config.job.array_numbers
    names = ["JOB" if job_id is None else job_id]
    names = [f"{names[0]}_{number}" for number in numbers] or names
    logs = [str(plan.log_path(name)) for name in names]
    if arguments.json:
        found = {"job_id": job_id, "world_size": plan.config.job.world_size, "run_dirs": list(plan.run_dirs)}
        print(json.dumps(found | {"logs": logs, "script": script}))
    elif job_id is None:
        print(script, end="")
    else:
        print(f"submitted job {job_id}: {plan.config.job.world_size} processes on {plan.config.job.nodes} nodes")
        for run_dir, log in zip(plan.run_dirs, logs, strict=True):
            print(f"run directory {run_dir} | log {log}")
    return 0


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="launch file, e.g. configs/slurm/fbt_1b.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys that replace those of the file")
    parser.add_argument("--dry-run", action="store_true", help="print the script; submit nothing")
    parser.add_argument("--json", action="store_true", help="print job, run directories, logs and script as JSON")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
