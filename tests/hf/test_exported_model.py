"""An exported model in transformers: the trainer's logits, and decoding in the three modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, DynamicCache

from fbt_megatron.hf.export import export_checkpoint
from fbt_megatron.inference.decoder import DecodeMode, Decoder
from fbt_megatron.inference.generation import Generator, Request
from fbt_megatron.inference.source import load_model as load_decoder
from fbt_megatron.model.fbt_model import FBTModel
from tests.hf.models import (
    ARCHITECTURES,
    RecurrenceReference,
    config_of,
    draw_model,
    random_tokens,
    rows_of,
    save_model,
    trainer_logits,
)
from tests.model.toy import packed_row, whole_tensors

MODES = ("standard", "soft", "fused")
WITH_FEEDBACK = ("windowed", "bare", "unusual")


class Exported:
    """A model in the trainer and in transformers."""

    def __init__(self, name: str, trainer: FBTModel, folder: Path) -> None:
        self.name = name
        self.trainer = trainer
        self.folder = folder
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        self.vocab_size = trainer.model.vocab_size

    @property
    def cache_class(self) -> Any:
        """`FBTCache` of the code that came with the folder."""
        return self.model.generate.__globals__["FBTCache"]

    def cache(self, mode: str, prefill_passes: int | None = None) -> Any:
        return self.cache_class(self.model.config, mode, prefill_passes)

    def reference(self) -> RecurrenceReference:
        fusion = ARCHITECTURES[self.name].get("fusion", "glu")
        return RecurrenceReference(whole_tensors(self.trainer), self.trainer.model, fusion)

    def generate(self, prompts: list[list[int]], mode: str, num_tokens: int, **options: Any) -> list[list[int]]:
        """New tokens of each prompt, which are padded on the left."""
        ids, mask = pad_left(prompts)
        settings = {"max_new_tokens": num_tokens, "do_sample": False, "feedback_mode": mode, "pad_token_id": 0}
        result = self.model.generate(ids, attention_mask=mask, **(settings | options))
        return result[:, ids.shape[1] :].tolist()


def pad_left(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[9] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


@pytest.fixture(scope="module")
def models(topology, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    found = {}
    for name in ARCHITECTURES:
        folder, config = tmp_path_factory.mktemp(name), config_of(name)
        trainer = draw_model(config, topology)
        save_model(folder / "run", trainer, config, topology)
        export_checkpoint(folder / "run", folder / f"exported_{name}", tokenizer="none")
        found[name] = Exported(name, trainer, folder / f"exported_{name}")
    return found


@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_of_passes_are_the_trainer_s(models: dict[str, Exported], name: str, num_passes: int) -> None:
    """Positions up to 70 (BC24 asks for 64)."""
    model = models[name]
    if name == "baseline" and num_passes > 1:
        with pytest.raises(ValueError, match="no feedback"):
            model.model(torch.zeros(1, 3, dtype=torch.long), num_passes=num_passes)
        return
    tokens = random_tokens(model.vocab_size, 70, 70)
    with torch.no_grad():
        actual = model.model(torch.tensor(tokens), num_passes=num_passes).logits
    expected = trainer_logits(model.trainer, rows_of(tokens), num_passes)
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_packed_rows(models: dict[str, Exported], name: str, num_passes: int) -> None:
    """Documents of a row are told apart by their positions, as in training; feedback does not cross their ends."""
    model = models[name]
    documents = random_tokens(model.vocab_size, 9, 1, 14)
    positions = torch.tensor([[place for document in documents for place in range(len(document))]])
    row = packed_row(*documents)
    with torch.no_grad():
        output = model.model(torch.tensor([row.tokens]), position_ids=positions, num_passes=num_passes, use_cache=False)
    expected = trainer_logits(model.trainer, [row], num_passes)
    assert float((output.logits - expected).abs().max()) < 1e-4


class Attentions:
    """What `scaled_dot_product_attention` is asked for, beside its results, or in place of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, compute: bool = True) -> None:
        self.calls: list[tuple[tuple[int, int], bool, bool]] = []
        """Heads of queries and keys, whether there is a mask, and whether heads are grouped."""
        attention = F.scaled_dot_product_attention

        def watched(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            heads, has_mask = (query.shape[1], key.shape[1]), options["attn_mask"] is not None
            self.calls.append((heads, has_mask, options.get("enable_gqa", False)))
            return attention(query, key, value, **options) if compute else torch.empty_like(query)

        monkeypatch.setattr(F, "scaled_dot_product_attention", watched)

    def seen(self) -> set[tuple[tuple[int, int], bool, bool]]:
        """The kinds of calls since this was asked last."""
        kinds, self.calls = set(self.calls), []
        return kinds


@pytest.mark.parametrize(("name", "groups"), [("windowed", 2), ("unusual", 1)])
def test_repeated_heads_give_what_grouped_ones_give(
    models: dict[str, Exported], monkeypatch: pytest.MonkeyPatch, name: str, groups: int
) -> None:
    model = models[name]
    ids, mask = pad_left(random_tokens(model.vocab_size, 4, 17, 9))
    attentions = Attentions(monkeypatch)
    with torch.no_grad():
        expected = model.model(ids, attention_mask=mask, num_passes=2).logits
        assert attentions.seen() == {((4, groups), True, True)}
        monkeypatch.setitem(model.model.generate.__globals__, "_repeats_heads", lambda query, mask: True)
        found = model.model(ids, attention_mask=mask, num_passes=2).logits
        assert attentions.seen() == {((4, 4), True, False)}
    assert float((found - expected)[mask.bool()].abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_mask", [True, False])
def test_cuda_gets_grouped_heads_where_flash_attention_takes_them(
    models: dict[str, Exported], monkeypatch: pytest.MonkeyPatch, has_mask: bool, dtype: torch.dtype
) -> None:
    """Tensors without storage stand for those of a GPU."""
    attentions = Attentions(monkeypatch, compute=False)
    heads_of = models["bare"].model.generate.__globals__["_heads"]
    with FakeTensorMode():
        query, key = (torch.empty(2, heads, 7, 8, dtype=dtype, device="cuda") for heads in (4, 2))
        mask = torch.empty(2, 1, 7, 7, dtype=torch.bool, device="cuda") if has_mask else None
        assert heads_of(query, key, key, mask).shape == query.shape
    grouped = dtype == torch.bfloat16 and not has_mask
    assert attentions.seen() == {((4, 2), False, True) if grouped else ((4, 4), has_mask, False)}


def test_no_kernel_has_more_to_do_than_it_must(models: dict[str, Exported], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of ones is no mask, and a single query needs no grouped heads: those of a group are its queries."""
    model, attentions = models["bare"].model, Attentions(monkeypatch)
    prompts = random_tokens(60, 5, 5)
    ids, ones = torch.tensor(prompts), torch.ones(2, 5, dtype=torch.int64)
    with torch.no_grad():
        expected = model(ids).logits
        assert attentions.seen() == {((4, 2), False, True)}
        output = model(ids, attention_mask=ones)
        assert attentions.seen() == {((4, 2), False, True)}
        assert torch.equal(output.logits, expected)
        step, padding = torch.tensor([[1], [2]]), torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])
        model(step, attention_mask=padding, past_key_values=output.past_key_values)
        assert attentions.seen() == {((2, 2), True, False)}


@pytest.mark.parametrize(("mode", "passes"), [("soft", 1), ("fused", 2), ("fused", 3)])
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_logits_with_feedback(models: dict[str, Exported], name: str, mode: str, passes: int) -> None:
    """The prompt, two tokens at once and one more, against the recurrence computed anew for each token."""
    model, reference = models[name], models[name].reference()
    prompt, continuation = random_tokens(model.vocab_size, 11, 3)
    cache = model.cache(mode, passes if mode == "fused" else None)
    actual = []
    with torch.no_grad():
        for part in (prompt, continuation[:2], continuation[2:]):
            output = model.model(torch.tensor([part]), past_key_values=cache)
            actual += list(output.logits[0, -len(part) if part is not prompt else -1 :])
    inputs = reference.start(prompt, prefill_passes=passes)
    for logits, token in zip(actual, [*continuation, None], strict=True):
        assert float((logits - reference.logits(inputs)).abs().max()) < 1e-4
        if token is not None:
            inputs = reference.append(inputs, token, feedback=True)


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens(models: dict[str, Exported], mode: str) -> None:
    """50 steps. The three modes write different texts, so the test tells them apart."""
    model = models["windowed"]
    (prompt,) = random_tokens(model.vocab_size, 6)
    passes = 2 if mode == "fused" else 1
    expected = model.reference().greedy(prompt, 50, feedback=mode != "standard", prefill_passes=passes)
    assert model.generate([prompt], mode, 50) == [expected]
    assert len({tuple(model.generate([prompt], other, 50)[0]) for other in MODES}) == 3


@pytest.mark.parametrize("mode", MODES)
def test_this_project_s_decoder_writes_the_same(topology, tmp_path: Path, mode: str) -> None:
    """50 tokens for each of two prompts, from the checkpoint and from its export."""
    config = config_of("windowed", vocab_size=257, seq_length=80)
    trainer = draw_model(config, topology)
    export_checkpoint(save_model(tmp_path / "run", trainer, config, topology), tmp_path / f"decoded_{mode}")
    prompts = random_tokens(256, 3, 17)
    loaded = load_decoder(tmp_path / "run")
    generator = Generator(Decoder(loaded.model, DecodeMode.of(mode)))
    completions = generator.generate([Request(tuple(prompt), max_tokens=50) for prompt in prompts])
    exported = Exported("windowed", trainer, tmp_path / f"decoded_{mode}")
    expected = exported.generate(prompts, mode, 50, eos_token_id=None)
    assert [list(completion.tokens) for completion in completions] == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_padded_prompts_write_what_they_write_alone(models: dict[str, Exported], name: str, mode: str) -> None:
    model = models[name]
    prompts = random_tokens(model.vocab_size, 1, 12, 7)
    assert model.generate(prompts, mode, 20) == [model.generate([prompt], mode, 20)[0] for prompt in prompts]


@pytest.mark.parametrize("mode", MODES)
def test_beam_search(models: dict[str, Exported], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The score of a beam is the log-likelihood of its text: the states went with the beams."""
    model = models["bare"]
    (prompt,) = random_tokens(model.vocab_size, 8)

    def found() -> tuple[float, float]:
        result = model.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 8, dtype=torch.long),
            feedback_mode=mode,
            max_new_tokens=12,
            num_beams=4,
            do_sample=False,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
        return float(result.sequences_scores[0]), log_likelihood(model, mode, prompt, result.sequences[0, 8:].tolist())

    score, expected = found()
    assert score == pytest.approx(expected, abs=1e-4)
    if mode != "standard":
        monkeypatch.setattr(model.cache_class, "reorder_cache", DynamicCache.reorder_cache)
        score, expected = found()
        assert score != pytest.approx(expected, abs=1e-2)


@torch.no_grad()
def log_likelihood(model: Exported, mode: str, prompt: list[int], text: list[int]) -> float:
    """Of `text` after `prompt`, fed token by token."""
    cache, total, given = model.cache(mode), 0.0, prompt
    for token in text:
        logits = model.model(torch.tensor([given]), past_key_values=cache).logits[0, -1]
        total += float(logits.log_softmax(-1)[token])
        given = [token]
    return total


def test_several_sequences(models: dict[str, Exported]) -> None:
    """Sampled texts of one prompt are those of as many copies of it."""
    model = models["windowed"]
    (prompt,) = random_tokens(model.vocab_size, 5)
    options: dict[str, Any] = {"do_sample": True, "top_k": 20}
    torch.manual_seed(4)
    several = model.generate([prompt], "soft", 10, num_return_sequences=3, **options)
    torch.manual_seed(4)
    assert several == model.generate([prompt] * 3, "soft", 10, **options)
    assert several[0] != several[1]


@pytest.mark.parametrize("mode", MODES)
def test_going_on_with_a_filled_cache(models: dict[str, Exported], mode: str) -> None:
    model = models["windowed"]
    (prompt,) = random_tokens(model.vocab_size, 5)
    (expected,) = model.generate([prompt], mode, 14)
    first = model.generate([prompt], mode, 6, past_key_values=(cache := model.cache(mode)))[0]
    assert cache.get_seq_length() == 10  # the last token has not been fed
    assert first + model.generate([prompt + first], mode, 8, past_key_values=cache)[0] == expected


@pytest.mark.parametrize("mode", ["soft", "fused"])
def test_operations_on_the_cache(models: dict[str, Exported], mode: str) -> None:
    """After each the next token is as on a cache that was made for those rows and that length."""
    model = models["bare"]
    tokens = random_tokens(model.vocab_size, 9, 9)

    def filled(rows: list[list[int]]) -> Any:
        cache = model.cache(mode)
        model.model(torch.tensor(rows), past_key_values=cache)
        return cache

    def next_logits(cache: Any, rows: int) -> Tensor:
        return model.model(torch.tensor([[3]] * rows), past_key_values=cache).logits

    def check(cache: Any, rows: list[list[int]]) -> None:
        expected = next_logits(filled(rows), len(rows))
        assert float((next_logits(cache, len(rows)) - expected).abs().max()) < 1e-5

    with torch.no_grad():
        cache = filled(tokens)
        cache.reorder_cache(torch.tensor([1, 0]))
        check(cache, tokens[::-1])
        cache = filled(tokens)
        cache.batch_repeat_interleave(2)
        check(cache, [tokens[0], tokens[0], tokens[1], tokens[1]])
        cache = filled(tokens)
        cache.batch_select_indices(torch.tensor([1]))
        check(cache, tokens[1:])
        cache = filled(tokens)
        cache.crop(-4)
        check(cache, [row[:5] for row in tokens])
        cache = filled(tokens)
        cache.reset()
        assert cache.states is None
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 4}, {"use_cache": False}, {"prompt_lookup_num_tokens": 2}], ids=str
)
def test_standard_decoding_in_other_ways(models: dict[str, Exported], options: dict[str, Any]) -> None:
    model = models["bare"]
    (prompt,) = random_tokens(model.vocab_size, 11)
    prompt += prompt[:6]  # what a lookup finds
    assert model.generate([prompt], "standard", 12, **options) == model.generate([prompt], "standard", 12)


@pytest.mark.parametrize("mode", ["soft", "fused"])
@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 4},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_model": "any"},
        {"cache_implementation": "static"},
        {"guidance_scale": 1.5},
        {"inputs_embeds": torch.zeros(1, 2, 24)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_would_not_know_the_prompt_is_refused(
    models: dict[str, Exported], mode: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*Leave it out"):
        models["bare"].generate([[1, 2, 3]], mode, 4, **options)


def test_wrong_modes(models: dict[str, Exported]) -> None:
    model, ids = models["bare"], [[1, 2, 3]]
    with pytest.raises(ValueError, match="must be one of standard, soft, fused"):
        model.generate(ids, "hard", 2)
    with pytest.raises(ValueError, match="prefill_passes=1: counts all passes"):
        model.generate(ids, "fused", 2, prefill_passes=1)
    with pytest.raises(ValueError, match="goes with feedback_mode='fused'"):
        model.generate(ids, "soft", 2, prefill_passes=2)
    with pytest.raises(ValueError, match="this model has no feedback"):
        models["baseline"].generate(ids, "soft", 2)
    with pytest.raises(ValueError, match="not an FBTCache of mode 'fused'"):
        model.generate(ids, "fused", 2, past_key_values=model.cache("soft"))
    with pytest.raises(ValueError, match="not an FBTCache of mode 'fused'"):
        model.generate(ids, "fused", 2, past_key_values=model.cache("fused", 3))
    with pytest.raises(ValueError, match="not an FBTCache of mode 'soft'"):
        model.generate(ids, "soft", 2, past_key_values=DynamicCache(config=model.model.config))
    mask = torch.tensor([[1, 1, 0]])
    with pytest.raises(ValueError, match="pad prompts on the left"):
        model.model.generate(torch.tensor(ids), attention_mask=mask, feedback_mode="soft", max_new_tokens=2)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("mode", ["soft", "fused"])
def test_a_cache_does_not_choose_the_mode(models: dict[str, Exported], mode: str, options: dict[str, Any]) -> None:
    """Fresh or filled, it goes only with its mode asked for, and what does not go with the mode is refused as ever."""
    model = models["bare"]
    (prompt,) = random_tokens(model.vocab_size, 11)
    filled = model.cache(mode)
    with torch.no_grad():
        model.model(torch.tensor([prompt[:5]]), past_key_values=filled)
    for cache in (model.cache(mode), filled):
        before = cache.get_seq_length()
        with pytest.raises(ValueError, match=r"not an FBTCache of mode 'standard'.*Give the feedback_mode"):
            model.generate([prompt], "standard", 4, past_key_values=cache, **options)
        if options:
            with pytest.raises(ValueError, match="Leave it out"):
                model.generate([prompt], mode, 4, past_key_values=cache, **options)
        assert cache.get_seq_length() == before


def test_wrong_arguments_of_forward(models: dict[str, Exported]) -> None:
    model, ids = models["bare"].model, torch.tensor([[1, 2, 3]])
    with pytest.raises(TypeError, match="output_hidden_states"):
        model(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="goes without a cache"):
        model(ids, num_passes=2, use_cache=True)
    with pytest.raises(ValueError, match="must be at least 1"):
        model(ids, num_passes=0)
    with pytest.raises(ValueError, match=r"must be \(1, 3\)"):
        model(ids, attention_mask=torch.ones(1, 2))
    with pytest.raises(ValueError, match="StaticCache: this model takes a DynamicCache"):
        models["bare"].generate([[1, 2, 3]], "standard", 2, cache_implementation="static")
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        AutoModelForCausalLM.from_pretrained(models["bare"].folder, trust_remote_code=True, attn_implementation="eager")


def test_loss_and_embeddings(models: dict[str, Exported]) -> None:
    """The loss is the mean over trained tokens; embeddings in place of ids give the same."""
    model = models["unusual"]
    (tokens,) = random_tokens(model.vocab_size, 12)
    ids = torch.tensor([tokens])
    labels = ids.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        output = model.model(ids, labels=labels, num_passes=2)
        embedded = model.model.get_input_embeddings()(ids)
        assert torch.equal(model.model(inputs_embeds=embedded, num_passes=2).logits, output.logits)
    expected = trainer_logits(model.trainer, rows_of([tokens]), 2)[0, 3:-1].log_softmax(-1)
    losses = -expected.gather(-1, ids[0, 4:, None])
    assert float(output.loss) == pytest.approx(float(losses.mean()), abs=1e-5)


def test_rotary_pairs(models: dict[str, Exported]) -> None:
    """BC24: halves, not neighbours."""
    context_class = models["bare"].model.generate.__globals__["_Context"]
    config = models["bare"].model.config
    config.head_dim, width, theta = 4, config.head_dim, config.rope_theta
    config.rope_theta = 10000.0
    try:
        context = context_class(config, torch.tensor([[1]]), None, 0, torch.float32)
    finally:
        config.head_dim, config.rope_theta = width, theta
    turned = context.rotate(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])).flatten().tolist()
    assert turned == pytest.approx([-1.984111, 1.959901, 2.462378, 4.0198], abs=1e-6)
