"""Where a run starts from, and whether its configuration may go on with what it finds there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fbt_megatron.checkpoint.folder import what_is_at
from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import WEIGHTS, Manifest
from fbt_megatron.config.loader import config_diff, parse_config
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.config.typed_values import known_keys
from fbt_megatron.config.yaml_text import show_value
from fbt_megatron.errors import CheckpointError, ConfigError
from fbt_megatron.parallel.collectives import agree_on_rank_zero
from fbt_megatron.planner import logical_tensors
from fbt_megatron.training.past import SHAPING_KEYS, PastDifference, past_differences

# Keys that may differ between two starts of one run: where things lie and how often they are written, and the layout,
# which the optimizer step does not depend on. A prefix ends in a point. The training data may move: the loader knows it
# by its fingerprint.
_FREE_KEYS = (
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.pipeline_layers",
    "parallel.sequence",
    "parallel.zero_stage",
    "parallel.recompute",
    "model.kernels",
    "data.train",
    "data.workers",
    "data.validation",
    "data.on_error",
    "data.max_skipped",
    "train.micro_batch_size",
    "train.run_dir",
    "train.stop_step",
    "checkpoint.",
    "evaluation.",
    "logging.",
    "resilience.max_consecutive_skips",
    "resilience.max_rewinds",
    "resilience.hang_timeout_seconds",
)

_NOT_IN_WEIGHTS = ("model.kernels", "model.init_std", "model.seq_length")
"""Keys of `model` that do not say what its weights mean."""


def find_start(config: RunConfig, checkpoints: CheckpointManager) -> tuple[Path, Manifest] | None:
    """The checkpoint to go on from: the run's own newest, else that of `checkpoint.load`, else None. On all ranks.

    With `checkpoint.load_weights_only` the loaded one counts as one of weights alone, whatever else it holds.
    Raises CheckpointError where `checkpoint.load` names none, or all that there are are damaged.
    """
    start = checkpoints.find_newest(checkpoints.folder)
    if config.checkpoint.load is None:
        return start
    if start is not None:
        checkpoints.log(f"checkpoint.load={config.checkpoint.load} counts no more: {checkpoints.folder} has its own")
        return start
    source = Path(config.checkpoint.load)
    # Rank 0 decides for all: on a shared file system ranks may see different things for a moment.
    is_checkpoint, folder = agree_on_rank_zero(lambda: what_is_at(source))
    start = checkpoints.check_one(folder) if is_checkpoint else checkpoints.find_newest(folder)
    if start is None:
        raise CheckpointError(
            f"checkpoint.load={source}: there is no checkpoint. Name a run directory, its checkpoints folder, or one "
            "step_* folder in it."
        )
    path, manifest = start
    if config.checkpoint.load_weights_only:
        manifest = replace(manifest, state={}, contents=WEIGHTS)
    return path, manifest


def check_same_run(config: RunConfig, manifest: Manifest, *, allowed: list[str]) -> list[str]:
    """Changes against the checkpoint that act from its step on, as "key old -> new"; free keys are not listed.

    A key of a schedule may change where every step up to the checkpoint stays as it was. Raises ConfigError listing the
    keys whose change would alter the run, unless they are in `allowed`. A key that the checkpoint's configuration does
    not have yet counts with its default.
    """
    _check_known(allowed)
    written = _written_config(manifest)
    if config.train.steps < manifest.step:
        raise ConfigError(
            f"the configuration, against the checkpoint of step {manifest.step}",
            [
                f"train.steps={config.train.steps}: the run would have ended before the checkpoint. "
                f"Use at least {manifest.step}, or an earlier checkpoint."
            ],
        )
    changed = [change for change in config_diff(written, config) if not _is_free(change[0])]
    past: list[PastDifference] = []
    if any(key in SHAPING_KEYS for key, _, _ in changed):
        past = past_differences(written, config, last_step=manifest.step)
    problems = {key: _problem(key, old, new, past) for key, old, new in changed}
    refused = [problem for key, problem in problems.items() if problem is not None and key not in allowed]
    if refused:
        raise ConfigError(f"the configuration, against the checkpoint of step {manifest.step}", refused)
    return [f"{key} {show_value(old)} -> {show_value(new)}" for key, old, new in changed]


def check_same_model(config: RunConfig, manifest: Manifest, *, allowed: list[str]) -> None:
    """`check_same_run` for a checkpoint of weights alone: only keys that say what the weights mean may not differ.

    The length of rows is free, so that a model can go on with shorter or longer ones, and a model without feedback may
    get a fusion.
    """
    _check_known(allowed)
    written = _written_config(manifest)
    free = [*_NOT_IN_WEIGHTS, *allowed, *(["feedback.fusion"] if written.feedback.fusion == "none" else [])]
    refused = [
        f"{key}={show_value(new)}: the weights are of a model with {show_value(old)}. "
        f"Set it to that, or allow it with --allow-config-change {key}."
        for key, old, new in config_diff(written, config)
        if (key.startswith("model.") or key == "feedback.fusion") and key not in free
    ]
    if refused:
        raise ConfigError("the configuration, against the weights that it starts from", refused)


def new_feedback_tensors(config: RunConfig, manifest: Manifest) -> frozenset[str]:
    """Names of the tensors of feedback that the model has and that of the checkpoint had not, by its configuration."""
    written = _written_config(manifest)
    had = {tensor.name for tensor in logical_tensors(written.model, written.feedback)}
    has = [tensor.name for tensor in logical_tensors(config.model, config.feedback) if tensor.feedback]
    return frozenset(has).difference(had)


def _check_known(allowed: list[str]) -> None:
    unknown = [key for key in allowed if key not in known_keys(RunConfig)]
    if unknown:
        raise ConfigError("--allow-config-change", [f"{key}: unknown key." for key in unknown])


def _written_config(manifest: Manifest) -> RunConfig:
    source = f"the configuration in the checkpoint of step {manifest.step}"
    return parse_config(manifest.config, source=source, check_rules=False)


def _problem(key: str, old: Any, new: Any, past: Sequence[PastDifference]) -> str | None:
    """Why a key may not change, and what to do; None where it may."""
    reason = "this changes the run."
    remedies = ["Set it back", f"allow it with --allow-config-change {key}"]
    if key in SHAPING_KEYS:
        difference = next((difference for difference in past if key in difference.keys), None)
        if difference is None:
            return None
        reason = f"{difference.text}. {difference.remedy}".rstrip()
        if difference.step > 1:
            remedies.append(f"go on from a checkpoint of step {difference.step - 1} or before in another train.run_dir")
    remedy = f"{', '.join(remedies[:-1])}, or {remedies[-1]}."
    return f"{key}={show_value(new)}: the checkpoint was made with {show_value(old)}, and {reason} {remedy}"


def _is_free(key: str) -> bool:
    return any(key == free or (free.endswith(".") and key.startswith(free)) for free in _FREE_KEYS)
