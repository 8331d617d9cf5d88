"""One frozen dataclass per section of a configuration file.

The string under a field is its documentation: `docs/configuration.md` is generated from it, so it is written once.
A rule that needs one section only stands in the `problems` method of that section; rules between sections, and
between the configuration and the number of processes, stand in `validation.py`. Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

FusionKind = Literal["glu", "concat", "add", "none"]
REFUSED_KEYS = {
    "parallel.context": "context parallelism is not available, because feedback would cross the borders of its chunks "
    "(docs/parallelism.md says what it would take). For long rows use parallel.sequence and parallel.recompute.",
}
"""Keys that other systems have and this one leaves out on purpose, with the reason."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape and architecture of the transformer."""

    num_layers: int = 4
    """Number of transformer layers over all pipeline stages."""
    hidden_size: int = 128
    """Width of the residual stream."""
    ffn_hidden_size: int = 384
    """Inner width of the SwiGLU feed-forward block."""
    num_attention_heads: int = 4
    """Number of query heads."""
    num_query_groups: int = 4
    """Number of key/value heads; must divide `num_attention_heads`."""
    head_dim: int = 32
    """Width of one attention head; `num_attention_heads * head_dim` need not equal `hidden_size`."""
    vocab_size: int = 4096
    """Number of token ids of the tokenizer. Storage is padded to a multiple of 128 times the tensor-parallel size."""
    seq_length: int = 512
    """Tokens per row (S). A row holds several packed documents."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the normal initialisation of every matrix and of the embedding."""
    qk_norm: bool = True
    """RMSNorm over the head width of queries and keys, before the rotary embedding."""
    attention_gate: bool = True
    """Per-head output gate: `out_n *= sigmoid((W x)_n)` with x the input of the attention block."""
    sliding_window: int | None = None
    """Number of keys a query sees in a windowed layer, itself included. `null`: every layer attends to all."""
    full_attention_every: int | None = None
    """With a sliding window: layers whose 1-based number this divides attend to all. `null`: no layer does."""
    post_norm: bool = True
    """RMSNorm after each residual branch, beside the one before it."""
    residual_scale: Literal["depth", "none"] = "depth"
    """`depth`: a branch is added as `x + branch / sqrt(2 * num_layers)`; `none`: as `x + branch`."""
    embedding_norm: bool = True
    """RMSNorm on the token embedding; feedback-fused inputs go through the same norm either way."""
    tie_embeddings: bool = True
    """Use the token embedding as the output head."""
    kernels: Literal["auto", "torch", "apex", "te"] = "auto"
    """Where norm and fused Adam come from on a GPU; `auto` takes what is installed, `apex`/`te` insist."""

    def problems(self) -> Iterator[str]:
        yield from _positive(
            self,
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim vocab_size "
            "seq_length rope_theta norm_eps init_std sliding_window full_attention_every",
        )
        if self.num_query_groups > 0 and self.num_attention_heads % self.num_query_groups:
            yield (
                f"num_query_groups={self.num_query_groups}: must divide num_attention_heads "
                f"({self.num_attention_heads}), because each key/value head serves the same number of query heads."
            )
        if self.head_dim % 2:
            yield f"head_dim={self.head_dim}: must be even, because the rotary embedding turns pairs of channels."
        if self.full_attention_every is not None and self.sliding_window is None:
            yield "full_attention_every is set but sliding_window is null: set a window or drop full_attention_every."


@dataclass(frozen=True)
class SchedulePhase:
    """A stretch of the run with one mix of pass counts."""

    until: float | int = 1.0
    """End of the phase: a fraction of `train.steps` when written with a decimal point (`0.75`, `1.0`), else a step
    number."""
    mix: dict[int, float] = field(default_factory=lambda: {1: 1.0})
    """Share of the phase's steps at each number of passes; the shares add up to 1."""

    def last_step(self, steps: int) -> int:
        """Number of the phase's last step in a run of `steps` steps, counted from 1."""
        return round(self.until * steps) if isinstance(self.until, float) else self.until


@dataclass(frozen=True)
class FeedbackConfig:
    """Latent feedback: how the top state returns, and how many passes a step runs."""

    fusion: FusionKind = "glu"
    """`glu`: `(W_U h) * sigmoid(W_G e)`; `concat`: `W [h; e]`; `add`: `W_U h + W_E e`; `none`: an ordinary
    transformer."""
    jitter: float = 0.02
    """Half-width of the uniform noise on the fed-back state, in training only."""
    loss_weight: float = 1.0
    """Weight (lambda) of the passes after the first in the objective."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """How the losses of the passes after the first are combined before `loss_weight`."""
    prefix_mixin: Literal["row", "document", "off"] = "row"
    """Keep a random prefix plain in passes after the first: of each row, of each packed document, or not at all."""
    schedule: tuple[SchedulePhase, ...] = (SchedulePhase(),)
    """Phases in order; the last one ends with the run."""

    @property
    def max_passes(self) -> int:
        """Largest number of passes that any phase runs."""
        return max(num_passes for phase in self.schedule for num_passes, share in phase.mix.items() if share > 0)

    def problems(self) -> Iterator[str]:
        yield from _not_negative(self, "jitter loss_weight")
        yield from _schedule_problems(self.schedule)
        if self.fusion == "none" and any(passes > 1 for phase in self.schedule for passes in phase.mix):
            yield (
                "schedule asks for more than one pass but fusion is none: an ordinary transformer has one pass. "
                "Set schedule to [{until: 1.0, mix: {1: 1.0}}] or choose a fusion."
            )


@dataclass(frozen=True)
class NorMuonConfig:
    """NorMuon, for the two-dimensional matrices of the stack and of the fusion."""

    lr: float = 0.01
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled decay at the peak learning rate; it follows the schedule of the learning rate."""
    momentum: float = 0.95
    """Decay of the gradient average."""
    beta2: float = 0.95
    """Decay of the per-row second moment."""
    nesterov: bool = False
    """Orthogonalise `(1 - momentum) * G + momentum * M` in place of `M`."""
    scale: Literal["spectral", "rms", "none"] = "spectral"
    """Factor on the update of an m x n matrix: `sqrt(m/n)`, `0.2 * sqrt(max(m, n))`, or 1."""
    ns_steps: int = 5
    """Iterations of the orthogonalisation."""
    coefficients: Literal["polar_express", "quintic"] = "polar_express"
    """Polynomial of each iteration; Polar Express has five, quintic repeats one."""
    row_norm: bool = True
    """Divide each row by its second moment, keeping the Frobenius norm. `false` is Muon."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, "lr ns_steps")
        yield from _not_negative(self, "weight_decay")
        yield from _decay_rates(self, "momentum beta2")
        if self.coefficients == "polar_express" and self.ns_steps > 5:
            yield f"ns_steps={self.ns_steps}: Polar Express has 5 iterations; use at most 5, or coefficients: quintic."


@dataclass(frozen=True)
class AdamConfig:
    """Adam, for the embedding, the output head, norms and other vectors."""

    lr: float = 5e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled decay of the embedding and the head at the peak rate; vectors never decay."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, "lr eps")
        yield from _not_negative(self, "weight_decay")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield f"betas={list(self.betas)}: each must be at least 0 and below 1."


@dataclass(frozen=True)
class OptimizerConfig:
    """The two optimizers and gradient clipping."""

    normuon: NorMuonConfig = NorMuonConfig()
    """Options of the matrix group."""
    adam: AdamConfig = AdamConfig()
    """Options of everything else."""
    grad_clip: float = 1.0
    """Largest global norm of the raw gradient; 0 switches clipping off. Orthogonalised updates are never clipped."""

    def problems(self) -> Iterator[str]:
        yield from _not_negative(self, "grad_clip")


@dataclass(frozen=True)
class LRScheduleConfig:
    """Warm-up, stable, decay: one factor on both learning rates."""

    warmup_steps: int = 200
    """Updates over which the factor rises linearly; update k of w has k/w."""
    cooldown_fraction: float = 0.25
    """Share of `train.steps` at the end over which the factor falls."""
    cooldown_shape: Literal["linear", "1-sqrt"] = "linear"
    """Form of the fall."""
    min_lr_ratio: float = 0.0
    """Factor of the last update."""

    def cooldown_steps(self, steps: int) -> int:
        """Number of updates in the cooldown of a run of `steps` updates; they are its last ones."""
        return round(self.cooldown_fraction * steps)

    def problems(self) -> Iterator[str]:
        yield from _not_negative(self, "warmup_steps")
        yield from _fractions(self, "cooldown_fraction min_lr_ratio")


@dataclass(frozen=True)
class LossConfig:
    """Terms beside the cross entropy."""

    z_loss: float = 1e-5
    """Coefficient of the mean squared log-partition function; 0 switches it off."""
    z_loss_when: Literal["cooldown", "always"] = "cooldown"
    """On the updates of the cooldown only, or on all."""

    def problems(self) -> Iterator[str]:
        yield from _not_negative(self, "z_loss")


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the optimizer are divided over processes; data parallel is what is left of the world size."""

    tensor: int = 1
    """Tensor-parallel size."""
    pipeline: int = 1
    """Pipeline-parallel size."""
    pipeline_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage, e.g. `[5, 7]`. `null`: the same number on each."""
    sequence: bool = False
    """Divide activations between tensor-parallel regions along the sequence."""
    zero_stage: int = 1
    """DeepSpeed ZeRO stage, 0 or 1; 0 keeps the whole optimizer state on each data-parallel rank and is for fp32."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Type of parameters and activations; bf16 keeps fp32 master weights and accumulates gradients in fp32."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in the backward pass: none, those inside the feed-forward blocks, or all
    of a pass, of which only the input of the stage is kept."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, "tensor pipeline")
        if self.zero_stage not in (0, 1):
            yield (
                f"zero_stage={self.zero_stage}: must be 0 or 1. Stages 2 and 3 cut gradients up while the backward "
                "pass makes them, but gradients of norms under tensor parallelism and of a tied embedding are summed "
                "over ranks after it, and NorMuon needs whole matrices. Stage 1 divides the optimizer state alike."
            )
        if self.zero_stage == 0 and self.precision == "bf16":
            yield (
                "zero_stage=0 with precision=bf16: refused, because DeepSpeed's stage-0 bf16 path is another "
                "optimizer. Use zero_stage: 1 or precision: fp32."
            )


@dataclass(frozen=True)
class DataConfig:
    """Training and validation data."""

    kind: Literal["documents", "chat"] = "documents"
    """`documents`: shards, of which every token is trained. `chat`: `.jsonl` files of conversations, of which the
    assistant's messages are trained."""
    train: str | tuple[str, ...] = ""
    """A data set made by `tools/build_shards.py` (folder or URL prefix), or shards: a path or URL with brace expansion,
    or a list. With `kind: chat` files or folders of `.jsonl`, in the same ways."""
    validation: str | tuple[str, ...] | None = None
    """The same for validation; `null`: no validation."""
    tokenizer: str | None = None
    """Tokenizer (`tokenizer.json`, folder, or `bytes`) for shards that hold text; token shards carry theirs.
    `kind: chat` needs one with special tokens, that of the model."""
    chat_template: str | None = None
    """With `kind: chat`: a file with a Jinja template in place of the tokenizer's own."""
    streams: int = 8
    """Number of logical streams (V). The order of samples depends on it, and on nothing about the cluster."""
    workers: int = 0
    """Reader processes per data-parallel rank; 0 reads in the training process. Does not change the order."""
    reset_attention_mask: bool = True
    """Tokens see their own document only. `false`: the whole row before them; feedback and labels still stop at
    documents."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do with training documents that cannot be read or are damaged: stop the run, or pass over and count them.
    Validation data always stops it."""
    max_skipped: float = 0.01
    """With `on_error: skip`: the largest share of an epoch's documents that may be passed over; more stop the run."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, "streams")
        yield from _not_negative(self, "workers")
        yield from _fractions(self, "max_skipped")
        if not self.train:
            yield "train is empty: name a data set folder or shards."
        if self.kind == "chat" and self.tokenizer is None:
            yield "tokenizer=null: kind chat needs the tokenizer of the model. Name its folder or tokenizer.json."
        if self.kind != "chat" and self.chat_template is not None:
            yield f"chat_template={self.chat_template}: is for kind: chat only. Set that, or chat_template: null."


@dataclass(frozen=True)
class TrainConfig:
    """Length and batch of the run."""

    steps: int = 1000
    """Optimizer steps of the whole run; the schedules span them."""
    global_batch_size: int = 16
    """Rows per optimizer step over all ranks."""
    micro_batch_size: int = 2
    """Rows per forward pass of one rank."""
    seed: int = 1234
    """Seed of weights, data order, pass schedule and every draw."""
    run_dir: str = "runs/run"
    """Folder of the run: configuration, metrics, TensorBoard, checkpoints, log."""
    stop_step: int | None = None
    """Stop with a checkpoint after this step, as if asked to; the schedules still span `steps`."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, "steps global_batch_size micro_batch_size stop_step")
        yield from _not_negative(self, "seed")
        if not self.run_dir:
            yield "run_dir is empty: name a folder."


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    every: int = 1000
    """Save after every so many steps, and at the end."""
    keep: int = 3
    """Number of newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints whose step this divides are kept as well."""
    async_: bool = False
    """Write in the background while training goes on; it stops for the copy to host memory only."""
    load: str | None = None
    """A checkpoint (or a run folder) to start from when `run_dir` has none of its own."""
    load_weights_only: bool = False
    """Take nothing but the weights of `load`: the run begins at step 0 with a fresh optimizer and its own data, as it
    does from a checkpoint that holds weights alone."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, "every keep keep_every")
        if self.load_weights_only and self.load is None:
            yield "load_weights_only=true: load is null. Name the checkpoint in load, or set load_weights_only: false."


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation during training."""

    every: int = 500
    """Validate before the first step, after every so many steps, and at the end."""
    batches: int = 8
    """Global batches per validation, always the same ones."""
    extra_passes: int = 0
    """Passes beyond the deepest trained one: shows whether the recurrence stays stable."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, "every batches")
        yield from _not_negative(self, "extra_passes")


@dataclass(frozen=True)
class LoggingConfig:
    """What is written while training."""

    console_every: int = 10
    """Steps between console lines; `metrics.jsonl` has every step."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    samples: bool = False
    """Write the keys of the documents of every trained row to `samples/`, a line per step and reading rank."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, "console_every")


@dataclass(frozen=True)
class ResilienceConfig:
    """What to do about steps that go wrong, and when to give up."""

    max_consecutive_skips: int = 10
    """Go back (`max_rewinds`) or stop the run after this many skipped steps in a row."""
    max_rewinds: int = 0
    """How often the run may go back to the checkpoint before such steps and pass over their rows; 0: it stops."""
    spikes: Literal["ignore", "report", "skip"] = "report"
    """What to do with a step whose loss or gradient norm lies far above the recent ones: nothing, count and log it, or
    skip it as well, like one whose gradient is not finite."""
    spike_factor: float = 6.0
    """Far above: more than so many standard deviations over the mean of the last 128 steps."""
    hang_timeout_seconds: float | None = 1800.0
    """End the run with a report where a rank makes no progress for so long. One pass over one micro-batch, one
    collective, or the writing of a checkpoint has to take less. null: never."""

    def problems(self) -> Iterator[str]:
        yield from _positive(self, "max_consecutive_skips spike_factor hang_timeout_seconds")
        yield from _not_negative(self, "max_rewinds")


@dataclass(frozen=True)
class RunConfig:
    """A whole configuration file."""

    model: ModelConfig = ModelConfig()
    feedback: FeedbackConfig = FeedbackConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LRScheduleConfig = LRScheduleConfig()
    loss: LossConfig = LossConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    resilience: ResilienceConfig = ResilienceConfig()


def _values(section: object, names: str) -> Iterator[tuple[str, float]]:
    for name in names.split():
        value = getattr(section, name)
        if value is not None:
            yield name, value


def _positive(section: object, names: str) -> Iterator[str]:
    for name, value in _values(section, names):
        if not value > 0:
            yield f"{name}={value}: must be greater than 0."


def _not_negative(section: object, names: str) -> Iterator[str]:
    for name, value in _values(section, names):
        if not value >= 0:
            yield f"{name}={value}: must not be negative."


def _decay_rates(section: object, names: str) -> Iterator[str]:
    for name, value in _values(section, names):
        if not 0.0 <= value < 1.0:
            yield f"{name}={value}: must be at least 0 and below 1."


def _fractions(section: object, names: str) -> Iterator[str]:
    for name, value in _values(section, names):
        if not 0.0 <= value <= 1.0:
            yield f"{name}={value}: must be between 0 and 1."


def _schedule_problems(schedule: tuple[SchedulePhase, ...]) -> Iterator[str]:
    if not schedule:
        yield "schedule is empty: give at least one phase, e.g. [{until: 1.0, mix: {1: 1.0}}]."
    for index, phase in enumerate(schedule):
        where = f"schedule[{index}]"
        if isinstance(phase.until, float) and not 0.0 < phase.until <= 1.0:
            yield (
                f"{where}.until={phase.until}: a fraction must be above 0 and at most 1; write a step number without a "
                "decimal point."
            )
        if isinstance(phase.until, int) and phase.until < 1:
            yield f"{where}.until={phase.until}: a step number must be at least 1."
        if any(passes < 1 for passes in phase.mix):
            yield f"{where}.mix={phase.mix}: a number of passes must be at least 1."
        if any(share < 0 for share in phase.mix.values()) or abs(sum(phase.mix.values()) - 1.0) > 1e-9:
            yield f"{where}.mix={phase.mix}: shares must not be negative and must add up to 1."
