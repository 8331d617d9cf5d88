"""Show what a checkpoint holds, check every byte of it, or compare it with another one.

A checkpoint is named by its step_* folder; a run directory or its checkpoints folder stands for the newest.

Examples:
  python tools/inspect_checkpoint.py runs/quickstart
  python tools/inspect_checkpoint.py runs/quickstart/checkpoints/step_00000100 --verify
  python tools/inspect_checkpoint.py runs/quickstart --key lr_schedule
  python tools/inspect_checkpoint.py runs/one runs/two --json

Exit status: 0 all right; 1 two checkpoints differ in tensors, step, counters or data cursors (other configuration or
versions are listed and do not count); 2 wrong arguments; 4 no checkpoint, or a damaged one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fbt_megatron.checkpoint.inspection import Checkpoint, Comparison, compare, open_checkpoint
from fbt_megatron.checkpoint.manifest import WEIGHTS
from fbt_megatron.config.yaml_text import dump_yaml, show_value
from fbt_megatron.errors import CheckpointError, ConfigError, FBTError, report

DIFFERENT = 1
_LISTED_VALUES = 20


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        checkpoints = [open_checkpoint(path) for path in arguments.checkpoints]
        if len(checkpoints) == 2:
            return _compare(checkpoints[0], checkpoints[1], as_json=arguments.json)
        return _show(checkpoints[0], arguments)
    except FBTError as error:
        return report(error)


def _show(checkpoint: Checkpoint, arguments: argparse.Namespace) -> int:
    config = checkpoint.config()
    if arguments.config or arguments.key is not None:
        value = config if arguments.key is None else _value_at(config, arguments.key)
        text = dump_yaml(value).rstrip() if isinstance(value, dict) else show_value(value)
        print(json.dumps(value) if arguments.json else text)
        return 0
    damage = checkpoint.damage() if arguments.verify else None
    if arguments.json:
        manifest = asdict(checkpoint.manifest) | {"config": config}
        tensors = [asdict(entry) for entry in checkpoint.tensors]
        print(json.dumps({"path": str(checkpoint.path), **manifest, "tensors": tensors, "damage": damage}))
    else:
        print("\n".join(_describe(checkpoint, damage)))
    if damage:
        raise CheckpointError(f"{checkpoint.path} is damaged: {'; '.join(damage)}")
    return 0


def _describe(checkpoint: Checkpoint, damage: list[str] | None) -> Iterator[str]:
    manifest, tensors = checkpoint.manifest, checkpoint.tensors
    num_bytes = sum(record.bytes for record in manifest.files.values())
    checked = "not verified" if damage is None else f"{len(damage)} damaged" if damage else "all as they were written"
    yield str(checkpoint.path)
    yield f"step {manifest.step}" + (", weights alone" if manifest.contents == WEIGHTS else "")
    for part, values in manifest.state.items():
        yield f"{part}: {_inline(values)}"
    yield f"versions: {_inline(manifest.versions)}"
    yield f"files: {len(manifest.files)}, {num_bytes:,} bytes, {checked}"
    yield f"tensors: {len(tensors)}, {sum(entry.num_bytes for entry in tensors):,} bytes"
    width = max((len(entry.name) for entry in tensors), default=0)
    for entry in tensors:
        shape = " x ".join(map(str, entry.shape))
        yield f"  {entry.name:{width}}  {entry.dtype:8}  {shape:>16}  {entry.num_bytes:>15,}"


def _inline(values: Mapping[str, Any]) -> str:
    """The leaves on one line; of a long inner mapping (the cursors of many streams) only how many there are."""
    short = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    long = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    parts = [f"{key} {value}" for key, value in short.items()] + [f"{len(value)} {key}" for key, value in long.items()]
    return ", ".join(parts)


def _value_at(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ConfigError("--key", [f"{key}: the configuration in the checkpoint has no such key."])
        value = value[name]
    return value


def _compare(first: Checkpoint, second: Checkpoint, *, as_json: bool) -> int:
    for checkpoint in (first, second):  # damaged tensors would be compared as if they were others
        damage = checkpoint.damage()
        if damage:
            raise CheckpointError(f"{checkpoint.path} is damaged: {'; '.join(damage)}")
    with tqdm(total=None, unit="tensor", disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = compare(first, second, progress=progress)
    if as_json:
        paths = {"first": str(first.path), "second": str(second.path)}
        print(json.dumps({**paths, "same_state": found.same_state, **asdict(found)}))
    else:
        print("\n".join(_describe_comparison(first, second, found)))
    return 0 if found.same_state else DIFFERENT


def _describe_comparison(first: Checkpoint, second: Checkpoint, found: Comparison) -> Iterator[str]:
    yield f"first:  {first.path}"
    yield f"second: {second.path}"
    yield f"tensors: {found.num_equal} equal bit for bit, {len(found.tensors)} not"
    width = max((len(entry.name) for entry in found.tensors), default=0)
    for entry in found.tensors:
        distance = "" if entry.distance is None else f", relative distance {entry.distance:.3g}"
        yield f"  {entry.name:{width}}  {entry.reason}{distance}"
    for part, differences in (
        ("step, counters, data", found.state),
        ("configuration", found.config),
        ("versions", found.versions),
    ):
        yield f"{part}: {len(differences)} values differ" if differences else f"{part}: equal"
        listed = list(differences.items())[:_LISTED_VALUES]
        yield from (f"  {key}: {show_value(one)} and {show_value(other)}" for key, (one, other) in listed)
        if len(listed) < len(differences):
            yield f"  ... and {len(differences) - len(listed)} more (--json has all)"


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="step_* folder, checkpoints or run folder")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER", help="compare with this one; both are verified")
    parser.add_argument("--verify", action="store_true", help="check every byte against the hashes of the manifest")
    parser.add_argument("--config", action="store_true", help="print only the configuration of the run")
    parser.add_argument("--key", metavar="KEY", help="print only this section or key of the configuration")
    parser.add_argument("--json", action="store_true", help="print one JSON value, with everything in it")
    arguments = parser.parse_args(argv)
    if arguments.other is not None and (arguments.config or arguments.key is not None):
        parser.error("--config and --key look into one checkpoint, not two")
    arguments.checkpoints = [path for path in (arguments.checkpoint, arguments.other) if path is not None]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
