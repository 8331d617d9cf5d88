"""Exports: what is in the folder, the tokenizer, stock architectures, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fbt_megatron.config.loader import load_config
from fbt_megatron.config.schema import DataConfig, FeedbackConfig, SchedulePhase
from fbt_megatron.data.dataset import DocumentDataset, open_dataset
from fbt_megatron.data.format import TokenizerInfo
from fbt_megatron.data.tokenizer import Tokenizer as AnyTokenizer
from fbt_megatron.data.tokenizer import load_tokenizer
from fbt_megatron.errors import CheckpointError, ConfigError, DataError
from fbt_megatron.hf.export import export_checkpoint
from fbt_megatron.hf.importing import import_model
from fbt_megatron.hf.safetensors_files import Entry, open_tensors, write_tensors
from fbt_megatron.hf.tokenizer_files import find_tokenizer, makes_ids_of, special_ids, tokenizer_files
from fbt_megatron.model.layout import stage_layouts
from fbt_megatron.planner import logical_tensors
from tests.data.datasets import pack_ids, write_dataset, write_tar
from tests.hf.models import config_of, draw_model, random_tokens, rows_of, save_model, save_parameters, trainer_logits
from tools.convert_to_hf import main

ROOT = Path(__file__).parent.parent.parent


def saved(folder: Path, topology: Any, name: str = "windowed", **changes: Any) -> Path:
    config = config_of(name, **changes)
    return save_model(folder, draw_model(config, topology), config, topology)


def test_files_of_a_folder(topology, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", topology, vocab_size=300)
    summary = export_checkpoint(run, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        "config.json",
        "configuration_fbt.py",
        "generation_config.json",
        "model.safetensors",
        "modeling_fbt.py",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    stored = load_file(tmp_path / "out" / "model.safetensors")
    config = config_of("windowed", vocab_size=300)
    assert len(stored) == len(logical_tensors(config.model, config.feedback)) == summary.num_tensors
    assert sum(tensor.numel() for tensor in stored.values()) == summary.num_parameters
    assert stored["model.embed_tokens.weight"].shape == (300, 24)  # without the padding to 384
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{summary.num_parameters:,}" in card
    assert str(tmp_path) not in "".join(path.read_text(errors="replace") for path in (tmp_path / "out").iterdir())


def test_unusual_values_survive(topology, tmp_path: Path) -> None:
    changes = {"seq_length": 77, "num_layers": 4, "full_attention_every": 3, "tie_embeddings": False, "init_std": 0.137}
    run = saved(tmp_path / "run", topology, "unusual", vocab_size=261, **changes)
    export_checkpoint(run, tmp_path / "out", dtype="bfloat16")
    config = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    expected = {
        "vocab_size": 261,
        "rope_theta": 523.5,
        "rms_norm_eps": 3e-3,
        "max_position_embeddings": 77,
        "head_dim": 6,
        "num_key_value_heads": 1,
        "initializer_range": 0.137,
        "tie_word_embeddings": False,
        "embedding_norm": False,
        "fusion": "concat",
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "eos_token_id": 256,
        "dtype": torch.bfloat16,
    }
    assert {key: getattr(config, key) for key in expected} == expected
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (256, 256)


@pytest.mark.parametrize(("precision", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_type_is_that_of_the_run(topology, tmp_path: Path, precision: Any, expected: torch.dtype) -> None:
    config = config_of("bare")
    config = replace(config, parallel=replace(config.parallel, precision=precision))
    model = draw_model(config_of("bare"), topology)
    export_checkpoint(save_model(tmp_path / "run", model, config, topology), tmp_path / "out", tokenizer="none")
    stored = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    weight = dict(model.named_parameters())["stack.layers.0.mlp.linear_fc2.weight"]
    assert torch.equal(stored, weight.detach().to(expected))


def test_several_files_of_weights(topology, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", topology)
    export_checkpoint(run, tmp_path / "one", tokenizer="none")
    export_checkpoint(run, tmp_path / "several", tokenizer="none", max_shard_bytes=10_000)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 3
    assert all(path.stat().st_size < 11_500 for path in files)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    parts = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert whole.keys() == parts.keys() == index["weight_map"].keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    ids = torch.tensor(random_tokens(60, 9))
    logits = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True)(ids).logits
        for name in ("one", "several")
    ]
    assert torch.equal(*logits)


def test_every_file_is_flushed_to_the_disk(topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved(tmp_path / "run", topology, vocab_size=300)
    flushed: set[int] = set()
    flush = os.fsync

    def note(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    export_checkpoint(run, tmp_path / "out", max_shard_bytes=10_000)
    files = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < files.keys()
    assert [name for name, number in files.items() if number not in flushed] == []


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def load() -> torch.Tensor:
        gc.collect()
        assert [reference for reference in alive if reference() is not None] == []
        values = torch.ones(3, 5)
        alive.append(weakref.ref(values))
        return values

    entries = [Entry(f"tensor {number}", (3, 5), load) for number in range(4)]
    write_tensors(tmp_path, entries, dtype=torch.float32, max_shard_bytes=130)
    assert len(alive) == 4
    with open_tensors(tmp_path) as stored:
        assert stored.names == {entry.name for entry in entries}
        assert torch.equal(stored.read("tensor 3"), torch.ones(3, 5))


def test_rows_of_grouped_heads(topology, tmp_path: Path) -> None:
    """BC24: the fused rows are group after group, in one process and cut over two tensor-parallel ranks."""
    config = config_of("bare", num_layers=1, head_dim=2)
    numbered = torch.arange(16.0)[:, None].expand(16, 24).contiguous()
    for tensor in (1, 2):
        layout_config = replace(config, parallel=replace(config.parallel, tensor=tensor))
        values, layouts = {}, []
        for rank in range(tensor):
            for name, layout in stage_layouts(layout_config, tp_rank=rank, pp_rank=0).items():
                if layout.replicated and rank:
                    continue
                share = torch.zeros(layout.shape)
                if name.endswith("linear_qkv.weight"):
                    share = numbered.chunk(tensor)[rank].clone()
                values[f"{name}@{rank}"] = share
                layouts.append(replace(layout, name=f"{name}@{rank}"))
        run = save_parameters(tmp_path / f"run{tensor}", values, layouts, config)
        export_checkpoint(run, tmp_path / f"out{tensor}", tokenizer="none")
        stored = load_file(tmp_path / f"out{tensor}" / "model.safetensors")
        rows = {
            part: stored[f"model.layers.0.self_attn.{part}_proj.weight"][:, 0].int().tolist()
            for part in ("q", "k", "v")
        }
        assert rows == {"q": [0, 1, 2, 3, 8, 9, 10, 11], "k": [4, 5, 12, 13], "v": [6, 7, 14, 15]}


PLAIN = {"attention_gate": False, "post_norm": False}
STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 with windows": ("qwen3", {**PLAIN, "sliding_window": 5, "full_attention_every": 2, "rope_theta": 431.0}),
    "qwen3 untied": ("qwen3", {**PLAIN, "tie_embeddings": False, "norm_eps": 2e-3, "head_dim": 10}),
    "qwen3 without norm": ("qwen3", {**PLAIN, "embedding_norm": False, "residual_scale": "none"}),
    "llama": ("llama", {**PLAIN, "qk_norm": False}),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_architectures(topology, tmp_path: Path, name: str) -> None:
    """The stock code of transformers gives the trainer's logits without feedback, and needs no code of the folder."""
    kind, changes = STOCK[name]
    config = config_of("windowed", **({"sliding_window": None, "full_attention_every": None} | changes))
    trainer = draw_model(config, topology)
    run = save_model(tmp_path / "run", trainer, config, topology)
    export_checkpoint(run, tmp_path / "out", kind=kind, tokenizer="none")  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    tokens = random_tokens(60, 30, 30)
    with torch.no_grad():
        difference = model(torch.tensor(tokens)).logits - trainer_logits(trainer, rows_of(tokens))
    assert float(difference.abs().max()) < 1e-4
    assert "feedback are left out" in (tmp_path / "out" / "README.md").read_text()
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.mark.parametrize(
    ("kind", "changes", "keys"),
    [
        ("qwen3", {}, ["attention_gate", "post_norm"]),
        ("qwen3", {**PLAIN, "qk_norm": False}, ["qk_norm"]),
        ("llama", {}, ["attention_gate", "post_norm", "qk_norm", "sliding_window"]),
    ],
)
def test_what_a_stock_architecture_has_not(
    topology, tmp_path: Path, kind: Any, changes: dict[str, Any], keys: list[str]
) -> None:
    run = saved(tmp_path / "run", topology, **changes)
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(run, tmp_path / "out", kind=kind, tokenizer="none")
    assert [problem.split("=")[0] for problem in caught.value.problems] == [f"model.{key}" for key in keys]
    assert not (tmp_path / "out").exists()


def test_the_1b_configuration_has_no_stock_architecture(topology, tmp_path: Path) -> None:
    """Its keys, on a small model: nothing of the weights is read before."""
    model = load_config(ROOT / "configs" / "fbt_1b.yaml").model
    keys = ("qk_norm", "attention_gate", "post_norm", "residual_scale", "embedding_norm", "tie_embeddings")
    run = saved(tmp_path / "run", topology, **{key: getattr(model, key) for key in keys})
    with pytest.raises(ConfigError, match=r"model\.attention_gate=true(.|\n)*model\.post_norm=true"):
        export_checkpoint(run, tmp_path / "out", kind="qwen3", tokenizer="none")


def word_tokenizer(folder: Path, post_processor: str) -> Path:
    """Words of one letter, BOS 0, EOS 1; what the tokenizer itself adds is `post_processor`."""
    words = {"<bos>": 0, "<eos>": 1, "<other end>": 2} | {letter: 3 + n for n, letter in enumerate("abcdefghij")}
    tokenizer = Tokenizer(models.WordLevel({**words, "1": 13}, unk_token="j"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<other end>"])
    if post_processor:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=post_processor, special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("post_processor", ["", "<bos> $A", "$A <eos>", "<bos> $A <eos>"])
def test_prompts_begin_as_documents_did(tmp_path: Path, post_processor: str, add_bos: bool) -> None:
    """BC20: exactly one BOS where the data had it, and no EOS, whatever the tokenizer adds by itself."""
    folder = word_tokenizer(tmp_path / "tokenizer", post_processor)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": add_bos}))
    found = find_tokenizer(DataConfig(), str(folder), beside=tmp_path / "none", vocab_size=14)
    assert found is not None
    files = tokenizer_files(found, seq_length=32)
    out = tmp_path / "out"
    out.mkdir()
    for name, text in files.items():
        (out / name).write_text(text)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded("a b").input_ids == ([0] if add_bos else []) + [3, 4]
    assert loaded(["a b", "c"], padding=True).input_ids[1][0] == 1  # padded on the left
    assert loaded.decode([3, 4, 1], skip_special_tokens=True).split() == ["a", "b"]
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.model_max_length) == (0, 1, 32)
    assert loaded.chat_template == "{{ messages }}"
    again = find_tokenizer(DataConfig(), str(out), beside=tmp_path / "none", vocab_size=14)
    assert again is not None
    assert tokenizer_files(again, seq_length=32) == files


def test_whose_ids_the_data_has(tmp_path: Path) -> None:
    """Those of the tokenizer and of its exports, but not those of one with other words or other ends."""
    folder = word_tokenizer(tmp_path / "set" / "tokenizer", "$A <eos>")
    built_with = load_tokenizer(str(folder))
    stored = TokenizerInfo("huggingface", "../tokenizer/tokenizer.json", built_with.fingerprint)
    write_dataset(tmp_path / "set" / "train", [[[0, 3, 1]]], vocab_size=14, eos_id=1, bos_id=0, tokenizer=stored)
    write_dataset(tmp_path / "bytes", [[[65, 256]]])
    write_tar(tmp_path / "text.tar", [("0.txt", b"a b")])
    write_tar(tmp_path / "ids.tar", [("0.tokens", pack_ids([3, 4, 1], "uint16"))])

    def opened(name: str, tokenizer: str | None = None, vocab_size: int = 14) -> DocumentDataset:
        return open_dataset(str(tmp_path / name), tokenizer=tokenizer, vocab_size=vocab_size, key="--data")

    def exported(named: str) -> AnyTokenizer:
        found = find_tokenizer(DataConfig(), named, beside=tmp_path / "none", vocab_size=257)
        assert found is not None
        out = tmp_path / f"exported {Path(named).name}"
        out.mkdir()
        for name, text in tokenizer_files(found, seq_length=32).items():
            (out / name).write_text(text)
        return load_tokenizer(str(out))

    words, raw = exported(str(folder)), exported("bytes")
    assert words.fingerprint != built_with.fingerprint
    assert raw.fingerprint != load_tokenizer("bytes").fingerprint
    other = load_tokenizer(str(folder), eos_token="<other end>")
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    definition = (folder / "tokenizer.json").read_text()
    (renamed / "tokenizer.json").write_text(definition.replace('"a": 3', '"b": 3').replace('"b": 4', '"a": 4'))
    shutil.copy(folder / "tokenizer_config.json", renamed)
    for dataset, made_it in ((opened("set/train"), words), (opened("text.tar", str(folder)), words),
                             (opened("bytes", vocab_size=257), raw)):  # fmt: skip
        right = {built_with.fingerprint, words.fingerprint} if made_it is words else {raw.fingerprint}
        for tokenizer in (built_with, words, raw, other, load_tokenizer(str(renamed))):
            assert makes_ids_of(tokenizer, dataset) == (tokenizer.fingerprint in right)
    assert makes_ids_of(other, opened("ids.tar"))  # nothing tells
    assert makes_ids_of(load_tokenizer("bytes"), opened("text.tar", str(tmp_path / "exported bytes"), 257))
    shutil.rmtree(folder)
    assert makes_ids_of(built_with, opened("set/train"))
    assert not makes_ids_of(words, opened("set/train"))


def test_raw_bytes_as_a_tokenizer(topology, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", topology, vocab_size=257)
    export_checkpoint(run, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    text = "".join(map(chr, range(0x180))) + " \n\t  日本 🙂 don't"
    assert loaded(text).input_ids == load_tokenizer("bytes").encode(text) == list(text.encode())
    assert loaded.decode(loaded(text).input_ids) == text
    assert len(loaded) == 257
    assert loaded.eos_token_id == 256


def test_several_end_ids(topology, tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer", "")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.3}))
    run = saved(tmp_path / "run", topology)
    export_checkpoint(run, tmp_path / "out", tokenizer=str(folder))
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (0, [1, 2], 1)
    assert generation.temperature != 0.3
    found = find_tokenizer(DataConfig(), "bytes", beside=tmp_path, vocab_size=257)
    assert found is not None
    assert special_ids(found, tokenizer_files(found, seq_length=8)).as_config() == {
        "eos_token_id": 256,
        "pad_token_id": 256,
    }


def test_where_the_tokenizer_is_found(tmp_path: Path) -> None:
    own = word_tokenizer(tmp_path / "own", "")
    nowhere = tmp_path / "nowhere"
    for data, named, beside, expected in (
        (DataConfig(tokenizer="bytes"), None, nowhere, 257),
        (DataConfig(tokenizer="bytes"), None, own, 14),
        (DataConfig(tokenizer=str(own)), "bytes", own, 257),
    ):
        found = find_tokenizer(data, named, beside=beside, vocab_size=257)
        assert found is not None
        assert found.tokenizer.vocab_size == expected
    assert find_tokenizer(DataConfig(), "none", beside=own, vocab_size=257) is None
    with pytest.raises(CheckpointError, match=r"Name it with --tokenizer .* --tokenizer none"):
        find_tokenizer(DataConfig(train=str(nowhere)), None, beside=nowhere, vocab_size=257)
    with pytest.raises(CheckpointError, match="has 257 ids, but the model has 60"):
        find_tokenizer(DataConfig(), "bytes", beside=nowhere, vocab_size=60)
    with pytest.raises(DataError, match="not found"):
        find_tokenizer(DataConfig(), str(nowhere), beside=nowhere, vocab_size=60)


def test_a_folder_that_is_in_use(topology, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", topology)
    (tmp_path / "out").mkdir()
    (tmp_path / "out.partial").mkdir()  # an export that was killed
    (tmp_path / "out.partial" / "model.safetensors").write_text("half")
    export_checkpoint(run, tmp_path / "out", tokenizer="none")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="is there already"):
        export_checkpoint(run, tmp_path / "out", tokenizer="none")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        export_checkpoint(run, tmp_path / "file" / "out", tokenizer="none")
    assert not (tmp_path / "out.partial").exists()


def test_a_damaged_checkpoint(topology, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", topology)
    shard = next((run / "checkpoints" / "step_00000007").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        export_checkpoint(run, tmp_path / "out", tokenizer="none")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out", tokenizer="none")


def test_feedback_that_was_not_trained_yet(topology, tmp_path: Path) -> None:
    config = config_of("windowed")
    schedule = (SchedulePhase(10, {1: 1.0}), SchedulePhase(1.0, {2: 1.0}))
    config = replace(config, feedback=FeedbackConfig(schedule=schedule))
    model = draw_model(config, topology)
    for step, expected in ((0, 1), (10, 1), (11, 0)):
        run = save_model(tmp_path / f"run{step}", model, config, topology, step=step)
        lines: list[str] = []
        export_checkpoint(run, tmp_path / f"out{step}", tokenizer="none", log=lines.append)
        assert len(lines) == expected
        assert all("trained without feedback" in line for line in lines)
        assert all("unless" not in line for line in lines)
    started = replace(config, checkpoint=replace(config.checkpoint, load="runs/start"))
    run = save_model(tmp_path / "started", model, started, topology, step=10)
    export_checkpoint(run, tmp_path / "of_started", tokenizer="none", log=lines.append)
    assert ["unless the weights of runs/start had it, modes soft" in line for line in lines] == [True]
    lines.clear()
    import_model(tmp_path / "out10", tmp_path / "imported")
    export_checkpoint(tmp_path / "imported", tmp_path / "again", tokenizer="none", log=lines.append)
    assert lines == []  # of imported weights nobody knows


def test_the_tool(topology, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved(tmp_path / "run", topology)
    step, out = run / "checkpoints" / "step_00000007", tmp_path / "out"
    options = ["--tokenizer", "none", "--max-shard-size", "0.01MB", "--dtype", "bfloat16"]
    assert main([str(step), str(out), *options, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["source"], summary["dtype"], summary["has_tokenizer"]) == (str(step), "bfloat16", False)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert main([str(run), str(tmp_path / "two"), "--tokenizer", "none"]) == 0
    assert "without a tokenizer" in capsys.readouterr().out
    assert main([str(run), str(out), *options]) == 4
    assert main([str(run), str(tmp_path / "three"), "--as", "llama", "--tokenizer", "none"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "Error" in line]
    assert [line.split(":")[0] for line in errors] == ["CheckpointError", "ConfigError"]
    for wrong in ("0", "x", "5 TB"):
        with pytest.raises(SystemExit):
            main([str(run), str(tmp_path / "four"), "--max-shard-size", wrong])
