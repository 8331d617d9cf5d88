"""What a configuration amounts to before anything is built: parameters, passes, tokens, layout.

Legend: `N` query heads, `G` key/value heads, `D` head width, `H` hidden, `F` feed-forward, `V` vocabulary, `K` passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from fbt_megatron.config.loader import format_config
from fbt_megatron.config.schema import FeedbackConfig, ModelConfig, RunConfig, SchedulePhase
from fbt_megatron.config.validation import data_parallel_size, num_microbatches, validate_world_size
from fbt_megatron.errors import ConfigError
from fbt_megatron.model.pass_schedule import build_pass_schedule
from fbt_megatron.parallel.logical_tensor import LogicalTensor, ParamKind


def logical_tensors(model: ModelConfig, feedback: FeedbackConfig) -> list[LogicalTensor]:
    """Every trainable matrix and vector of the model with its canonical name, from the input to the output."""
    hidden, vocab = model.hidden_size, model.vocab_size
    tensors = [LogicalTensor("embedding.weight", (vocab, hidden), ParamKind.EMBEDDING)]
    if model.embedding_norm or feedback.fusion != "none":
        only_feedback = not model.embedding_norm
        tensors.append(LogicalTensor("embedding_norm.weight", (hidden,), ParamKind.VECTOR, feedback=only_feedback))
    tensors += _fusion_tensors(hidden, feedback)
    for layer in range(model.num_layers):
        tensors += _layer_tensors(model, prefix=f"layers.{layer}.")
    tensors.append(LogicalTensor("final_norm.weight", (hidden,), ParamKind.VECTOR))
    if not model.tie_embeddings:
        tensors.append(LogicalTensor("head.weight", (vocab, hidden), ParamKind.HEAD))
    return tensors


def _fusion_tensors(hidden: int, feedback: FeedbackConfig) -> Iterator[LogicalTensor]:
    square = (hidden, hidden)
    matrices = {
        "none": {},
        "glu": {"w_u": square, "w_g": square},
        "concat": {"w": (hidden, 2 * hidden)},
        "add": {"w_u": square, "w_e": square},
    }[feedback.fusion]
    for name, shape in matrices.items():
        yield LogicalTensor(f"fusion.{name}.weight", shape, ParamKind.MATRIX, feedback=True)


def _layer_tensors(model: ModelConfig, *, prefix: str) -> Iterator[LogicalTensor]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    query, key_value = model.num_attention_heads * model.head_dim, model.num_query_groups * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attention_norm": (hidden,)}
    shapes |= {"attention.q": (query, hidden), "attention.k": (key_value, hidden), "attention.v": (key_value, hidden)}
    if model.attention_gate:
        shapes["attention.gate"] = (model.num_attention_heads, hidden)
    if model.qk_norm:
        shapes |= {"attention.q_norm": (model.head_dim,), "attention.k_norm": (model.head_dim,)}
    shapes["attention.output"] = (hidden, query)
    if model.post_norm:
        shapes["attention_post_norm"] = (hidden,)
    shapes |= {"mlp_norm": (hidden,), "mlp.gate": (ffn, hidden), "mlp.up": (ffn, hidden), "mlp.down": (hidden, ffn)}
    if model.post_norm:
        shapes["mlp_post_norm"] = (hidden,)
    for name, shape in shapes.items():
        kind = ParamKind.MATRIX if len(shape) == 2 else ParamKind.VECTOR
        yield LogicalTensor(f"{prefix}{name}.weight", shape, kind)


def count_parameters(config: RunConfig) -> int:
    """Number of trainable parameters, each counted once, without the padding of the vocabulary."""
    return sum(tensor.numel for tensor in logical_tensors(config.model, config.feedback))


@dataclass(frozen=True)
class PhasePlan:
    """Steps `first` to `last` (counted from 1), and how many of them run K passes: `steps[K]`."""

    first: int
    last: int
    steps: dict[int, int]


@dataclass(frozen=True)
class PassBudget:
    """A run in numbers of passes: phases, and the training tokens that see K passes, `tokens[K]`."""

    batch_tokens: int
    phases: tuple[PhasePlan, ...]
    tokens: dict[int, int]

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps at each number of passes."""
        return {passes: sum(phase.steps.get(passes, 0) for phase in self.phases) for passes in self.tokens}

    @property
    def token_equivalents(self) -> int:
        """Tokens times their passes: the run's cost in tokens of a one-pass run."""
        return sum(passes * tokens for passes, tokens in self.tokens.items())

    def to_dict(self) -> dict[str, object]:
        """Everything as one JSON-ready mapping; numbers of passes become text keys."""
        return {
            "total_steps": sum(self.steps.values()),
            "total_tokens": sum(self.tokens.values()),
            "batch_tokens": self.batch_tokens,
            "token_equivalents": self.token_equivalents,
            "steps": _text_keys(self.steps),
            "tokens": _text_keys(self.tokens),
            "phases": [
                {"first_step": phase.first, "last_step": phase.last, "steps": _text_keys(phase.steps)}
                for phase in self.phases
            ],
        }


def plan_run(config: RunConfig) -> PassBudget:
    """Passes and tokens of a configured run, counted on its actual schedule."""
    phases = _phase_plans(config.feedback, steps=config.train.steps, seed=config.train.seed)
    batch_tokens = config.train.global_batch_size * config.model.seq_length
    numbers = sorted({passes for phase in phases for passes in phase.steps})
    tokens = {passes: batch_tokens * sum(phase.steps.get(passes, 0) for phase in phases) for passes in numbers}
    return PassBudget(batch_tokens, phases, tokens)


def plan_budget(tokens: int, shares: list[float], *, batch_tokens: int) -> PassBudget:
    """Passes and tokens of a budget of training tokens, of which `shares[K - 1]` percent see K passes.

    Tokens are the exact shares of the budget; steps are whole, so that their product with `batch_tokens` may miss the
    budget by less than a batch. Raises `ConfigError`.
    """
    problems = list(_budget_problems(tokens, shares, batch_tokens))
    if problems:
        raise ConfigError("the token budget", problems)
    feedback = FeedbackConfig(schedule=schedule_of_shares(shares))
    phases = _phase_plans(feedback, steps=round(tokens / batch_tokens), seed=0)
    return PassBudget(batch_tokens, phases, {passes: round(tokens * part) for passes, part in _parts(shares).items()})


def schedule_of_shares(shares: list[float]) -> tuple[SchedulePhase, ...]:
    """Phases for `shares[K - 1]` percent of steps with K passes: the one-pass steps first, then the others mixed."""
    parts = {passes: part for passes, part in _parts(shares).items() if part}
    plain = parts.pop(1, Fraction(0))
    phases = [SchedulePhase(float(plain), {1: 1.0})] if plain else []
    if parts:
        phases.append(SchedulePhase(1.0, {passes: float(part / (1 - plain)) for passes, part in parts.items()}))
    return tuple(phases)


def format_pass_plan(budget: PassBudget) -> str:
    """The passes of a run as a table: a line for each phase and number of passes, then totals."""
    lines = [f"{'phase':>5}  {'steps':>17}  {'passes':>6}  {'number of steps':>15}"]
    for number, phase in enumerate(budget.phases, start=1):
        for passes, steps in phase.steps.items():
            lines.append(f"{number:>5}  {f'{phase.first}-{phase.last}':>17}  {passes:>6}  {steps:>15,}")
    lines += ["", f"{'passes':>6}  {'steps':>12}  {'tokens':>18}  {'token equivalents':>18}"]
    for passes, tokens in budget.tokens.items():
        lines.append(f"{passes:>6}  {budget.steps[passes]:>12,}  {tokens:>18,}  {passes * tokens:>18,}")
    total_steps, total_tokens = sum(budget.steps.values()), sum(budget.tokens.values())
    lines.append(f"{'all':>6}  {total_steps:>12,}  {total_tokens:>18,}  {budget.token_equivalents:>18,}")
    return "\n".join(lines)


def format_dry_run(config: RunConfig, world_size: int) -> str:
    """What `--dry-run` prints: resolved configuration, layout, parameters, passes.

    Raises `TopologyError` where `world_size` processes cannot run the configuration.
    """
    validate_world_size(config, world_size)
    parts = {
        "Configuration": format_config(config).rstrip(),
        "Layout": _format_layout(config, world_size),
        "Parameters": _format_parameters(config),
        "Passes": format_pass_plan(plan_run(config)),
    }
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{text}" for title, text in parts.items())


def _format_layout(config: RunConfig, world_size: int) -> str:
    parallel, train, streams = config.parallel, config.train, config.data.streams
    dp_size = data_parallel_size(parallel, world_size)
    microbatches = num_microbatches(config, dp_size=dp_size)
    tokens = train.global_batch_size * config.model.seq_length
    return "\n".join(
        [
            f"{world_size} processes = tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {dp_size}",
            f"precision {parallel.precision}, ZeRO stage {parallel.zero_stage}",
            f"step: {train.global_batch_size:,} rows of {config.model.seq_length:,} tokens = {tokens:,} tokens",
            f"per rank and step: {microbatches} micro-batches of {train.micro_batch_size} rows",
            f"data: {streams} streams, {streams // dp_size} on each data-parallel rank",
        ]
    )


def _format_parameters(config: RunConfig) -> str:
    tensors = logical_tensors(config.model, config.feedback)
    matrices = [tensor for tensor in tensors if tensor.kind is ParamKind.MATRIX]
    others = [tensor for tensor in tensors if tensor.kind is not ParamKind.MATRIX]
    feedback = [tensor for tensor in tensors if tensor.feedback]
    rows = (("all", tensors), ("NorMuon", matrices), ("Adam", others), ("feedback only", feedback))
    return "\n".join(
        f"{name:<14} {sum(tensor.numel for tensor in group):>16,} in {len(group):,} tensors" for name, group in rows
    )


def _phase_plans(feedback: FeedbackConfig, *, steps: int, seed: int) -> tuple[PhasePlan, ...]:
    first, plans = 1, []
    counts = build_pass_schedule(feedback, steps=steps, seed=seed).counts()
    for phase, count in zip(feedback.schedule, counts, strict=True):
        plans.append(PhasePlan(first, phase.last_step(steps), count))
        first = plans[-1].last + 1
    return tuple(plans)


def _parts(shares: list[float]) -> dict[int, Fraction]:
    """Percentages as exact parts of one, keyed by the number of passes."""
    return {passes: Fraction(str(share)) / 100 for passes, share in enumerate(shares, start=1)}


def _budget_problems(tokens: int, shares: list[float], batch_tokens: int) -> Iterator[str]:
    if batch_tokens < 1:
        yield f"batch tokens={batch_tokens}: must be at least 1."
    elif tokens < batch_tokens:
        yield f"tokens={tokens}: must be at least one batch ({batch_tokens} tokens)."
    if any(share < 0 for share in shares) or sum(_parts(shares).values()) != 1:
        listed = "/".join(f"{share:g}" for share in shares)
        yield f"shares={listed}: must not be negative and must add up to 100, e.g. 75/22/3 for 1, 2 and 3 passes."


def _text_keys(numbers: dict[int, int]) -> dict[str, int]:
    return {str(passes): number for passes, number in numbers.items()}
