"""lm-evaluation-harness on local tasks: what it reports is what the equations give, in every mode."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fbt_megatron.errors import DecodeError, EvaluationError
from fbt_megatron.evaluation import harness
from fbt_megatron.inference.decoder import DecodeMode
from fbt_megatron.inference.source import load_model
from tests.evaluation.trained_run import Trained
from tests.inference.toy import reference_logits
from tests.model.reference import Row, row_losses

pytest.importorskip("lm_eval", reason="requirements-eval.txt is not installed")

QUESTIONS = [
    {"context": "2+2", "choices": ["=4", "=5", " is"], "answer": 0},
    {"context": "a long question", "choices": ["yes", "n"], "answer": 1},
    {"context": "", "choices": ["ab", "b", "xyz"], "answer": 2},
    {"context": "ends with a  ", "choices": ["b", "c"], "answer": 0},
]
TEXTS = ["short", "longer than one row", "", "sixteen letters."]
PROMPTS = ["def f", "x", "does not fit in", "\N{GREEK SMALL LETTER ALPHA}"]
MAX_TOKENS, STOP = 4, "\x1f"
TASKS = {
    "fbt_choice": """
        output_type: multiple_choice
        doc_to_text: "{{context}}"
        doc_to_choice: choices
        doc_to_target: answer
        target_delimiter: ""
        metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
    """,
    "fbt_rolling": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: bits_per_byte}]
    """,
    "fbt_generate": """
        output_type: generate_until
        doc_to_text: "{{prompt}}"
        doc_to_target: "{{answer}}"
        generation_kwargs: {until: ["\\x1f"], max_gen_toks: 4, do_sample: false}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
    """,
}
MODES = {
    "mode=standard": DecodeMode("standard", 1),
    "mode=soft": DecodeMode("soft", 1),
    "mode=fused": DecodeMode("fused", 2),
    "mode=fused,prefill_passes=3": DecodeMode("fused", 3),
}


class Reference:
    """The trained model by the equations, in fp64, without the product's decoder."""

    def __init__(self, trained: Trained, mode: DecodeMode) -> None:
        loaded = load_model(trained.run)
        assert loaded.config is not None
        self.config, self.mode = loaded.config, mode
        self.weights = {name: tensor.double() for name, tensor in loaded.model._targets().items()}
        self.seq_length = loaded.model.config.seq_length

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        context = context[-(self.seq_length + 1 - len(continuation)) :]
        if self.mode.name == "soft":
            logits = reference_logits(self.config, self.weights, self.mode, context, continuation[:-1])
        else:
            tokens = [*context, *continuation]
            row = Row(tokens, [0] * len(tokens), [-100] * len(tokens))
            passes = row_losses(row, self.weights, self.config.model, num_passes=self.mode.prefill_passes)
            logits = passes[-1][2][len(context) - 1 : -1]
        chosen = logits.log_softmax(-1)[torch.arange(len(continuation)), torch.tensor(continuation)]
        return float(chosen.sum()), logits.argmax(-1).tolist() == continuation

    def continued(self, prompt: list[int]) -> str:
        prompt = prompt[-(self.seq_length + 1 - MAX_TOKENS) :]
        given: list[int] = []
        while len(given) < MAX_TOKENS:
            token = int(reference_logits(self.config, self.weights, self.mode, prompt, given)[-1].argmax())
            if token in (256, ord(STOP)):
                break
            given.append(token)
        return bytes(given).decode(errors="replace")


@pytest.fixture(autouse=True, scope="module")
def scanned_once() -> Iterator[None]:
    """The harness reads its own thousands of task files at every start; here once.

    It also logs to what is standard error when it first starts, for which no test's own will do: that is closed.
    """
    from lm_eval.tasks.manager import TaskIndex
    from lm_eval.utils import setup_logging

    setup_logging()
    build, known = TaskIndex.build, {}

    def remembered(paths: list[Path]) -> dict[str, Any]:
        if tuple(paths) not in known:
            known[tuple(paths)] = build(paths)
        return dict(known[tuple(paths)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIndex, "build", staticmethod(remembered))
        yield


def write_tasks(folder: Path, prompts: list[dict[str, str]]) -> list[Path]:
    documents = {"fbt_choice": QUESTIONS, "fbt_rolling": [{"text": text} for text in TEXTS], "fbt_generate": prompts}
    paths = []
    for name, body in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        head = f"""
        task: {name}
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {data}}}}}
        test_split: test
        num_fewshot: 0"""
        path = folder / f"{name}.yaml"
        lines = (head + body).strip("\n").splitlines()
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
        paths.append(path)
    return paths


def samples_of(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"**/samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize("mode", MODES)
def test_what_the_harness_reports_is_what_the_equations_give(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Choices, whole texts and continuations; texts that do not fit, are empty, or end in spaces."""
    reference = Reference(trained, MODES[mode])
    continued = [reference.continued(list(prompt.encode())) for prompt in PROMPTS]
    answers = [continued[0], "something else", continued[2], continued[3]]
    tasks = write_tasks(tmp_path, [{"prompt": p, "answer": a} for p, a in zip(PROMPTS, answers, strict=True)])
    command = [
        "harness", "--model", "fbt", "--model_args", f"pretrained={trained.run},{mode}", "--tasks",
        ",".join(map(str, tasks)), "--batch_size", "3", "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.delitem(sys.modules, "fbt_megatron.evaluation.harness")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("fbt_megatron.evaluation.harness", run_name="__main__")
    assert end.value.code == 0

    (path,) = (tmp_path / "out").glob("**/results_*.json")
    results = json.loads(path.read_text())
    assert results["config"]["mode"] == MODES[mode].name
    assert results["config"]["prefill_passes"] == MODES[mode].prefill_passes
    check_choices(reference, samples_of(tmp_path, "fbt_choice"), results["results"]["fbt_choice"])
    check_texts(reference, samples_of(tmp_path, "fbt_rolling"), results["results"]["fbt_rolling"])
    generated = [sample["resps"][0][0] for sample in samples_of(tmp_path, "fbt_generate")]
    assert generated == continued
    right = sum(found.strip() == answer.strip() for found, answer in zip(continued, answers, strict=True))
    assert results["results"]["fbt_generate"]["exact_match,none"] == pytest.approx(right / 4)


def check_choices(reference: Reference, samples: list[dict[str, Any]], result: dict[str, Any]) -> None:
    right = 0
    for sample, question in zip(samples, QUESTIONS, strict=True):
        context = question["context"].rstrip(" ")
        moved = question["context"][len(context) :]
        start = list(context.encode()) or [256]
        scores = [reference.score(start, list((moved + choice).encode())) for choice in question["choices"]]
        for (total, greedy), found in zip(scores, sample["filtered_resps"], strict=True):
            assert float(found[0]) == pytest.approx(total, rel=1e-5)
            assert str(found[1]) == str(greedy)
        best = max(range(len(scores)), key=lambda number: scores[number][0])
        right += best == question["answer"]
    assert result["acc,none"] == pytest.approx(right / len(QUESTIONS))


def check_texts(reference: Reference, samples: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """Windows of 16 tokens after the end of a text, each with the last token of the one before; the last one is filled
    up with context."""
    totals = []
    for sample, text in zip(samples, TEXTS, strict=True):
        tokens, total = [256, *text.encode()], 0.0
        for start in range(0, len(tokens) - 1, 16):
            end = min(start + 17, len(tokens))
            total += reference.score(tokens[max(0, end - 17) : start + 1], tokens[start + 1 : end])[0]
        assert float(sample["filtered_resps"][0]) == pytest.approx(total, rel=1e-5)
        totals.append(total)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    bits = -sum(totals) / torch.log(torch.tensor(2.0)).item() / num_bytes
    assert result["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


def test_chat_templates_and_sampling(trained: Trained, tmp_path: Path) -> None:
    """Special tokens of a template are tokens; draws differ with text, seed and repetition, and come again."""
    from fbt_megatron.evaluation.harness_model import FBTHarnessModel

    for path in trained.exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = (
        "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    model = FBTHarnessModel(str(tmp_path))
    with pytest.raises(DecodeError, match="has no chat template"):
        model.chat_template(True)
    (tmp_path / "chat_template.jinja").write_text(template)
    model = FBTHarnessModel(str(tmp_path), batch_size=2)
    drawn = [request("ab", do_sample=True, temperature=0.9, top_k=100, max_gen_toks=5) for _ in range(3)]
    texts = model.generate_until(drawn, disable_tqdm=True)
    assert len(set(texts)) == 3
    others = [request("b", do_sample=True, temperature=0.9, top_k=100, max_gen_toks=5)]
    assert model.generate_until([drawn[0], *others, *drawn[1:]], disable_tqdm=True)[::2] == [texts[0], texts[1]]
    again = FBTHarnessModel(str(tmp_path), seed=1).generate_until(drawn, disable_tqdm=True)
    assert len({*again, *texts}) == 6

    assert model.tok_encode("a<|endoftext|>") == list(b"a<|endoftext|>")
    assert model.chat_template(True) == template
    text = model.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "hi<|endoftext|>:"
    assert model.tok_encode(text) == [*b"hi", 256, ord(":")]


def request(context: str, **settings: Any) -> Any:
    return SimpleNamespace(args=(context, settings))


def test_requests_that_cannot_be_met(trained: Trained) -> None:
    from fbt_megatron.evaluation.harness_model import FBTHarnessModel

    model = FBTHarnessModel(str(trained.run), mode="soft", batch_size="4")
    for settings, expected in [
        ({"num_beams": 4}, "generation_kwargs: num_beams: not known"),
        ({"max_gen_toks": 17}, "max_gen_toks=17: the model was trained on rows of 16"),
        ({}, "max_gen_toks=256"),
    ]:
        with pytest.raises(EvaluationError, match=expected):
            model.generate_until([request("a", **settings)])
    for name in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
        with pytest.raises(EvaluationError, match="max_gen_toks=18: the model"):
            model.generate_until([request("a", **{name: 18})])
    with pytest.raises(EvaluationError, match="a continuation has 17 tokens"):
        model.loglikelihood([SimpleNamespace(args=("a", "b" * 17))])
    with pytest.raises(EvaluationError, match="batch_size=auto: must be a number"):
        FBTHarnessModel(str(trained.run), batch_size="auto")


@pytest.mark.parametrize(
    ("model_args", "status", "expected"),
    [
        ("pretrained=missing", 4, "CheckpointError: "),
        ("pretrained={run},mode=sof", 2, "DecodeError: mode=sof: must be one of"),
        ("pretrained={run},prefill_passes=2", 2, "mode standard takes one pass"),
        ("pretrained={run},mdoe=soft", 2, "--model_args: mdoe: not known to the model class `fbt`, which takes"),
        ("mode=soft", 2, "name the model with pretrained=PATH"),
        ("pretrained={run},batch_size=0", 2, "batch_size=0: must be a number of at least 1"),
        ("pretrained={run},dtype=auto", 2, "DecodeError: dtype=auto: must be one of float32, bfloat16."),
        ("pretrained={run},dtype=float16", 2, "DecodeError: dtype=float16: must be one of float32, bfloat16."),
        ("pretrained={run},device=foo", 2, "DecodeError: --device foo: PyTorch cannot compute there"),
        ("pretrained={run},device=cuda:99", 2, "DecodeError: --device cuda:99: PyTorch cannot compute there"),
        ("pretrained={run},device=0", 2, "DecodeError: --device 0: PyTorch cannot compute there"),
        ("pretrained={run},mode=fused,prefill_passes=two", 2, "prefill_passes=two: must be a number of at least 1"),
        ("pretrained={run},prefill_passes=true", 2, "prefill_passes=True: must be a number of at least 1"),
        ("pretrained={run},seed=x", 2, "seed=x: must be a number, without a fraction"),
        ("pretrained={run},seed=1.5", 2, "seed=1.5: must be a number, without a fraction"),
        ("pretrained={run},max_gen_toks=none", 2, "max_gen_toks=none: must be a number of at least 1"),
    ],
)
def test_mistakes_end_in_one_line(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_args: str, status: int, expected: str
) -> None:
    task = write_tasks(tmp_path, [])[0]
    arguments = ["--model", "fbt", "--model_args", model_args.format(run=trained.run), "--tasks", str(task)]
    assert harness.main(arguments) == status
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error


def test_another_harness_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(harness, "VERSION", "0.0.1")
    assert harness.main(["--help"]) == 2
    assert "the model class `fbt` is written for 0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "2"}, "TopologyError: The environment has WORLD_SIZE but not RANK"),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "EvaluationError: torchrun started 2 processes: every process would compute the same",
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0",
             "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1"},
            "EvaluationError: srun started 8 processes: every process would compute the same",
        ),
    ],
    ids=["half of torchrun", "torchrun", "srun"],
)  # fmt: skip
def test_several_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    expected: str,
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert harness.main(["--help"]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
