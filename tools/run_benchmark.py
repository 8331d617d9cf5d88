"""Mathematics and programming problems in local JSONL files: answered in the decode modes, graded, compared.

Examples:
  python tools/run_benchmark.py runs/fbt_1b --format gsm8k --problems gsm8k_test.jsonl --shots gsm8k_train.jsonl \\
      --num-shots 8 --out results/gsm8k
  torchrun --nproc-per-node=8 tools/run_benchmark.py exported --format humaneval --problems HumanEval.jsonl \\
      --samples 20 --temperature 0.8 --top-p 0.95 --out results/humaneval
  python tools/run_benchmark.py runs/sft_1b --chat --format math --problems math500.jsonl --out results/math500
  python tools/run_benchmark.py --report results/humaneval --json

A benchmark that was interrupted goes on with the same command. Programs that the model writes are run: read
docs/evaluation.md first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fbt_megatron.errors import EvaluationError, FBTError, report
from fbt_megatron.evaluation.answers import check_math_verify
from fbt_megatron.evaluation.benchmark import Asking, answer_problems, mode_name
from fbt_megatron.evaluation.code_runner import Limits, check_isolation
from fbt_megatron.evaluation.problems import FORMATS, CodeProblem, Problem, read_problems, read_shots
from fbt_megatron.evaluation.report import BenchmarkReport, make_report, table
from fbt_megatron.evaluation.results import ResultsFolder
from fbt_megatron.files import write_durably
from fbt_megatron.inference.decoder import MODES, DecodeMode, Decoder
from fbt_megatron.inference.generation import Generator
from fbt_megatron.inference.sampling import Sampling
from fbt_megatron.inference.source import LoadedModel, load_model
from fbt_megatron.parallel.device import device_of
from fbt_megatron.parallel.launcher import Launch, find_launch

RESULTS_FILE = "results.json"


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        launch = find_launch(os.environ)
    except FBTError as error:
        return report(error)
    try:
        folder = ResultsFolder(arguments.report or arguments.out)
        if not arguments.report:
            run(arguments, folder, launch)
        if launch.world_size == 1:
            _show(_report(folder), folder, as_json=arguments.json)
        elif launch.rank == 0:
            launch.say(f"when all processes have ended: python tools/run_benchmark.py --report {folder.path}")
    except FBTError as error:
        launch.report(error)
        return error.exit_status
    except KeyboardInterrupt:
        launch.say("interrupted: the same command goes on")
        return 128 + signal.SIGINT
    return 0


def run(arguments: argparse.Namespace, folder: ResultsFolder, launch: Launch) -> None:
    """Answer this process's part of the problems; raises FBTError."""
    problems = read_problems(arguments.problems, arguments.format)[: arguments.limit]
    shots = ""
    if arguments.shots is not None:
        shots = read_shots(arguments.shots, arguments.format, arguments.num_shots, problems)
    limits = _limits(arguments)
    if isinstance(problems[0], CodeProblem):
        check_isolation(limits)
    else:
        check_math_verify()
    sampling = Sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed)
    loaded = load_model(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device or str(device_of(launch)),
        tokenizer=arguments.tokenizer,
        log=launch.say,
    )
    generators = {
        mode: Generator(Decoder(loaded.model, mode), tokenizer=loaded, num_ids=loaded.num_ids)
        for mode in _modes(arguments, loaded)
    }
    encode: Callable[[str], Sequence[int]] = loaded.encode
    if arguments.chat:
        encode = partial(_encode_question, loaded)
    asking = Asking(
        is_chat=arguments.chat,
        shots=shots,
        num_samples=arguments.samples,
        max_tokens=arguments.max_tokens or problems[0].max_tokens,
        sampling=sampling,
        eos_ids=loaded.eos_ids,
        batch_size=arguments.batch_size,
        limits=limits,
        programs_at_once=arguments.programs_at_once,
    )
    folder.claim(_settings(arguments, loaded, asking, problems, [mode_name(mode) for mode in generators]))
    total = len(range(launch.rank, len(problems) * asking.num_samples, launch.world_size)) * len(generators)
    with tqdm(total=total, unit="answers", disable=launch.rank > 0 or None, file=sys.stderr) as bar:
        answer_problems(
            problems,
            generators,
            encode,
            asking,
            folder,
            process=launch.rank,
            num_processes=launch.world_size,
            progress=bar.update,
        )


def _encode_question(loaded: LoadedModel, question: str) -> list[int]:
    return loaded.encode_chat([{"role": "user", "content": question}])


def _settings(
    arguments: argparse.Namespace, loaded: LoadedModel, asking: Asking, problems: list[Problem], modes: list[str]
) -> dict[str, Any]:
    """All that the answers depend on. Batch size and number of processes are not among it."""
    return {
        "model": str(loaded.path.resolve()),
        "weights_sha256": loaded.digest(),
        "tokenizer": loaded.tokenizer.tokenizer.fingerprint,
        "add_bos": loaded.tokenizer.add_bos,
        "eos_ids": sorted(loaded.eos_ids),
        "chat_template": loaded.conversations.template_source if asking.is_chat else None,
        "dtype": str(loaded.model.dtype),
        "format": arguments.format,
        "problems": [problem.key for problem in problems],
        "problems_sha256": hashlib.sha256(arguments.problems.read_bytes()).hexdigest(),
        "shots_sha256": hashlib.sha256(asking.shots.encode()).hexdigest(),
        "num_shots": arguments.num_shots if asking.shots else 0,
        "modes": modes,
        "num_samples": asking.num_samples,
        "max_tokens": asking.max_tokens,
        "sampling": asdict(asking.sampling),
        "limits": asdict(asking.limits),
    }


def _modes(arguments: argparse.Namespace, loaded: LoadedModel) -> list[DecodeMode]:
    names = arguments.modes or (["standard"] if loaded.model.fusion == "none" else list(MODES))
    if arguments.prefill_passes is not None and "fused" not in names:
        raise EvaluationError(f"--prefill-passes={arguments.prefill_passes}: goes with mode fused.")
    return [DecodeMode.of(name, prefill_passes=arguments.prefill_passes if name == "fused" else None) for name in names]


def _limits(arguments: argparse.Namespace) -> Limits:
    return Limits(
        cpu_seconds=arguments.cpu_seconds,
        wall_seconds=arguments.wall_seconds,
        memory_mib=arguments.memory_mib,
        namespaces=arguments.isolation == "namespaces",
    )


def _report(folder: ResultsFolder) -> tuple[BenchmarkReport, Mapping[str, Any]]:
    settings = folder.settings
    found = make_report(
        folder.answers(),
        problems=settings["problems"],
        modes=settings["modes"],
        num_samples=settings["num_samples"],
    )
    return found, settings


def _show(found: tuple[BenchmarkReport, Mapping[str, Any]], folder: ResultsFolder, *, as_json: bool) -> None:
    """Print the report, and keep it beside the answers."""
    figures, settings = found
    about = {key: value for key, value in settings.items() if key != "problems"}
    text = json.dumps({"settings": about, **asdict(figures)})
    try:
        write_durably(folder.path / RESULTS_FILE, text + "\n")
    except OSError as error:
        raise EvaluationError(f"{folder.path}: {RESULTS_FILE} cannot be written ({error}).") from None
    if as_json:
        print(text)
        return
    sampling = settings["sampling"]
    drawn = f"temperature {sampling['temperature']:g}" if sampling["temperature"] else "greedy"
    print(
        f"{settings['format']}, {settings['model']}: {settings['num_shots']} examples, {settings['num_samples']} "
        f"samples, {drawn}"
    )
    print("\n".join(table(figures)))


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, nargs="?", metavar="MODEL", help="run directory, step_* folder, or exported folder")
    add("--report", type=Path, metavar="FOLDER", help="only report what --out FOLDER has collected")
    add("--json", action="store_true", help="print the report as one JSON object")
    _add_problems(parser.add_argument_group("problems"))
    _add_answers(parser.add_argument_group("answers"))
    _add_programs(parser.add_argument_group("programs that the model has written"))
    other = parser.add_argument_group("other")
    other.add_argument("--batch-size", type=int, default=16, help="answers computed together (%(default)s)")
    other.add_argument("--tokenizer", help="folder, tokenizer.json or bytes, in place of the model's own")
    other.add_argument("--dtype", choices=("float32", "bfloat16"), help="type to compute in (float32 on a CPU)")
    other.add_argument("--device", help="device of PyTorch (a GPU for each process where there are some)")
    arguments = parser.parse_args(argv)
    needed = [arguments.model, arguments.format, arguments.problems, arguments.out]
    if arguments.report is None and not all(needed):
        parser.error("give MODEL, --format, --problems and --out, or --report FOLDER")
    if arguments.report is not None:
        given = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
        others = [_option(name) for name in given if name not in ("report", "json")]
        if others:
            parser.error(f"--report takes nothing but --json: leave {', '.join(others)} out")
    if arguments.shots is not None and arguments.chat:
        parser.error("--shots: worked examples go before texts to be continued, not before --chat's questions")
    if arguments.shots is None and arguments.num_shots is not None:
        parser.error("--num-shots needs a file of solved problems (--shots)")
    if arguments.shots is not None and arguments.num_shots is None:
        parser.error("--shots needs --num-shots")
    for name in ("limit", "num_shots", "samples", "max_tokens", "batch_size", "cpu_seconds", "wall_seconds",
                 "memory_mib", "programs_at_once"):  # fmt: skip
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"{_option(name)} must be at least 1")
    if arguments.samples > 1 and not arguments.temperature:
        parser.error("--samples: at temperature 0 all samples would be the same; set --temperature")
    return arguments


def _option(name: str) -> str:
    """An argument as it is written in a command."""
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def _add_problems(group: Any) -> None:
    group.add_argument("--format", choices=sorted(FORMATS), help="form of the problems: docs/evaluation.md")
    group.add_argument("--problems", type=Path, metavar="FILE", help="a JSON object per line")
    group.add_argument("--limit", type=int, metavar="N", help="the first N problems only")
    group.add_argument("--chat", action="store_true", help="ask with the model's chat template (fine-tuned models)")
    group.add_argument("--shots", type=Path, metavar="FILE", help="solved problems of the same form, as examples")
    group.add_argument("--num-shots", type=int, metavar="N", help="how many of them, from the first on")
    group.add_argument("--out", type=Path, metavar="FOLDER", help="where answers are collected")


def _add_answers(group: Any) -> None:
    add = group.add_argument
    split = partial(str.split, sep=",")
    add("--modes", type=split, metavar="A,B", help="of standard, soft, fused (all that the model has)")
    add("--prefill-passes", type=int, metavar="N", help="with fused: passes over the prompt (2)")
    add("--samples", type=int, default=1, metavar="N", help="answers to each problem (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0: always the most likely token (%(default)s)")
    add("--top-p", type=float, default=1.0, help="draw from the fewest that reach this probability")
    add("--seed", type=int, default=0, help="other draws for each (%(default)s)")
    add("--max-tokens", type=int, metavar="N", help="longest answer (256 for gsm8k, else 512)")


def _add_programs(group: Any) -> None:
    add = group.add_argument
    isolations = "namespaces: no network, nothing written outside; limits: time, memory and file sizes alone"
    add("--isolation", choices=("namespaces", "limits"), default="namespaces", help=f"{isolations} (%(default)s)")
    default = Limits()
    add("--cpu-seconds", type=int, default=default.cpu_seconds, help="processor time of a program (%(default)s)")
    add("--wall-seconds", type=int, default=default.wall_seconds, help="after which it is ended (%(default)s)")
    add("--memory-mib", type=int, default=default.memory_mib, help="memory of a program (%(default)s)")
    add("--programs-at-once", type=int, default=4, metavar="N", help="run beside each other (%(default)s)")


if __name__ == "__main__":
    sys.exit(main())
