"""The run: owns the parts and the order of one step, and nothing else.

shards -> loader -> pass plan -> passes (forward_backward) -> engine (ZeRO, NorMuon/Adam) -> metrics -> checkpoint
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fbt_megatron import activity
from fbt_megatron.checkpoint.folder import list_checkpoints
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
    agree_on_rank_zero,
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
from fbt_megatron.training.resilience import agreed_signal, goes_back, too_many_skips
from fbt_megatron.training.sample_log import SampleLog
from fbt_megatron.training.shared_batches import share_batches
from fbt_megatron.training.spikes import SpikeDetector
from fbt_megatron.training.stop_signal import StopSignal
from fbt_megatron.training.stragglers import StragglerWatch
from fbt_megatron.training.train_state import Counters, load_tensors, shards_of, software_versions


@dataclass(frozen=True)
class Starts:
    """How often this run was started, and how often its launcher says that it started the job again."""

    starts: int
    restarts: int


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
    starts: Starts


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
        self.starts = parts.starts
        self.pass_schedule = parts.pass_schedule
        self.lr_schedule = WSDSchedule(config.lr_schedule, steps)
        self.noise = FeedbackNoise(seed, config.feedback.jitter, config.feedback.prefix_mixin)
        self.spikes = SpikeDetector(config.resilience.spike_factor)
        self.start_is_partial = False
        """True where the checkpoint that the run began from lacks a part of its state; set by `build.open_trainer`."""
        self._saved_step = counters.step
        self._timer = StepTimer()
        self._stragglers = StragglerWatch(topology, interval=config.logging.console_every, log=self.console.line)
        self._next_cycle = 0

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
        if not signal_number:
            self._save_first()
        self._timer.lap()
        while signal_number == 0 and self.counters.step < self.last_step:
            signal_number = self._interruption(stop)
            if signal_number:
                break
            record = self.train_step()
            self.metrics.step(record)
            step = self.counters.step
            if goes_back(self.counters, self.config.resilience):
                self._rewind()
                continue
            if step % self.config.evaluation.every == 0 or step == self.config.train.steps:
                signal_number = self.validate(stop)
            if step % self.config.checkpoint.every == 0:
                self.save()
        if signal_number:
            name, step = signal.Signals(signal_number).name, self.counters.step
            self.console.line(f"{name}: the run stops {f'after step {step}' if step else 'before its first step'}")
        self.save()
        self.checkpoints.finish()
        self._interruption()
        return signal_number

    def _interruption(self, stop: StopSignal | None = None) -> int:
        """Number of the signal by which all ranks stop, or 0.

        Raises where rank 0 could not write its log or metrics, or a checkpoint failed in the background.
        """
        failure = self.checkpoints.poll() or self.console.failure
        own = torch.tensor([0 if stop is None else stop.received, failure is not None], device=self.topology.device)
        signal_number, has_failed = max_across(own).tolist()
        if has_failed:
            raise_together(failure)
        return int(signal_number)

    def train_step(self) -> StepRecord:
        """One optimizer step: the passes of its plan over its micro-batches, then the update."""
        step = self.counters.step + 1
        plan = self.pass_schedule.plan(step)
        activity.begin(f"step {step}, reading its batches")
        batches, num_tokens = self._next_batches()
        settings = self.step_settings(step, plan)
        if num_tokens:
            means = self._forward_backward(step, batches, plan, num_tokens)
            activity.begin(f"step {step}, update")
            result, spikes = self._update(settings, means)
        else:  # rows of conversations may lie outside all answers: no gradient, and nothing to update with
            means = [math.nan] * plan.num_passes, [math.nan] * plan.num_passes
            result, spikes = StepResult(grad_norm=None, skipped=True), []
        self._advance(step, result, batches, is_spike=bool(spikes), is_untrained=not num_tokens)
        if self.loader is not None:
            self.samples.step(step, self.loader.last_documents)
        if result.skipped or spikes:
            self._log_oddity(result, spikes)
        return self._step_record(plan, num_tokens, means, settings, result, is_spike=bool(spikes))

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
            "spikes": self.spikes.state_dict(),
        }
        manifest = Manifest(self.counters.step, state, format_config(self.config), software_versions(), files={})
        self.metrics.flush()
        self.samples.flush()
        self.checkpoints.save(manifest, shards_of(self.engine), started=started)
        self._saved_step = self.counters.step
        self._timer.lap()

    def _save_first(self) -> None:
        """Make sure that a run which may go back has a whole checkpoint to go back to before its first step.

        A start from weights alone, or with new tensors of feedback, has left one that lacks a part of this run's state.
        """
        if not self.config.resilience.max_rewinds:
            return
        if self.start_is_partial or not agree_on_rank_zero(lambda: list_checkpoints(self.checkpoints.folder)):
            self._saved_step = -1
            self.save()

    def _rewind(self) -> None:
        """Go back to the last checkpoint before the skipped steps in a row, and pass over what they read.

        The checkpoint is written again, so that a later start knows of the rows as well; whatever ends the process
        before that, the run comes here again. Raises NonFiniteError where there is no such checkpoint.
        """
        activity.begin(f"going back from step {self.counters.step} to a checkpoint")
        counters, first, stop = self.counters, self.counters.first_skipped_cycle, self._next_cycle
        before = counters.step - counters.consecutive_skips
        found = self.checkpoints.find_newest(self.checkpoints.folder, last_step=before)
        if found is None:
            why = f"no checkpoint of step {before} or before is left to go back to"
            raise too_many_skips(counters, self.config.resilience, why)
        path, manifest = found
        load_tensors(path, self.engine)
        self.checkpoints.discard_after(manifest.step)  # now that the one to go on from is known to fit
        self.engine.optimizer.load_counters(manifest.state["optimizer"])
        self.spikes.load_state_dict(manifest.state["spikes"])
        data = manifest.state["data"]
        agree_on_errors(lambda: None if self.loader is None else self.loader.rewind(data, pass_over=(first, stop)))
        restored = Counters(**manifest.state["counters"])
        self.counters = replace(restored, rewinds=counters.rewinds + 1, validation_due=False)  # it was done since
        agree_on_rank_zero(lambda: self.metrics.rewind(manifest.step))
        self.samples.open(manifest.step)
        streams = self.config.data.streams
        self.console.line(
            f"rewind {self.counters.rewinds} of at most {self.config.resilience.max_rewinds}: back to {path} after "
            f"{counters.consecutive_skips} skipped steps in a row, up to step {counters.step}; rows {first * streams} "
            f"to {stop * streams - 1} are passed over"
        )
        self._saved_step = -1
        self.save()
        if self.counters.step == 0:
            self.validate()
        self._timer.lap()

    def _cycles(self, batches: list[TrainBatch]) -> tuple[int, int]:
        """First cycle of the data of a step, and the one after its last."""
        streams = self.config.data.streams
        return int(batches[0].rows[0]) // streams, int(batches[-1].rows[-1]) // streams + 1

    def _log_oddity(self, result: StepResult, spikes: list[str]) -> None:
        """What stands out in a step, and in the log what it has read. All ranks call it."""
        step = self.counters.step
        if spikes:
            self.console.line(f"step {step}: spike, {', '.join(spikes)}")
        read = gather_objects({} if self.loader is None else self.loader.last_documents)
        rows = sorted((row, keys) for part in read for row, keys in part.items())
        kind = "skipped" if result.skipped else "spike"
        documents = "; ".join(f"row {row}: {', '.join(keys)}" for row, keys in rows)
        self.console.log(f"step {step} ({kind}) read {documents}")

    def _next_batches(self) -> tuple[list[TrainBatch], int]:
        """This replica's micro-batches of the next step, and the number of trained tokens of all replicas' together."""
        batches: list[TrainBatch] = []
        error: DataError | None = None
        try:
            with self._stragglers.own_time.reading():
                batches = [] if self.loader is None else self.loader.next_step()
        except DataError as caught:
            error = caught
        skipped, cut = ((0, 0), (0, 0)) if self.loader is None else (self.loader.skipped, self.loader.cut)
        trained = sum(batch.num_trained_tokens for batch in batches)
        own = torch.tensor([trained, int(error is not None), *skipped, *cut])
        total, failures, *counts = sum_across(own.to(self.topology.device)).tolist()
        if failures:
            raise_together(error)
        self._note_skipped(*counts[:2])
        self._note_cut(*counts[2:])
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

    def _note_cut(self, conversations: int, tokens: int) -> None:
        """Keep how many conversations the run has cut, and say so when it has cut the first ones."""
        if conversations and not self.counters.cut_conversations:
            self.console.line(
                f"step {self.counters.step + 1} is the first with conversations that are longer than a row "
                f"(model.seq_length={self.config.model.seq_length}), whose ends are left out; metrics.jsonl counts "
                "them (cut_conversations, cut_tokens)"
            )
        self.counters.cut_conversations = conversations
        self.counters.cut_tokens = tokens

    def _epoch(self) -> int:
        """How often the stream that is furthest has begun its data anew."""
        own = 0 if self.loader is None else self.loader.epoch
        return int(max_across(torch.tensor(own, device=self.topology.device)))

    def _share(self, batches: list[TrainBatch]) -> list[TrainBatch]:
        return share_batches(batches, self.config, self.topology)

    def _forward_backward(
        self, step: int, batches: list[TrainBatch], plan: PassPlan, num_tokens: int
    ) -> tuple[list[float], list[float]]:
        """All passes of a step; returns what `_mean_losses` does."""
        activity.begin(f"step {step}, forward and backward")
        losses = forward_backward(
            self.model,
            batches,
            plan,
            num_tokens=num_tokens,
            z_loss=self.z_loss(step),
            noise=self.noise,
            topology=self.topology,
            timed=self._stragglers.own_time.computing,
        )
        return self._mean_losses(losses, num_tokens)

    def _mean_losses(self, losses: StepLosses, num_tokens: int) -> tuple[list[float], list[float]]:
        """Cross entropy and squared log-partition function of each pass, per trained token of the global batch."""
        sums = sum_across(torch.stack([losses.cross_entropy, losses.z_sum]), group=self.topology.pg.dp)
        cross_entropy, z_mean = (sums / num_tokens).tolist()
        return cross_entropy, z_mean

    def _update(self, settings: StepSettings, means: tuple[list[float], list[float]]) -> tuple[StepResult, list[str]]:
        """Apply the gradients, unless they are not to be; with what of the step is a spike."""
        policy = self.config.resilience.spikes
        spikes: list[str] = []

        def refuses(norm: float) -> bool:
            spikes.extend(self.spikes.judge(means[0], norm, device=self.topology.device))
            return bool(spikes) and policy == "skip"

        return self.engine.step(settings, refuses=None if policy == "ignore" else refuses), spikes

    def _advance(
        self, step: int, result: StepResult, batches: list[TrainBatch], *, is_spike: bool, is_untrained: bool
    ) -> None:
        counters = self.counters
        counters.step = step
        counters.tokens += self._step_tokens
        counters.skipped_steps += int(result.skipped)
        counters.spikes += int(is_spike)
        if result.skipped and not counters.consecutive_skips:
            counters.first_skipped_cycle, _ = self._cycles(batches)
        counters.consecutive_skips = counters.consecutive_skips + 1 if result.skipped else 0
        counters.consecutive_untrained = counters.consecutive_untrained + 1 if is_untrained else 0
        self._next_cycle = self._cycles(batches)[1]

    @property
    def _step_tokens(self) -> int:
        return self.config.train.global_batch_size * self.config.model.seq_length

    def _step_record(
        self,
        plan: PassPlan,
        num_tokens: int,
        means: tuple[list[float], list[float]],
        settings: StepSettings,
        result: StepResult,
        *,
        is_spike: bool,
    ) -> StepRecord:
        cross_entropy, z_mean = means
        is_chat = self.config.data.kind == "chat"
        times = self._stragglers.end_step(epoch=0 if self.loader is None else self.loader.epoch)
        return StepRecord(
            step=self.counters.step,
            tokens=self.counters.tokens,
            trained_tokens=num_tokens,
            passes=plan.num_passes,
            loss=sum(weight * loss for weight, loss in zip(plan.weights, cross_entropy, strict=True)),
            losses=tuple(cross_entropy),
            z_loss=self.z_loss(self.counters.step) * sum(w * z for w, z in zip(plan.weights, z_mean, strict=True)),
            grad_norm=result.grad_norm,
            lr_normuon=settings.lr_normuon,
            lr_adam=settings.lr_adam,
            weight_decay=settings.weight_decay_normuon,
            skipped_steps=self.counters.skipped_steps,
            spikes=self.counters.spikes,
            rewinds=self.counters.rewinds,
            epoch=times.epoch,
            skipped_documents=self.counters.skipped_documents,
            starts=self.starts.starts,
            restarts=self.starts.restarts,
            step_seconds=self._timer.lap(),
            step_tokens=self._step_tokens,
            data_seconds=times.data_seconds,
            slowest_rank=times.slowest_rank,
            slowest_rank_ratio=times.slowest_rank_ratio,
            cut_conversations=self.counters.cut_conversations if is_chat else None,
            cut_tokens=self.counters.cut_tokens if is_chat else None,
            skipped=result.skipped,
            spike=is_spike,
        )
