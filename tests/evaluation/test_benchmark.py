"""Answers to problems: graded, collected by any number of processes, and told once each."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fbt_megatron.checkpoint.manifest import FileRecord, Manifest
from fbt_megatron.errors import EvaluationError
from fbt_megatron.evaluation.benchmark import Asking, answer_problems, draw_seed, expected_keys
from fbt_megatron.evaluation.code_runner import Limits
from fbt_megatron.evaluation.problems import Problem, read_problems
from fbt_megatron.evaluation.results import Answer, AnswerKey, ResultsFolder
from fbt_megatron.inference.decoder import DecodeMode, Decoder
from fbt_megatron.inference.generation import Completion, Generator, Request
from fbt_megatron.inference.sampling import Sampling
from fbt_megatron.inference.source import load_model
from fbt_megatron.inference.text import StopMatcher
from tests.evaluation.test_problems import HUMANEVAL, written
from tests.evaluation.trained_run import Trained
from tools import run_benchmark

pytest.importorskip("math_verify", reason="requirements-eval.txt is not installed")

MODES = [DecodeMode("standard", 1), DecodeMode("fused", 2)]
ASKING = Asking(
    is_chat=False,
    shots="",
    num_samples=2,
    max_tokens=8,
    sampling=Sampling(temperature=1.0, seed=100),
    eos_ids=frozenset({256}),
    batch_size=3,
    limits=Limits(namespaces=False),
    programs_at_once=2,
)


FIRST_SEEDS = {draw_seed(100, key, 0) for key in [*map(str, range(1, 6)), "HumanEval/0"]}


def is_first(request: Request) -> bool:
    """Whether it is for the first sample of its problem."""
    return request.sampling.seed in FIRST_SEEDS


class Scripted:
    """Stands for a model: problem n gets the answer n, which mode fused gives to the first sample alone."""

    def __init__(self, mode: DecodeMode, seq_length: int = 100) -> None:
        self.decoder = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(seq_length=seq_length)))
        self.mode = mode
        self.batches: list[int] = []

    def generate(self, requests: Sequence[Request], *, batch_size: int) -> list[Completion]:
        self.batches.append(len(requests))
        assert len(requests) <= batch_size
        return [Completion((1, 2), (0.0, 0.0), self._text(request), "eos") for request in requests]

    def _text(self, request: Request) -> str:
        number = bytes(request.prompt).decode().split()[1]
        return f"#### {number if self.mode.name == 'standard' or is_first(request) else 'x'}"


def numbered(path: Path, count: int = 5) -> list[Problem]:
    return read_problems(written(path, *({"question": f"{n} ?", "answer": f"#### {n}"} for n in range(count))), "gsm8k")


def encode(text: str) -> list[int]:
    return list(text.encode())


def answer(problems: list[Problem], folder: ResultsFolder, generators: Any, **options: Any) -> None:
    answer_problems(problems, generators, encode, options.pop("asking", ASKING), folder, **options)


def test_every_answer_once_in_any_number_of_processes(tmp_path: Path) -> None:
    """Two of three processes, a torn line, then two processes for the rest: the same answers as from one."""
    problems = numbered(tmp_path / "problems.jsonl")
    alone, shared = ResultsFolder(tmp_path / "alone"), ResultsFolder(tmp_path / "shared")
    for folder in (alone, shared):
        folder.claim({"about": "numbers"})
    counts: list[int] = []
    answer(problems, alone, {mode: Scripted(mode) for mode in MODES}, progress=counts.append)
    assert sum(counts) == 20
    expected = alone.answers()
    assert expected.keys() == expected_keys([problem.key for problem in problems], ["standard", "fused-2"], 2)
    assert [found.correct for found in expected.values() if found.mode == "standard"] == [True] * 10
    assert [found.correct for found in expected.values() if found.mode == "fused-2"] == [True, False] * 5

    for process in (0, 2):
        answer(problems, shared, {mode: Scripted(mode) for mode in MODES}, process=process, num_processes=3)
    first = shared.path / "part_00000.jsonl"
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[:-2]) + lines[-2][:30])
    known = len(shared.answers())
    assert known == 20 - 6 - 2
    again = {mode: Scripted(mode) for mode in MODES}
    for process in (0, 1):
        answer(problems, shared, again, process=process, num_processes=2)
    assert sum(sum(generator.batches) for generator in again.values()) == 20 - known
    assert shared.answers() == expected
    lines = [line for path in shared.path.glob("part_*") for line in path.read_text().splitlines()]
    assert len(lines) == 20
    finished = {mode: Scripted(mode) for mode in MODES}
    answer(problems, shared, finished)
    assert [generator.batches for generator in finished.values()] == [[], []]


def test_each_seed_draws_other_samples(tmp_path: Path) -> None:
    """No sample of one seed is one of another, and neither --limit nor --samples changes any."""

    class Recorder(Scripted):
        def _text(self, request: Request) -> str:
            return f"#### {request.sampling.seed}"

    def drawn(name: str, problems: list[Problem], num_samples: int, seed: int) -> dict[AnswerKey, str]:
        folder = ResultsFolder(tmp_path / name)
        folder.claim({})
        asking = replace(ASKING, num_samples=num_samples, sampling=Sampling(temperature=1.0, seed=seed))
        answer(problems, folder, {MODES[0]: Recorder(MODES[0])}, asking=asking)
        return {key: found.text for key, found in folder.answers().items()}

    problems = numbered(tmp_path / "problems.jsonl")
    first, second = (drawn(f"seed {seed}", problems, 4, seed) for seed in (0, 1))
    assert len({*first.values(), *second.values()}) == 2 * 5 * 4
    fewer = drawn("fewer", problems[:2], 3, 0)
    assert fewer == {key: first[key] for key in fewer}


def test_questions_are_messages_that_end_with_their_turn(tmp_path: Path) -> None:
    """What is encoded is the question alone, and no text that a completion would be cut at ends an answer."""
    problems = numbered(tmp_path / "problems.jsonl", count=2)
    folder = ResultsFolder(tmp_path / "answers")
    folder.claim({"about": "numbers"})
    asked: list[Request] = []

    class Listening(Scripted):
        def generate(self, requests: Sequence[Request], *, batch_size: int) -> list[Completion]:
            asked.extend(requests)
            return super().generate([replace(one, prompt=tuple(b"Q: 1 ?")) for one in requests], batch_size=batch_size)

    asking = replace(ASKING, is_chat=True, shots="", num_samples=1)
    answer(problems, folder, {MODES[0]: Listening(MODES[0])}, asking=asking)
    expected = [f"{n} ?\n\nEnd with the answer as a number after ####." for n in range(2)]
    assert [bytes(request.prompt).decode() for request in asked] == expected
    assert [request.stop for request in asked] == [(), ()]
    assert [found.correct for found in folder.answers().values()] == [False, True]


def test_prompts_that_are_too_long_count_as_wrong(tmp_path: Path) -> None:
    problems, folder = numbered(tmp_path / "problems.jsonl", 3), ResultsFolder(tmp_path / "out")
    folder.claim({})
    longest = max(len(problem.prompt) for problem in problems)
    asking = replace(ASKING, shots="Question: 7 ?\nAnswer: #### 7\n\n", num_samples=1)
    answer(problems, folder, {MODES[0]: Scripted(MODES[0], seq_length=longest)}, asking=asking)
    assert {(found.finish, found.correct, found.num_tokens) for found in folder.answers().values()} == {
        ("too_long", False, 0)
    }
    assert (
        next(iter(folder.answers().values())).detail
        == f"the prompt has {longest + len(asking.shots)} tokens, more than {longest}"
    )


def test_programs_are_graded_by_their_tests(tmp_path: Path) -> None:
    class Programmer(Scripted):
        def _text(self, request: Request) -> str:
            return "    return sum(numbers)\n" if is_first(request) else "    return 0\n"

    problems = read_problems(written(tmp_path / "a.jsonl", HUMANEVAL), "humaneval")
    folder = ResultsFolder(tmp_path / "out")
    folder.claim({})
    answer(problems, folder, {MODES[0]: Programmer(MODES[0], seq_length=1000)})
    found = sorted(folder.answers().values(), key=lambda one: one.sample)
    assert [(one.correct, one.detail) for one in found] == [(True, None), (False, "AssertionError")]


def test_a_program_in_a_block_is_not_cut_by_what_ends_a_continuation(tmp_path: Path) -> None:
    class Talker(Scripted):
        def _text(self, request: Request) -> str:
            matcher = StopMatcher(request.stop, request.is_over)
            text = "Here it is:\n\n```python\ndef total(numbers):\n    return sum(numbers)\n```\nDone."
            return "".join(matcher.push(character) for character in text if not matcher.stopped) + matcher.flush()

    problems = read_problems(written(tmp_path / "a.jsonl", HUMANEVAL), "humaneval")
    folder = ResultsFolder(tmp_path / "out")
    folder.claim({})
    answer(problems, folder, {MODES[0]: Talker(MODES[0], seq_length=1000)}, asking=replace(ASKING, num_samples=1))
    (found,) = folder.answers().values()
    assert (found.correct, found.text.count("```")) == (True, 1)


def test_folders_keep_to_their_settings(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "out")
    with pytest.raises(EvaluationError, match="holds no results of a benchmark"):
        _ = folder.settings
    folder.claim({"seed": 1, "modes": ["soft"]})
    folder.claim({"seed": 1, "modes": ["soft"]})
    with pytest.raises(EvaluationError, match=r"other settings: seed was 1, is 2\. Name another folder"):
        folder.claim({"seed": 2, "modes": ["soft"]})
    assert [path.name for path in folder.path.iterdir()] == ["settings.json"]
    with folder.writer(0) as writer:
        with pytest.raises(EvaluationError, match="another process writes it"):
            folder.writer(0)
        writer.write([Answer("soft", "1", 0, "\N{LINE SEPARATOR}\n", 1, "eos", True, None)])
    assert folder.answers()[AnswerKey("soft", "1", 0)].text == "\N{LINE SEPARATOR}\n"
    (folder.path / "part_00001.jsonl").write_text("{}\n")
    with pytest.raises(EvaluationError, match="holds a line that is no answer"):
        folder.answers()
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="results cannot be written there"):
        ResultsFolder(tmp_path / "file" / "out").claim({})


def test_other_problems_are_told_by_the_first(tmp_path: Path) -> None:
    """The names of thousands of problems fit in no message."""
    folder = ResultsFolder(tmp_path / "out")
    names = [str(number) for number in range(1, 1001)]
    folder.claim({"problems": names, "modes": ["soft"]})
    for problems, expected in (
        (names[:10], "problems had 1,000 entries, has 10; number 11 was '11', is none. Name"),
        ([*names, "x"], "problems had 1,000 entries, has 1,001; number 1,001 was none, is 'x'. Name"),
        (["a", *names[1:]], "problems had 1,000 entries, has 1,000; number 1 was '1', is 'a'. Name"),
    ):
        with pytest.raises(EvaluationError, match=rf"other settings: {expected}"):
            folder.claim({"problems": problems, "modes": ["soft"]})


def test_a_disk_that_fails_is_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ResultsFolder(tmp_path / "out")
    folder.claim({})

    def without_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", without_locks)
        with pytest.raises(EvaluationError, match=r"part_00000\.jsonl: cannot be locked .*No locks available.*flock"):
            folder.writer(0)
    given = Answer("soft", "1", 0, "text", 1, "eos", True, None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = len(json.dumps(asdict(given))) + 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        told = pytest.raises(EvaluationError, match=r"answers cannot be written .*File too large.*it goes on")
        with told, folder.writer(0) as writer:
            writer.write([given])
            writer.write([replace(given, sample=1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with folder.writer(0) as writer:  # what is cut off is written anew
        writer.write([replace(given, sample=2)])
    assert [found.sample for found in folder.answers().values()] == [0, 2]

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with folder.writer(0) as writer, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(EvaluationError, match=r"answers cannot be written .*No space left"):
            writer.write([given])


@pytest.fixture(scope="module")
def reader(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with a context in which a prompt has room."""
    folder = tmp_path_factory.mktemp("reader")
    for path in trained.exported.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 200}))
    return folder


def test_the_tool_from_problems_to_the_table(
    reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers are the generator's own in each mode, in one process or in two that are started by torchrun."""
    problems = numbered(tmp_path / "problems.jsonl", 4)
    shots = written(tmp_path / "shots.jsonl", {"question": "Q?", "answer": "#### 3"})
    command = [
        str(reader), "--format", "gsm8k", "--problems", str(tmp_path / "problems.jsonl"), "--limit", "3",
        "--shots", str(shots), "--num-shots", "1", "--samples", "2", "--temperature", "1", "--max-tokens", "12",
    ]  # fmt: skip
    assert run_benchmark.main([*command, "--out", str(tmp_path / "one"), "--json", "--batch-size", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    answers = ResultsFolder(tmp_path / "one").answers()
    loaded = load_model(reader)
    for name, mode in [("standard", "standard"), ("soft", "soft"), ("fused-2", "fused")]:
        generator = Generator(Decoder(loaded.model, DecodeMode.of(mode)), tokenizer=loaded)
        for problem in problems[:3]:
            prompt = f"Question: Q?\nAnswer: #### 3\n\n{problem.prompt}"
            for sample in (0, 1):
                sampling = Sampling(temperature=1.0, seed=draw_seed(0, problem.key, sample))
                request = Request(tuple(prompt.encode()), 12, sampling, frozenset({256}), ("Question:",))
                (done,) = generator.generate([request])
                found = answers[AnswerKey(name, problem.key, sample)]
                assert (found.text, found.finish) == (done.text, done.finish)
    assert len(answers) == 3 * 3 * 2
    assert [one["mode"] for one in report["modes"]] == ["standard", "soft", "fused-2"]
    assert report == json.loads((tmp_path / "one" / "results.json").read_text())
    assert report["settings"]["num_shots"] == 1

    launched = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for rank in "01":
        for key, value in (launched | {"RANK": rank}).items():
            monkeypatch.setenv(key, value)
        assert run_benchmark.main([*command, "--out", str(tmp_path / "two")]) == 0
        assert capsys.readouterr().out == ""
    for key in (*launched, "RANK"):
        monkeypatch.delenv(key)
    assert ResultsFolder(tmp_path / "two").answers() == answers
    assert run_benchmark.main(["--report", str(tmp_path / "two")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"gsm8k, {reader}: 1 examples, 2 samples, temperature 1"
    assert lines[1] == "3 problems"
    assert len(lines) == 3 + 3 * 2 + 1 + 3


def test_another_model_under_the_same_path_is_refused(
    reader: Path, trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights, ends of text or tokenizer replaced in place: the answers that are there are not those of the model."""
    numbered(tmp_path / "problems.jsonl", 1)
    folder = tmp_path / "model"
    shutil.copytree(reader, folder)
    command = [
        str(folder), "--format", "gsm8k", "--problems", str(tmp_path / "problems.jsonl"), "--max-tokens", "2",
        "--modes", "standard", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    assert run_benchmark.main(command) == 0
    capfd.readouterr()

    def refused(*options: str) -> str:
        assert run_benchmark.main([*command, *options]) == 2
        return capfd.readouterr().err

    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 0x40]))
    assert "holds results with other settings: weights_sha256 was " in refused()
    weights.write_bytes(content)
    ends = folder / "generation_config.json"
    before = ends.read_text()
    ends.write_text(json.dumps(json.loads(before) | {"eos_token_id": [256, 10]}))
    assert "other settings: eos_ids was [256], is [10, 256]" in refused()
    ends.write_text(before)
    assert "other settings: tokenizer was " in refused("--tokenizer", "bytes")
    assert run_benchmark.main(command) == 0


def test_the_digest_is_that_of_the_weights(trained: Trained, tmp_path: Path) -> None:
    """A run that is copied elsewhere is the same model; one whose manifest names other files is not."""
    first = load_model(trained.run).digest()
    shutil.copytree(trained.run, tmp_path / "run")
    copied = load_model(tmp_path / "run")
    assert copied.digest() == first != load_model(trained.exported).digest()
    manifest = Manifest.read(copied.path)
    name = min(manifest.files)
    replace(manifest, files=manifest.files | {name: FileRecord(1, "0" * 64)}).write(copied.path)
    assert copied.digest() != first


@pytest.mark.parametrize(
    ("options", "status", "expected"),
    [
        (["--problems", "missing.jsonl"], 2, "missing.jsonl: cannot be read"),
        (["--modes", "sof"], 2, "DecodeError: mode=sof: must be one of"),
        (["--modes", "soft", "--prefill-passes", "2"], 2, "--prefill-passes=2: goes with mode fused"),
        (["--device", "cuda:99"], 2, "DecodeError: --device cuda:99: PyTorch cannot compute there"),
        (["--temperature", "-1"], 2, "DecodeError: temperature=-1.0"),
        (["--chat"], 2, "has no chat template"),
    ],
)
def test_the_tool_refuses_in_one_line(
    reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], status: int, expected: str
) -> None:
    numbered(tmp_path / "problems.jsonl")
    command = [str(reader), "--format", "gsm8k", "--problems", str(tmp_path / "problems.jsonl")]
    assert run_benchmark.main([*command, "--out", str(tmp_path / "out"), *options]) == status
    error = capfd.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model"], "give MODEL, --format, --problems and --out, or --report FOLDER"),
        (["--report", "a", "--out", "b"], "--report takes nothing but --json"),
        (["--report", "a", "model"], "--report takes nothing but --json: leave MODEL out"),
        (["--report", "a", "--modes", "soft", "--limit", "5"], "but --json: leave --limit, --modes out"),
        (["--report", "a", "--json", "--cpu-seconds", "5"], "but --json: leave --cpu-seconds out"),
        (["--report", "a", "--shots", "b", "--num-shots", "0"], "but --json: leave --shots, --num-shots out"),
        (["m", "--format", "math", "--problems", "p", "--out", "o", "--samples", "2"], "set --temperature"),
        (["m", "--format", "math", "--problems", "p", "--out", "o", "--shots", "s"], "--shots needs --num-shots"),
        (["m", "--format", "math", "--problems", "p", "--out", "o", "--limit", "0"], "--limit must be at least 1"),
        (["m", "--format", "math", "--problems", "p", "--out", "o", "--shots", "s", "--chat"], "--chat's questions"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    with pytest.raises(SystemExit) as end:
        run_benchmark.main(arguments)
    assert end.value.code == 2
    assert expected in capsys.readouterr().err
