"""Continue prompts with a trained model, in one of the three decode modes or in all of them side by side.

Examples:
  python tools/generate.py runs/quickstart --prompt "def main(" --compare
  python tools/generate.py exported --prompts prompts.jsonl --mode soft --temperature 0.8 --top-p 0.95 --json
  python tools/generate.py runs/fbt_1b/checkpoints/step_00050000 --interactive --mode fused --prefill-passes 3
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fbt_megatron.errors import DataError, DecodeError, FBTError, report
from fbt_megatron.inference.decoder import MODES, DecodeMode, Decoder
from fbt_megatron.inference.generation import Completion, Generator, Request
from fbt_megatron.inference.sampling import Sampling
from fbt_megatron.inference.source import LoadedModel, find_device, load_model

_COLUMN_GAP = " | "


@dataclass(frozen=True)
class Prompt:
    """What was asked, and its ids."""

    text: str
    ids: tuple[int, ...]


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    arguments = _parse_arguments(argv)
    try:
        return run(arguments)
    except FBTError as error:
        return report(error)
    except KeyboardInterrupt:
        print()
        return 128 + signal.SIGINT


def run(arguments: argparse.Namespace) -> int:
    """Load the model and do what was asked; raises FBTError."""
    modes = _modes(arguments)
    settings = _request(arguments, ())  # a wrong setting is said before the weights are read
    device = find_device(arguments.device)
    texts = [] if arguments.interactive or arguments.chat else list(_read_prompts(arguments))
    loaded = load_model(
        arguments.model,
        dtype=arguments.dtype,
        device=device,
        tokenizer=arguments.tokenizer,
        log=partial(print, file=sys.stderr),
    )
    own_eos_ids = frozenset() if arguments.ignore_eos else loaded.eos_ids
    settings = replace(settings, eos_ids=own_eos_ids | frozenset(arguments.eos_id))
    generators = {
        mode: Generator(Decoder(loaded.model, mode), tokenizer=loaded, num_ids=loaded.num_ids) for mode in modes
    }
    if arguments.interactive or arguments.chat:
        talk(loaded, generators, settings, chat=arguments.chat)
        return 0
    prompts = [Prompt(text, tuple(loaded.encode(text))) for text in texts]
    if arguments.json or arguments.compare or len(prompts) > 1:
        _print_all(prompts, generators, settings, arguments)
    else:
        print(prompts[0].text, end="", flush=True)
        _print_stream(generators[modes[0]], replace(settings, prompt=prompts[0].ids))
    return 0


def talk(loaded: LoadedModel, generators: dict[DecodeMode, Generator], settings: Request, *, chat: bool) -> None:
    """Continue each line from the terminal until end of file; with `chat`, the conversation so far is the prompt.

    A line that the model cannot take is said, and left out of the conversation.
    """
    template = loaded.conversations if chat else None  # one that is missing is said before the first line
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not line.strip():
            continue
        said = [*messages, {"role": "user", "content": line}]
        try:
            ids = tuple(loaded.encode_chat(said) if template else loaded.encode(line))
            answers = [_answer(mode, generators, replace(settings, prompt=ids)) for mode in generators]
        except (DataError, DecodeError) as error:  # the next line may fit
            report(error)
            continue
        if chat:
            messages = [*said, {"role": "assistant", "content": answers[0]}]


def _answer(mode: DecodeMode, generators: dict[DecodeMode, Generator], request: Request) -> str:
    if len(generators) > 1:
        print(f"[{_title(mode)}] ", end="")
    return _print_stream(generators[mode], request)


def side_by_side(texts: dict[str, str], *, width: int) -> str:
    """Columns with a title each, lines cut to `width` characters in all."""
    column = max(8, (width - len(_COLUMN_GAP) * (len(texts) - 1)) // len(texts))
    cells = [[title, "-" * column, *_wrapped(text, column)] for title, text in texts.items()]
    height = max(map(len, cells))
    rows = zip(*(lines + [""] * (height - len(lines)) for lines in cells), strict=True)
    return "\n".join(_COLUMN_GAP.join(line.ljust(column) for line in row).rstrip() for row in rows)


def _wrapped(text: str, width: int) -> Iterator[str]:
    for line in text.expandtabs(4).split("\n"):
        yield line[:width]
        yield from (line[start : start + width] for start in range(width, len(line), width))


def _print_stream(generator: Generator, request: Request) -> str:
    """Print a completion while it comes; gives its text."""
    pieces = []
    for token in generator.stream([request]):
        print(token.text, end="", flush=True)
        pieces.append(token.text)
    print()
    return "".join(pieces)


def _print_all(
    prompts: Sequence[Prompt], generators: dict[DecodeMode, Generator], settings: Request, arguments: argparse.Namespace
) -> None:
    """Every prompt in every mode; the draws of prompt n start from the seed plus n."""
    seeds = [settings.sampling.seed + number for number in range(len(prompts))]
    requests = [
        replace(settings, prompt=prompt.ids, sampling=replace(settings.sampling, seed=seed))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    for first in range(0, len(requests), arguments.batch_size):
        batch = requests[first : first + arguments.batch_size]
        done = {mode: generator.generate(batch, batch_size=len(batch)) for mode, generator in generators.items()}
        for index in range(len(batch)):
            number = first + index
            found = {mode: completions[index] for mode, completions in done.items()}
            if arguments.json:
                for mode, completion in found.items():
                    print(json.dumps(_as_json(prompts[number].text, mode, completion, seeds[number])), flush=True)
            else:
                _print_texts(prompts[number], number, found, alone=len(prompts) == 1)


def _print_texts(prompt: Prompt, number: int, found: dict[DecodeMode, Completion], *, alone: bool) -> None:
    if not alone:
        print(f"=== prompt {number + 1}")
    if len(found) == 1:
        print(prompt.text + next(iter(found.values())).text)
        return
    columns = shutil.get_terminal_size((120, 24)).columns
    print(prompt.text)
    print(side_by_side({_title(mode): completion.text for mode, completion in found.items()}, width=columns))


def _as_json(prompt: str, mode: DecodeMode, completion: Completion, seed: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "mode": mode.name,
        "prefill_passes": mode.prefill_passes,
        "seed": seed,
        "text": completion.text,
        "finish": completion.finish,
        "tokens": list(completion.tokens),
        "logprobs": list(completion.logprobs),
    }


def _title(mode: DecodeMode) -> str:
    return f"{mode.name}, {mode.prefill_passes} passes" if mode.prefill_passes > 1 else mode.name


def _modes(arguments: argparse.Namespace) -> list[DecodeMode]:
    if not arguments.compare:
        return [DecodeMode.of(arguments.mode or "standard", prefill_passes=arguments.prefill_passes)]
    return [DecodeMode.of(name, prefill_passes=arguments.prefill_passes if name == "fused" else None) for name in MODES]


def _request(arguments: argparse.Namespace, prompt: tuple[int, ...]) -> Request:
    sampling = Sampling(
        repetition_penalty=arguments.repetition_penalty,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
    )
    return Request(prompt, arguments.max_tokens, sampling, stop=tuple(arguments.stop))


def _read_prompts(arguments: argparse.Namespace) -> Iterator[str]:
    """Texts of `--prompt` and `--prompts`; raises DecodeError for a file that cannot be read."""
    for prompt in arguments.prompt:
        yield sys.stdin.read() if prompt == "-" else prompt
    if arguments.prompts is None:
        return
    try:
        lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DecodeError(f"--prompts {arguments.prompts}: cannot be read ({error}).") from None
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise DecodeError(f"--prompts {arguments.prompts}: holds no prompt. Give a line for each.")
    for number, line in filled:
        where = f"--prompts {arguments.prompts}, line {number}"
        yield _prompt_of_json(line, where) if arguments.prompts.suffix == ".jsonl" else line


def _prompt_of_json(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DecodeError(f"{where}: not JSON ({error}). Write a string, or an object with prompt.") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise DecodeError(f"{where}: holds neither a string nor an object with a string prompt.")
    return prompt


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="run directory, step_* folder, or exported folder")
    _add_sources(parser.add_argument_group("what to continue (one of these)"))
    _add_modes(parser.add_argument_group("mode"))
    _add_sampling(parser.add_argument_group("tokens"))
    other = parser.add_argument_group("other")
    other.add_argument("--batch-size", type=int, default=16, help="prompts computed together (%(default)s)")
    other.add_argument("--json", action="store_true", help="print one JSON object for each prompt and mode")
    other.add_argument("--tokenizer", help="folder, tokenizer.json or bytes, in place of the model's own")
    other.add_argument("--dtype", choices=("float32", "bfloat16"), help="type to compute in (float32 on a CPU)")
    other.add_argument("--device", help="device of PyTorch, e.g. cpu or cuda:1 (a GPU where there is one)")
    arguments = parser.parse_args(argv)
    sources = [bool(arguments.prompt), arguments.prompts is not None, arguments.interactive, arguments.chat]
    if sum(sources) != 1:
        parser.error("give one of --prompt (repeatable), --prompts, --interactive and --chat")
    if (arguments.interactive or arguments.chat) and arguments.json:
        parser.error("--json goes with --prompt and --prompts")
    if arguments.chat and arguments.compare:
        parser.error("--chat has one answer to go on from: choose a --mode in place of --compare")
    if arguments.compare and arguments.mode:
        parser.error("--compare runs all modes: leave --mode out")
    if arguments.batch_size < 1:
        parser.error("--batch-size must be at least 1")
    return arguments


def _add_sources(group: Any) -> None:
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text (repeatable; -: stdin)")
    group.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a prompt per line; .jsonl: strings, or objects with prompt"
    )
    group.add_argument("--interactive", action="store_true", help="continue each line that is typed")
    group.add_argument("--chat", action="store_true", help="answer each line, with the model's chat template")


def _add_modes(group: Any) -> None:
    group.add_argument("--mode", choices=MODES, help="standard (the default), soft or fused: docs/decoding.md")
    group.add_argument("--prefill-passes", type=int, metavar="N", help="with fused: passes over the prompt (2)")
    group.add_argument("--compare", action="store_true", help="all three modes side by side")


def _add_sampling(group: Any) -> None:
    add = group.add_argument
    add("--max-tokens", type=int, default=128, help="longest continuation (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0: always the most likely token (%(default)s)")
    add("--top-k", type=int, help="draw from the k most likely tokens")
    add("--top-p", type=float, default=1.0, help="draw from the fewest that reach this probability")
    add("--min-p", type=float, default=0.0, help="draw from those at least so likely as this share of the likeliest")
    add("--repetition-penalty", type=float, default=1.0, help="divide logits of tokens that have occurred")
    add("--seed", type=int, default=0, help="of the first prompt's draws; the next one has the next number")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    add("--eos-id", type=int, action="append", default=[], metavar="ID", help="end at this id as well (repeatable)")
    add("--ignore-eos", action="store_true", help="do not end at the end-of-text ids of the model")


if __name__ == "__main__":
    sys.exit(main())
