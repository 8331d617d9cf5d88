"""The run: owns the parts and the order of one step, and nothing else.

shards -> loader -> pass plan -> passes (forward_backward) -> engine (ZeRO, NorMuon/Adam) -> metrics -> checkpoint
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fbt_megatron import activity
from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.loader import format_config
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.data.batch import TrainBatch
from fbt_megatron.data.loader import TrainLoader, ValidationLoader
from fbt_megatron.data.loader_state import merge_loader_states
from fbt_megatron.errors import DataError
from fbt_megatron.evaluation.validation import evaluate
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.pass_schedule import PassPlan, PassSchedule
from fbt_megatron.optim.lr_schedule import WSDSchedule, scheduled_weight_decay, scheduled_z_loss
from fbt_megatron.optim.optimizer import StepSettings
from fbt_megatron.parallel.collectives import (
    agree_on_errors,
    any_rank_true,
    gather_objects,
    max_across,
    raise_together,
    sum_across,
)
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.console import Console
from fbt_megatron.training.engine import StepResult, TrainEngine
from fbt_megatron.training.forward_backward import StepLosses, forward_backward, forward_only
from fbt_megatron.training.metrics import MetricsLogger, StepRecord, StepTimer, ValidationRecord
from fbt_megatron.training.resilience import agreed_signal, check_skips
from fbt_megatron.training.sample_log import SampleLog
from fbt_megatron.training.shared_batches import share_batches
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.train_state import Counters, shards_of, software_versions


@dataclass(frozen=True)
class RunParts:
    """What a trainer drives; built by `build.open_trainer`. The ranks that do not read have no loaders."""

    model: FBTModel
    engine: TrainEngine
    loader: TrainLoader | None
    validation: ValidationLoader | None
    token_bytes: Tensor | None
    checkpoints: CheckpointManager
    metrics: MetricsLogger
    samples: SampleLog
    console: Console
    pass_schedule: PassSchedule


class Trainer:
    """Trains from `counters.step` to the end of the run, or until it is asked to stop."""

    def __init__(self, config: RunConfig, topology: ParallelTopology, parts: RunParts, counters: Counters) -> None:
        steps, seed = config.train.steps, config.train.seed
        self.config = config
        self.topology = topology
        self.model = parts.model
        self.engine = parts.engine
        self.loader = parts.loader
        self.validation = parts.validation
        self.token_bytes = parts.token_bytes
        self.checkpoints = parts.checkpoints
        self.metrics = parts.metrics
        self.samples = parts.samples
        self.console = parts.console
        self.counters = counters
        self.pass_schedule = parts.pass_schedule
        self.lr_schedule = WSDSchedule(config.lr_schedule, steps)
        self.noise = FeedbackNoise(seed, config.feedback.jitter, config.feedback.prefix_mixin)
        self._saved_step = counters.step
        self._timer = StepTimer()

    @property
    def last_step(self) -> int:
        """The step after which this process stops of itself."""
        stop_step = self.config.train.stop_step
        return self.config.train.steps if stop_step is None else min(stop_step, self.config.train.steps)

    def train(self, stop: StopSignal) -> int:
        """Run to the end; returns 0, or the number of the signal that stopped the run.

        It stops between two steps or two batches of a validation, with a checkpoint unless nothing is trained yet.
        """
        signal_number = 0
        self.console.start_progress(done=self.counters.step, total=self.config.train.steps)
        if self.counters.step == 0 or self.counters.validation_due:
            self._saved_step = 0  # a checkpoint of this step says that its validation is due
            signal_number = self.validate(stop)
        self._timer.lap()
        while signal_number == 0 and self.counters.step < self.last_step:
            self._raise_write_failure()
            signal_number = agreed_signal(stop, device=self.topology.device)
            if signal_number:
                break
            record = self.train_step()
            self.metrics.step(record)
            step = self.counters.step
            check_skips(self.counters, self.config.resilience)
            if step % self.config.evaluation.every == 0 or step == self.config.train.steps:
                signal_number = self.validate(stop)
            if step % self.config.checkpoint.every == 0:
                self.save()
        if signal_number:
            name, step = signal.Signals(signal_number).name, self.counters.step
            self.console.line(f"{name}: the run stops {f'after step {step}' if step else 'before its first step'}")
        self.save()
        self.checkpoints.finish()
        self._raise_write_failure()
        return signal_number

    def _raise_write_failure(self) -> None:
        """Stop all ranks where rank 0 could not write its log or metrics, or a checkpoint failed in the background."""
        failure = self.checkpoints.poll() or self.console.failure
        if any_rank_true(failure is not None, device=self.topology.device):
            raise_together(failure)

    def train_step(self) -> StepRecord:
        """One optimizer step: the passes of its plan over its micro-batches, then the update."""
        step = self.counters.step + 1
        plan = self.pass_schedule.plan(step)
        activity.begin(f"step {step}, reading its batches")
        batches, num_tokens = self._next_batches()
        activity.begin(f"step {step}, forward and backward")
        losses = forward_backward(
            self.model,
            batches,
            plan,
            num_tokens=num_tokens,
            z_loss=self.z_loss(step),
            noise=self.noise,
            topology=self.topology,
        )
        settings = self.step_settings(step, plan)
        activity.begin(f"step {step}, update")
        result = self.engine.step(settings)
        self._advance(step, result)
        if self.loader is not None:
            self.samples.step(step, self.loader.last_documents)
        return self._step_record(plan, losses, num_tokens, settings, result)

    def step_settings(self, step: int, plan: PassPlan) -> StepSettings:
        """Learning rates and weight decays of a step; the decay follows the rate."""
        factor = self.lr_schedule.factor(step)
        normuon, adam = self.config.optimizer.normuon, self.config.optimizer.adam
        return StepSettings(
            lr_normuon=normuon.lr * factor,
            lr_adam=adam.lr * factor,
            weight_decay_normuon=scheduled_weight_decay(normuon.weight_decay, factor),
            weight_decay_adam=scheduled_weight_decay(adam.weight_decay, factor),
            uses_feedback=plan.uses_feedback,
        )

    def z_loss(self, step: int) -> float:
        """Coefficient of the z-loss in a step."""
        return scheduled_z_loss(self.config.loss, self.lr_schedule, step)

    def validate(self, stop: StopSignal | None = None) -> int:
        """Evaluate all trained passes and `evaluation.extra_passes` more on the validation data, and log it.

        Returns 0, or the number of the signal that cut it short: then nothing is logged, and the resumed run begins
        with this validation, so that it has the metrics of one that was never stopped.
        """
        if self.config.data.validation is None:
            self.counters.validation_due = False
            return 0
        signal_number = 0

        def interrupted() -> bool:
            nonlocal signal_number
            signal_number = 0 if stop is None else agreed_signal(stop, device=self.topology.device)
            return signal_number != 0

        num_passes = self.config.feedback.max_passes + self.config.evaluation.extra_passes
        activity.begin(f"validation after step {self.counters.step}")
        self.model.eval()
        result = evaluate(
            lambda micro_batches: forward_only(
                self.model, micro_batches, num_passes=num_passes, topology=self.topology
            ),
            self._validation_batches(),
            token_bytes=self.token_bytes,
            group=self.topology.pg.dp,
            interrupted=interrupted,
        )
        self.model.train()
        counters = self.counters
        counters.validation_due = result is None
        if result is not None:
            self.metrics.validation(
                ValidationRecord(
                    counters.step, counters.tokens, result.losses, result.bits_per_byte, result.hidden_deltas
                )
            )
        self._timer.lap()
        return signal_number

    def _validation_batches(self) -> Iterator[list[TrainBatch]]:
        """This replica's micro-batches of each global batch; raises DataError on all ranks."""
        batches = iter(self.validation or ())
        for index in range(self.config.evaluation.batches):
            activity.advance(f"batch {index + 1} of {self.config.evaluation.batches}")
            yield self._share(agree_on_errors(lambda: next(batches, [])))

    def save(self) -> None:
        """Save a checkpoint of the current step, unless it is saved already."""
        if self._saved_step == self.counters.step:
            return
        started = time.monotonic()
        activity.begin(f"saving the checkpoint of step {self.counters.step}")
        cursors = gather_objects(None if self.loader is None else self.loader.state_dict())
        state = {
            "counters": self.counters.as_dict(),
            "optimizer": self.engine.optimizer.counters(),
            "data": merge_loader_states([cursor for cursor in cursors if cursor is not None]),
        }
        manifest = Manifest(self.counters.step, state, format_config(self.config), software_versions(), files={})
        self.metrics.flush()
        self.samples.flush()
        self.checkpoints.save(manifest, shards_of(self.engine), started=started)
        self._saved_step = self.counters.step
        self._timer.lap()

    def _next_batches(self) -> tuple[list[TrainBatch], int]:
        """This replica's micro-batches of the next step, and the number of trained tokens of all replicas' together.

        The number is never 0: a row has more tokens than it can have document ends. Raises DataError on all ranks.
        """
        batches: list[TrainBatch] = []
        error: DataError | None = None
        try:
            batches = [] if self.loader is None else self.loader.next_step()
        except DataError as caught:
            error = caught
        skipped = (0, 0) if self.loader is None else self.loader.skipped
        own = torch.tensor([sum(batch.num_trained_tokens for batch in batches), int(error is not None), *skipped])
        total, failures, *skipped_in_all = sum_across(own.to(self.topology.device)).tolist()
        if failures:
            raise_together(error)
        self._note_skipped(*skipped_in_all)
        return self._share(batches), total

    def _note_skipped(self, documents: int, tokens: int) -> None:
        """Keep how many documents the run has passed over, and say how many are new; raises DataError if too many."""
        new = documents - self.counters.skipped_documents
        if not new:
            return
        self.counters.skipped_documents = documents
        self.console.line(
            f"documents that cannot be read and are passed over: {new:,} in step {self.counters.step + 1}, "
            f"{documents:,} ({tokens:,} tokens) in the run"
        )
        epoch = self._epoch()
        agree_on_errors(lambda: None if self.loader is None else self.loader.check_skipped(documents, epoch))

    def _epoch(self) -> int:
        """How often the stream that is furthest has begun its data anew."""
        own = 0 if self.loader is None else self.loader.epoch
        return int(max_across(torch.tensor(own, device=self.topology.device)))

    def _share(self, batches: list[TrainBatch]) -> list[TrainBatch]:
        return share_batches(batches, self.config, self.topology)

    def _advance(self, step: int, result: StepResult) -> None:
        self.counters.step = step
        self.counters.tokens += self._step_tokens
        self.counters.skipped_steps += int(result.skipped)
        self.counters.consecutive_skips = self.counters.consecutive_skips + 1 if result.skipped else 0

    @property
    def _step_tokens(self) -> int:
        return self.config.train.global_batch_size * self.config.model.seq_length

    def _step_record(
        self, plan: PassPlan, losses: StepLosses, num_tokens: int, settings: StepSettings, result: StepResult
    ) -> StepRecord:
        sums = sum_across(torch.stack([losses.cross_entropy, losses.z_sum]), group=self.topology.pg.dp)
        cross_entropy, z_mean = (sums / num_tokens).tolist()
        return StepRecord(
            step=self.counters.step,
            tokens=self.counters.tokens,
            passes=plan.num_passes,
            loss=sum(weight * loss for weight, loss in zip(plan.weights, cross_entropy, strict=True)),
            losses=tuple(cross_entropy),
            z_loss=self.z_loss(self.counters.step) * sum(w * z for w, z in zip(plan.weights, z_mean, strict=True)),
            grad_norm=result.grad_norm,
            lr_normuon=settings.lr_normuon,
            lr_adam=settings.lr_adam,
            weight_decay=settings.weight_decay_normuon,
            skipped_steps=self.counters.skipped_steps,
            epoch=self._epoch(),
            skipped_documents=self.counters.skipped_documents,
            step_seconds=self._timer.lap(),
            step_tokens=self._step_tokens,
        )
