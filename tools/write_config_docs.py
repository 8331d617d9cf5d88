"""Write the page of all keys of a training, or of a launch file, from its dataclasses and the text under their fields.

Examples:
  python tools/write_config_docs.py docs/configuration.md
  python tools/write_config_docs.py docs/slurm_configuration.md --launch --check
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.config.typed_values import describe_type, field_types, field_values, is_section
from fbt_megatron.config.yaml_text import show_value
from fbt_megatron.launch.schema import LaunchConfig

_HEADER = """\
# Configuration

<!-- Written by tools/write_config_docs.py from fbt_megatron/config/schema.py. Change the text there. -->

A configuration file is YAML with the sections below. A key that is absent has its default; an unknown key is an error.
Any key can be set on the command line after the file: `--config configs/quickstart.yaml train.steps=50
optimizer.normuon.lr=0.02`. The value is read as YAML (`true`, `0.02`, `null`, `[a, b]`).
"""

_LAUNCH_HEADER = """\
# Launch files for SLURM

<!-- Written by tools/write_config_docs.py from fbt_megatron/launch/schema.py. Change the text there. -->

What `tools/launch_slurm.py` reads: YAML with the sections below. A key that is absent has its default; an unknown key
is an error. Any key can be set on the command line after the file. How to use it: [slurm.md](slurm.md).
"""


def main(argv: list[str] | None = None) -> int:
    """Run the tool with `argv` (default: the process's arguments); returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    parser.add_argument("--launch", action="store_true", help="the keys of a launch file, not of a training")
    arguments = parser.parse_args(argv)
    text = render_launch() if arguments.launch else render()
    if not arguments.check:
        arguments.path.write_text(text, encoding="utf-8")
        return 0
    if arguments.path.is_file() and arguments.path.read_text(encoding="utf-8") == text:
        return 0
    option = " --launch" if arguments.launch else ""
    print(f"{arguments.path} is out of date: run {parser.prog} {arguments.path}{option}", file=sys.stderr)
    return 1


def render() -> str:
    """The page of a training's keys as Markdown."""
    return _render_page(RunConfig, _HEADER)


def render_launch() -> str:
    """The page of a launch file's keys as Markdown."""
    return _render_page(LaunchConfig, _LAUNCH_HEADER)


def _render_page(root: type, header: str) -> str:
    parts = [header]
    for name, section in field_types(root).items():
        parts += _render_section(section, key=name)
    return "\n".join(parts)


def _render_section(section: type, *, key: str) -> Iterator[str]:
    """A table of the section's own keys, then the sections inside it and the dataclasses in its lists."""
    hints, docs, defaults = field_types(section), field_docs(section), field_values(section())
    yield f"## `{key}`\n\n{inspect.getdoc(section)}\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    for name, annotation in hints.items():
        if not is_section(annotation):
            default = "" if _entry_section(annotation) else f"`{show_value(defaults[name])}`"
            yield (
                "| " + " | ".join(_cell(text) for text in (f"`{name}`", _type(annotation), default, docs[name])) + " |"
            )
    yield ""
    for name, annotation in hints.items():
        inner = annotation if is_section(annotation) else _entry_section(annotation)
        if inner is not None:
            yield from _render_section(inner, key=f"{key}.{name}" + ("" if inner is annotation else "[]"))


def field_docs(section: type) -> dict[str, str]:
    """Field name -> the string literal under the field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            docs[field.target.id.removesuffix("_")] = " ".join(ast.literal_eval(below.value).split())
    return docs


def _type(annotation: Any) -> str:
    inner = _entry_section(annotation)
    if inner is not None:
        return "a list, each entry with " + ", ".join(f"`{name}`" for name in field_types(inner))
    return describe_type(annotation)


def _entry_section(annotation: Any) -> type | None:
    """The dataclass that a list holds, if it holds one."""
    first = getattr(annotation, "__args__", (None,))[0]
    return first if is_section(first) else None


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
