"""Lets a model answer the problems of a benchmark in one or more decode modes, and grades the answers.

The draws of an answer depend on the seed, its problem and the number of the sample alone, and are those of the other
modes: neither batches nor the number of processes change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fbt_megatron.evaluation.code_runner import Limits, run_programs
from fbt_megatron.evaluation.problems import CodeProblem, MathProblem, Problem
from fbt_megatron.evaluation.results import Answer, AnswerKey, ResultsFolder
from fbt_megatron.inference.decoder import DecodeMode
from fbt_megatron.inference.generation import Completion, Generator, Request
from fbt_megatron.inference.sampling import Sampling
from fbt_megatron.model.seeding import derive_seed

TOO_LONG = "too_long"


@dataclass(frozen=True)
class Asking:
    """How problems are put to the model."""

    is_chat: bool
    """Whether a problem is a message that the model answers, and no text that it continues."""
    shots: str
    """Worked examples before each text."""
    num_samples: int
    max_tokens: int
    sampling: Sampling
    """Its seed is what `draw_seed` makes those of the samples of."""
    eos_ids: frozenset[int]
    batch_size: int
    limits: Limits
    """Of programs."""
    programs_at_once: int


@dataclass(frozen=True)
class _Task:
    """One answer that is wanted."""

    number: int
    """Among the samples of all problems: `problem * num_samples + sample`."""
    problem: Problem
    sample: int
    ids: tuple[int, ...]


def mode_name(mode: DecodeMode) -> str:
    """The mode as results name it."""
    return f"{mode.name}-{mode.prefill_passes}" if mode.prefill_passes > 1 else mode.name


def draw_seed(seed: int, key: str, sample: int) -> int:
    """Seed of the draws of a sample of the problem `key`: other draws for each seed, problem and sample.

    Sums of them would give two seeds the same draws with other numbers.
    """
    return derive_seed("draws", seed, key, sample)


def expected_keys(problems: Sequence[str], modes: Sequence[str], num_samples: int) -> set[AnswerKey]:
    """All answers that make the results complete."""
    return {AnswerKey(mode, key, sample) for mode in modes for key in problems for sample in range(num_samples)}


def answer_problems(
    problems: Sequence[Problem],
    generators: Mapping[DecodeMode, Generator],
    encode: Callable[[str], Sequence[int]],
    asking: Asking,
    folder: ResultsFolder,
    *,
    process: int = 0,
    num_processes: int = 1,
    progress: Callable[[int], object] = lambda count: None,
) -> None:
    """Answer what process `process` of `num_processes` has to answer and `folder` does not hold yet.

    `encode` makes ids of a text, or of a message that is to be answered. Answer n belongs to process n mod
    `num_processes`. `progress` is told how many answers have come. Raises FBTError.
    """
    tasks = [
        _Task(problem_number * asking.num_samples + sample, problem, sample, ids)
        for problem_number, problem in enumerate(problems)
        for ids in [tuple(encode(problem.question if asking.is_chat else asking.shots + problem.prompt))]
        for sample in range(asking.num_samples)
    ]
    own = [task for task in tasks if task.number % num_processes == process]
    with folder.writer(process) as writer:
        done = folder.answers()
        for mode, generator in generators.items():
            name = mode_name(mode)
            missing = [task for task in own if AnswerKey(name, task.problem.key, task.sample) not in done]
            progress(len(own) - len(missing))
            for start in range(0, len(missing), asking.batch_size):
                batch = missing[start : start + asking.batch_size]
                writer.write(_answer(batch, name, generator, asking))
                progress(len(batch))


def _answer(batch: Sequence[_Task], mode: str, generator: Generator, asking: Asking) -> list[Answer]:
    longest = generator.decoder.model.config.seq_length
    fitting = [task for task in batch if len(task.ids) <= longest]
    completions = generator.generate([_request(task, asking) for task in fitting], batch_size=asking.batch_size)
    grades = _grade([(task.problem, done.text) for task, done in zip(fitting, completions, strict=True)], asking)
    answers = [
        _as_answer(task, mode, done, *grade) for task, done, grade in zip(fitting, completions, grades, strict=True)
    ]
    return answers + [_too_long(task, mode, longest) for task in batch if len(task.ids) > longest]


def _request(task: _Task, asking: Asking) -> Request:
    return Request(
        task.ids,
        asking.max_tokens,
        replace(asking.sampling, seed=draw_seed(asking.sampling.seed, task.problem.key, task.sample)),
        eos_ids=asking.eos_ids,
        stop=() if asking.is_chat else task.problem.stop,  # an answer ends with its turn
        is_over=task.problem.is_over,
    )


def _grade(answers: Sequence[tuple[Problem, str]], asking: Asking) -> list[tuple[bool, str | None]]:
    """Whether each text is right, and what is to be known about it."""
    grades: dict[int, tuple[bool, str | None]] = {}
    programs: dict[int, str] = {}
    for number, (problem, text) in enumerate(answers):
        if isinstance(problem, MathProblem):
            grades[number] = problem.grade(text)
        else:
            assert isinstance(problem, CodeProblem)
            programs[number] = problem.program(text)
    results = run_programs(list(programs.values()), asking.limits, at_once=asking.programs_at_once)
    for number, result in zip(programs, results, strict=True):
        grades[number] = (result.passed, result.reason or None)
    return [grades[number] for number in range(len(answers))]


def _as_answer(task: _Task, mode: str, completion: Completion, correct: bool, detail: str | None) -> Answer:
    return Answer(
        mode=mode,
        problem=task.problem.key,
        sample=task.sample,
        text=completion.text,
        num_tokens=len(completion.tokens),
        finish=completion.finish,
        correct=correct,
        detail=detail,
    )


def _too_long(task: _Task, mode: str, longest: int) -> Answer:
    """A prompt that the model cannot read is a problem that it does not solve."""
    detail = f"the prompt has {len(task.ids)} tokens, more than {longest}"
    return Answer(mode, task.problem.key, task.sample, "", 0, TOO_LONG, correct=False, detail=detail)
