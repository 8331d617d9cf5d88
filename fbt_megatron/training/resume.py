"""Where a run starts from, and whether its configuration may go on with what it finds there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import MANIFEST_NAME, Manifest
from fbt_megatron.config.loader import config_to_dict
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.errors import CheckpointError, ConfigError
from fbt_megatron.training.run_dir import CHECKPOINTS_NAME

# Keys that may differ between two starts of one run: where and how often things are written, and the layout, which
# the optimizer step does not depend on. A prefix ends in a point.
_FREE_KEYS = (
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.sequence",
    "parallel.zero_stage",
    "parallel.recompute",
    "model.kernels",
    "data.workers",
    "data.validation",
    "data.on_error",
    "train.micro_batch_size",
    "train.run_dir",
    "train.stop_step",
    "checkpoint.",
    "evaluation.",
    "logging.",
    "resilience.",
)


def find_start(config: RunConfig, checkpoints: CheckpointManager) -> tuple[Path, Manifest] | None:
    """The checkpoint to go on from: the run's own newest, else that of `checkpoint.load`, else None. On all ranks.

    Raises CheckpointError where `checkpoint.load` names none, or all that there are are damaged.
    """
    start = checkpoints.find_newest(checkpoints.folder)
    if start is not None or config.checkpoint.load is None:
        return start
    source = Path(config.checkpoint.load)
    if (source / MANIFEST_NAME).exists():
        return checkpoints.check_one(source)
    nested = source / CHECKPOINTS_NAME
    start = checkpoints.find_newest(nested if nested.is_dir() else source)
    if start is None:
        raise CheckpointError(
            f"checkpoint.load={source}: there is no checkpoint. Name a run directory, its checkpoints folder, or one "
            "step_* folder in it."
        )
    return start


def check_same_run(config: RunConfig, manifest: Manifest, *, allowed: list[str]) -> None:
    """Raise ConfigError listing the keys whose change would alter the run, unless they are in `allowed`."""
    # Through JSON, as the manifest went: its keys are strings and its tuples lists.
    old, new = dict(_leaves(manifest.config)), dict(_leaves(json.loads(json.dumps(config_to_dict(config)))))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    refused = [key for key in changed if not _is_free(key) and key not in allowed]
    if refused:
        raise ConfigError(
            f"the configuration, against the checkpoint of step {manifest.step}",
            [
                f"{key}={new.get(key)}: the checkpoint was made with {old.get(key)}, and this changes the run. "
                f"Set it back, or allow it with --allow-config-change {key}."
                for key in refused
            ],
        )


def _is_free(key: str) -> bool:
    return any(key == free or (free.endswith(".") and key.startswith(free)) for free in _FREE_KEYS)


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
