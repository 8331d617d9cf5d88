"""Rules between sections of a configuration, and between it and the number of processes.

Each rule is a small function that yields problems ("key=value: rule. remedy"). `_RULES` says which sections a rule
reads, so that it is left out where one of them is already known to be wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fbt_megatron.config.schema import ParallelConfig, RunConfig
from fbt_megatron.errors import TopologyError


def validate_world_size(config: RunConfig, world_size: int) -> None:
    """Raise `TopologyError` if `world_size` processes cannot run `config`, a configuration that is valid by itself."""
    dp_size = data_parallel_size(config.parallel, world_size)
    problems = list(_layout_problems(config, dp_size=dp_size))
    if not problems:
        return
    fitting = [size for size in _divisors(config.data.streams) if not any(_layout_problems(config, dp_size=size))]
    factors = f"tensor {config.parallel.tensor} x pipeline {config.parallel.pipeline} x data {dp_size}"
    lines = [f"{world_size} processes ({factors}) do not fit the configuration", *(f"  {line}" for line in problems)]
    lines.append(f"  Data-parallel sizes that fit it as it is: {', '.join(map(str, fitting))}.")
    raise TopologyError("\n".join(lines))


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """World size / (tensor x pipeline). Raises `TopologyError` where that is not a whole number."""
    unit = parallel.tensor * parallel.pipeline
    if world_size < 1 or world_size % unit:
        raise TopologyError(
            f"world size {world_size}: must be a multiple of parallel.tensor ({parallel.tensor}) x parallel.pipeline "
            f"({parallel.pipeline}) = {unit}, because the data-parallel size is what is left. "
            f"Nearest: {_nearest_multiples(world_size, unit)} processes."
        )
    return world_size // unit


def num_microbatches(config: RunConfig, *, dp_size: int) -> int:
    """Micro-batches per rank and optimizer step (M)."""
    return config.train.global_batch_size // (config.train.micro_batch_size * dp_size)


def config_problems(config: RunConfig, *, unread: frozenset[str] = frozenset()) -> list[str]:
    """Every broken rule of `config`, as "section.key=value: rule. remedy".

    `unread` are the full names of keys that hold their default because their value could not be read, and of keys that
    do not exist: rules that would judge them are left out, as are rules between sections that have problems already.
    """
    problems = []
    unsound = {key.partition(".")[0] for key in unread}
    for section in dataclasses.fields(config):
        found = list(section_problems(getattr(config, section.name), key=section.name, unread=unread))
        problems += found
        unsound |= {section.name} if found else set()
    for rule in _RULES:
        if unsound.isdisjoint(rule.reads):
            problems += rule.check(config)
    return problems


def section_problems(section: Any, *, key: str, unread: frozenset[str]) -> Iterator[str]:
    """Problems of a section and of the sections in it, with their full keys, without those that name an unread key."""
    for problem in section.problems():
        if not any(f"{key}.{word}" in unread for word in re.findall(r"\w+", problem)):
            yield f"{key}.{problem}"
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if hasattr(value, "problems"):
            yield from section_problems(value, key=f"{key}.{field.name}", unread=unread)


def pipeline_divides_layers(config: RunConfig) -> Iterator[str]:
    """Every stage holds at least one layer: as many as it is given, or the same number on each."""
    layers, stages, given = config.model.num_layers, config.parallel.pipeline, config.parallel.pipeline_layers
    if given is None:
        if layers % stages:
            yield (
                f"model.num_layers={layers}: must be a multiple of parallel.pipeline ({stages}), so that every stage "
                f"has the same number of layers. Nearest: {_nearest_multiples(layers, stages)}; or give the layers of "
                "each stage in parallel.pipeline_layers."
            )
        return
    key = f"parallel.pipeline_layers={list(given)}"
    if len(given) != stages:
        yield f"{key}: has {len(given)} entries, but parallel.pipeline is {stages}. Give one number for each stage."
    if min(given, default=0) < 1:
        yield f"{key}: every stage needs at least one layer, because both optimizers must have work on each rank."
    elif sum(given) != layers:
        yield f"{key}: adds up to {sum(given)}, but model.num_layers is {layers}. Both must be equal."


def tensor_divides_model(config: RunConfig) -> Iterator[str]:
    """Tensor parallelism cuts heads, key/value heads, the feed-forward width and the hidden width into equal parts."""
    tensor = config.parallel.tensor
    for name in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"):
        value = getattr(config.model, name)
        if value % tensor:
            yield (
                f"model.{name}={value}: must be a multiple of parallel.tensor ({tensor}). "
                f"Nearest: {_nearest_multiples(value, tensor)}."
            )


def sequence_parallel_needs_tensor_parallel(config: RunConfig) -> Iterator[str]:
    """Sequence parallelism divides the sequence over the tensor-parallel ranks."""
    tensor, length = config.parallel.tensor, config.model.seq_length
    if config.parallel.sequence and tensor == 1:
        yield (
            "parallel.sequence=true: divides activations over tensor-parallel ranks, but parallel.tensor is 1. "
            "Set sequence: false or a larger tensor."
        )
    elif config.parallel.sequence and length % tensor:
        yield (
            f"model.seq_length={length}: must be a multiple of parallel.tensor ({tensor}) under sequence parallelism. "
            f"Nearest: {_nearest_multiples(length, tensor)}."
        )


def batch_fits_ranks_and_streams(config: RunConfig, *, dp_size: int = 1) -> Iterator[str]:
    """Rows divide into micro-batches over ranks, and every micro-batch is consecutive streams of one rank.

    Stops at the first broken rule, because the later ones build on it. What fails at `dp_size` 1 fails at every size.
    """
    batch, micro, streams = config.train.global_batch_size, config.train.micro_batch_size, config.data.streams
    unit = micro * dp_size
    product = f"train.micro_batch_size ({micro}) x data-parallel size ({dp_size}) = {unit}"
    if batch % unit:
        step = streams if streams % unit == 0 else unit
        yield (
            f"train.global_batch_size={batch}: must be a multiple of {product}. "
            f"Nearest: {_nearest_multiples(batch, step)}."
        )
    elif batch % streams or streams % unit:
        allowed = [value for value in _divisors(batch) if value % unit == 0]
        yield (
            f"data.streams={streams}: must divide train.global_batch_size ({batch}) and be a multiple of {product}. "
            f"Allowed here: {', '.join(map(str, allowed))}."
        )
    elif config.data.workers and (streams // unit) % config.data.workers:
        workers = [0, *_divisors(streams // unit)]
        yield (
            f"data.workers={config.data.workers}: must divide the groups of micro_batch_size streams on each rank, "
            f"data.streams ({streams}) / ({product}) = {streams // unit}. Allowed here: {', '.join(map(str, workers))}."
        )


def microbatches_fill_pipeline(config: RunConfig, *, dp_size: int = 1) -> Iterator[str]:
    """The pass-by-pass pipeline schedule needs at least as many micro-batches as stages."""
    batch, micro, stages = config.train.global_batch_size, config.train.micro_batch_size, config.parallel.pipeline
    available = num_microbatches(config, dp_size=dp_size)
    if available < stages:
        yield (
            f"train.global_batch_size={batch}: leaves each rank {available} micro-batches a step ({batch} / "
            f"(micro_batch_size {micro} x data-parallel size {dp_size})), but parallel.pipeline={stages} needs at "
            f"least {stages} to keep every stage at work. Raise it to {stages * micro * dp_size}, or lower "
            "micro_batch_size, the data-parallel size or the pipeline."
        )


def phases_cover_run(config: RunConfig) -> Iterator[str]:
    """Pass phases end one after the other, the last one with the run."""
    steps, phases = config.train.steps, config.feedback.schedule
    previous = 0
    for index, phase in enumerate(phases):
        last = phase.last_step(steps)
        where = f"feedback.schedule[{index}].until={phase.until}"
        if last <= previous:
            yield (
                f"{where}: the phase ends at step {last}, but the one before it at step {previous}. Ends must rise. "
                "A number with a decimal point is a fraction of the run, one without is a step number."
            )
        previous = max(last, previous)
    if phases[-1].last_step(steps) != steps:
        yield (
            f"feedback.schedule[{len(phases) - 1}].until={phases[-1].until}: the last phase must end with the run, "
            f"after {steps} steps (train.steps). Write until: 1.0."
        )


def warmup_and_cooldown_fit_run(config: RunConfig) -> Iterator[str]:
    """No update belongs to both the warm-up and the cooldown."""
    steps, warmup = config.train.steps, config.lr_schedule.warmup_steps
    cooldown = config.lr_schedule.cooldown_steps(steps)
    if warmup + cooldown > steps:
        yield (
            f"lr_schedule.warmup_steps={warmup}: with a cooldown of {cooldown} updates (cooldown_fraction "
            f"{config.lr_schedule.cooldown_fraction} of {steps}) it exceeds train.steps={steps}. "
            f"Use at most {steps - cooldown} warm-up steps, or a shorter cooldown."
        )


def stop_step_within_run(config: RunConfig) -> Iterator[str]:
    """A planned stop lies inside the run."""
    stop, steps = config.train.stop_step, config.train.steps
    if stop is not None and stop > steps:
        yield f"train.stop_step={stop}: lies after the end of the run. Use at most train.steps ({steps}), or null."


def checkpoints_reach_back(config: RunConfig) -> Iterator[str]:
    """A run that may go back still has the checkpoint from before the skipped steps when it has counted them."""
    skips, every, keep = config.resilience.max_consecutive_skips, config.checkpoint.every, config.checkpoint.keep
    newer = -(-(skips - 1) // every)  # saves during the skipped steps, at most
    if config.resilience.max_rewinds and keep <= newer:
        yield (
            f"checkpoint.keep={keep}: with every={every} there may be {newer} checkpoints from within the "
            f"resilience.max_consecutive_skips={skips} skipped steps after which the run goes back (max_rewinds), and "
            f"none from before them. Keep {newer + 1}, save less often, or allow fewer skips."
        )


def extra_passes_need_fusion(config: RunConfig) -> Iterator[str]:
    """An ordinary transformer has no second pass to evaluate."""
    if config.feedback.fusion == "none" and config.evaluation.extra_passes:
        yield (
            f"evaluation.extra_passes={config.evaluation.extra_passes}: feedback.fusion is none, so there is one pass "
            "only. Set extra_passes: 0 or choose a fusion."
        )


@dataclass(frozen=True)
class _Rule:
    check: Callable[[RunConfig], Iterable[str]]
    reads: tuple[str, ...]


_RULES = (
    _Rule(pipeline_divides_layers, ("model", "parallel")),
    _Rule(tensor_divides_model, ("model", "parallel")),
    _Rule(sequence_parallel_needs_tensor_parallel, ("model", "parallel")),
    _Rule(batch_fits_ranks_and_streams, ("train", "data")),
    _Rule(microbatches_fill_pipeline, ("train", "parallel")),
    _Rule(phases_cover_run, ("train", "feedback")),
    _Rule(warmup_and_cooldown_fit_run, ("train", "lr_schedule")),
    _Rule(stop_step_within_run, ("train",)),
    _Rule(checkpoints_reach_back, ("checkpoint", "resilience")),
    _Rule(extra_passes_need_fusion, ("feedback", "evaluation")),
)


def _layout_problems(config: RunConfig, *, dp_size: int) -> Iterator[str]:
    """The rules that depend on the data-parallel size."""
    batch = list(batch_fits_ranks_and_streams(config, dp_size=dp_size))
    yield from batch or microbatches_fill_pipeline(config, dp_size=dp_size)


def _nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`, without zero."""
    below = value // unit * unit
    return ", ".join(str(multiple) for multiple in (below, below + unit) if multiple > 0)


def _divisors(value: int) -> list[int]:
    return [divisor for divisor in range(1, value + 1) if value % divisor == 0]
