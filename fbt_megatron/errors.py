"""The exceptions a user can meet.

Entry points print the message of an `FBTError` alone, without a stack trace, and exit with its `exit_status`.
Anything else that escapes is a fault of this project and keeps its trace.
"""

from __future__ import annotations

import sys


def report(error: FBTError) -> int:
    """Print an error without a stack trace, for the tools; returns the exit status."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return error.exit_status


class FBTError(Exception):
    """A user's mistake, or a condition outside this project; the message says which key, value, rule and what to do."""

    exit_status = 1


class ConfigError(FBTError):
    """The configuration is wrong; the message lists every problem found."""

    exit_status = 2

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in {source}", *(f"  {problem}" for problem in problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, list[str]]]:
        return type(self), (self.source, self.problems)  # an exception is otherwise rebuilt from its message alone


class TopologyError(FBTError):
    """The processes that were started do not fit the configured layout."""

    exit_status = 2


class SubmissionError(FBTError):
    """SLURM does not take the job."""

    exit_status = 2


class RunDirError(FBTError):
    """The run directory, or something in it, cannot be written."""

    exit_status = 2


class DataError(FBTError):
    """A data set is missing, damaged, or does not fit the model."""

    exit_status = 3


class DataSetupError(DataError):
    """Data cannot be read because of a setting or a limit of this process: passing over it would be no way out."""


class CheckpointError(FBTError):
    """A checkpoint cannot be written, or none that was found can be loaded."""

    exit_status = 4


class DecodeError(FBTError):
    """A prompt, or what was asked for beside it, does not fit the model that is to continue it."""

    exit_status = 2


class EvaluationError(FBTError):
    """What is to be evaluated, or how, cannot be done with what is at hand."""

    exit_status = 2


class NonFiniteError(FBTError):
    """Too many optimizer steps in a row had a gradient that is not finite, or were spikes."""

    exit_status = 5


class HangError(FBTError):
    """The run stands still: a rank has made no progress for `resilience.hang_timeout_seconds`."""

    exit_status = 6


class PeerError(FBTError):
    """Another rank has failed on its own, is gone, or never came."""

    exit_status = 7
