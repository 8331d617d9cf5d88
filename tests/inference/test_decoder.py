"""Decoding in the three modes equals the trainer's forward and a recurrence that is computed anew for every token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fbt_megatron.errors import DecodeError
from fbt_megatron.inference.cache import KVCache
from fbt_megatron.inference.decoder import DecodeMode, Decoder
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.planner import logical_tensors
from tests.inference.toy import (
    CASES,
    MODES,
    SEQ_LENGTH,
    WITH_FEEDBACK,
    Pair,
    random_prompts,
    reference_logits,
)
from tests.model.toy import batch_of, packed_row, run_passes

DECODINGS = [(case, mode) for case in CASES for mode in MODES if case in WITH_FEEDBACK or not mode.feedback]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def pair(topology: ParallelTopology):
    return cache(lambda case: Pair(case, topology))


def decode_given(decoder: Decoder, prompts: list[list[int]], given: list[list[int]]) -> Tensor:
    """Logits [rows, 1 + tokens, V] after the prompts and after each of the given tokens, by steps."""
    state = decoder.prefill(prompts, max_new_tokens=len(given[0]))
    logits = [decoder.logits(state)]
    for tokens in zip(*given, strict=True):
        decoder.step(state, torch.tensor(tokens))
        logits.append(decoder.logits(state))
    return torch.stack(logits, dim=1)


def greedy(decoder: Decoder, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    state = decoder.prefill(prompts, max_new_tokens=num_tokens)
    chosen = []
    for _ in range(num_tokens):
        chosen.append(decoder.logits(state).argmax(dim=-1))
        decoder.step(state, chosen[-1])
    return torch.stack(chosen, dim=1).tolist()


def trained_logits(pair: Pair, tokens: list[int], num_passes: int) -> Tensor:
    """Logits [tokens, V] of the last pass of the trainer's forward over one document."""
    with torch.no_grad():
        outputs = run_passes(pair.trained, batch_of(pair.trained, [packed_row(tokens)]), num_passes)
        return pair.trained.logits(outputs[-1].hidden)[:, 0, : pair.config.model.vocab_size]


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_checkpoint(pair, case: str) -> None:
    """Every logical tensor has its place, in its shape, and no other."""
    found = {name: tuple(target.shape) for name, target in pair(case).model._targets().items()}
    config = pair(case).config
    assert found == {tensor.name: tensor.shape for tensor in logical_tensors(config.model, config.feedback)}
    assert pair(case).model.num_parameters == sum(t.numel for t in logical_tensors(config.model, config.feedback))


@pytest.mark.parametrize("case", CASES)
def test_standard_steps_equal_the_forward_of_training(pair, case: str) -> None:
    """40 tokens, 13 times the smallest window."""
    (tokens,) = random_prompts(40)
    steps = decode_given(pair(case).decoder(MODES[0]), [tokens[:7]], [tokens[7:]])[0]
    torch.testing.assert_close(steps, trained_logits(pair(case), tokens, 1)[6:], **TOLERANCE)


@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("case", WITH_FEEDBACK)
def test_prefill_passes_equal_the_passes_of_training(pair, case: str, num_passes: int) -> None:
    (tokens,) = random_prompts(23)
    mode = DecodeMode("fused", num_passes) if num_passes > 1 else DecodeMode("soft", 1)
    hidden, _ = pair(case).decoder(mode).run_passes([tokens])
    logits = pair(case).model.logits(hidden[0])
    torch.testing.assert_close(logits, trained_logits(pair(case), tokens, num_passes), **TOLERANCE)


@pytest.mark.parametrize(("case", "mode"), DECODINGS)
def test_every_step_equals_a_recurrence_without_cache(pair, case: str, mode: DecodeMode) -> None:
    prompt, given = random_prompts(12, 8, seed=1)
    steps = decode_given(pair(case).exact_decoder(mode), [prompt], [given])[0]
    expected = reference_logits(pair(case).config, pair(case).weights, mode, prompt, given)
    torch.testing.assert_close(steps, expected.float(), **TOLERANCE)


@pytest.mark.parametrize(("case", "mode"), DECODINGS)
def test_a_batch_is_its_rows(pair, case: str, mode: DecodeMode) -> None:
    """20 greedy tokens of prompts shorter and longer than the windows, and logits of given tokens."""
    prompts, decoder = random_prompts(4, 1, 11, 2, 11, seed=2), pair(case).exact_decoder(mode)
    assert greedy(decoder, prompts, 20) == [greedy(decoder, [prompt], 20)[0] for prompt in prompts]
    given = random_prompts(12, 12, 12, 12, 12, seed=3)
    alone = [decode_given(decoder, [prompt], [row])[0] for prompt, row in zip(prompts, given, strict=True)]
    torch.testing.assert_close(decode_given(decoder, prompts, given), torch.stack(alone), **TOLERANCE)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_rows_can_leave_and_change_places(pair, mode: DecodeMode) -> None:
    decoder = pair("glu, windows, untied").exact_decoder(mode)
    prompts, given = random_prompts(3, 8, 5, 1, seed=4), random_prompts(9, 9, 9, 9, seed=5)
    expected = decode_given(decoder, prompts, given)
    state = decoder.prefill(prompts, max_new_tokens=9)
    rows = [0, 1, 2, 3]
    for step, kept in enumerate([[0, 1, 2, 3], [3, 1, 0], [0, 1, 2], [2, 0], [0, 1], [1], [0], [0], [0]]):
        state.select(kept)
        rows = [rows[row] for row in kept]
        decoder.step(state, torch.tensor([given[row][step] for row in rows]))
        torch.testing.assert_close(decoder.logits(state), expected[rows, step + 1], **TOLERANCE)


class Attentions:
    """What `scaled_dot_product_attention` is asked for, beside its results, or in place of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, compute: bool) -> None:
        self.calls: list[tuple[int, bool, bool]] = []
        """Heads of the keys, whether there is a mask, and whether heads are grouped."""
        attention = F.scaled_dot_product_attention

        def watched(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
            self.calls.append((key.shape[1], options["attn_mask"] is not None, options.get("enable_gqa", False)))
            return attention(query, key, value, **options) if compute else torch.empty_like(query)

        monkeypatch.setattr(F, "scaled_dot_product_attention", watched)


@pytest.mark.parametrize("case", ["glu, windows, untied", "glu, plain embedding, one group"])
def test_repeated_heads_give_what_grouped_ones_give(pair, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    decoder, prompts = pair(case).exact_decoder(MODES[2]), random_prompts(4, 17, 9, seed=9)
    with monkeypatch.context() as watched:
        attentions = Attentions(watched, compute=True)
        expected, _ = decoder.run_passes(prompts)
        groups = pair(case).config.model.num_query_groups
        assert set(attentions.calls) == {(groups, True, True)}
        attentions.calls.clear()
        watched.setattr("fbt_megatron.inference.cache._repeats_heads", lambda query, mask: True)
        found, _ = decoder.run_passes(prompts)
        assert set(attentions.calls) == {(4, True, False)}
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize(("dtype", "grouped"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
@pytest.mark.parametrize("starts", [[0, 0], [0, 3]], ids=str)
def test_cuda_gets_grouped_heads_where_flash_attention_takes_them(
    monkeypatch: pytest.MonkeyPatch, starts: list[int], dtype: torch.dtype, grouped: bool
) -> None:
    """Tensors without storage stand for those of a GPU: two rows of 7 tokens, the second with padding or not."""
    attentions = Attentions(monkeypatch, compute=False)
    cache = KVCache(CASES["glu"].model, starts=torch.tensor(starts), capacity=7, dtype=dtype, keeps=False)
    forward = cache.start_forward(7)
    has_mask = forward.masks[7] is not None
    assert has_mask == (max(starts) > 0)
    with FakeTensorMode():
        if has_mask:
            forward.masks[7] = torch.empty(2, 1, 7, 7, dtype=torch.bool, device="cuda")
        query, key = (torch.empty(2, 7, heads, 8, dtype=dtype, device="cuda") for heads in (4, 2))
        assert cache.attend(0, query, key, key, forward).shape == query.shape
    assert attentions.calls == [(2, False, True) if grouped and not has_mask else (4, has_mask, False)]


def test_standard_and_soft_share_the_first_token_only(pair) -> None:
    prompts = random_prompts(9, 5, seed=6)
    found = {mode.name: decode_given(pair("glu").decoder(mode), prompts, [[1, 2], [3, 4]]) for mode in MODES[:3]}
    assert torch.equal(found["standard"][:, 0], found["soft"][:, 0])
    assert (found["standard"][:, 1] - found["soft"][:, 1]).abs().max() > 0.1
    assert (found["fused"][:, 0] - found["soft"][:, 0]).abs().max() > 0.1


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_token_changes_nothing_before_it(pair, mode: DecodeMode) -> None:
    """In the prompt and among the generated tokens; and it does change what comes after it."""
    decoder = pair("glu, windows, untied").decoder(mode)
    (tokens,) = random_prompts(16, seed=7)
    hidden, _ = decoder.run_passes([tokens])
    steps = decode_given(decoder, [tokens[:4]], [tokens[4:]])[0]
    for place in range(16):
        changed = [*tokens[:place], (tokens[place] + 1) % 60, *tokens[place + 1 :]]
        other, _ = decoder.run_passes([changed])
        assert torch.equal(other[0, :place], hidden[0, :place])
        assert not torch.equal(other[0, place], hidden[0, place])
        if place >= 4:
            other_steps = decode_given(decoder, [changed[:4]], [changed[4:]])[0]
            assert torch.equal(other_steps[: place - 3], steps[: place - 3])
            assert not torch.equal(other_steps[place - 3], steps[place - 3])


def test_windowed_layers_keep_no_more_than_their_window(pair) -> None:
    """Layers 1 and 3 of `glu, windows, untied` have a window of 3 keys, layer 2 none; heads are 2 x 8 x 4 bytes."""
    decoder = pair("glu, windows, untied").decoder(MODES[0])
    slot = 2 * (2 * 8) * 4
    for new_tokens in (1, 30):
        state = decoder.prefill([[5] * 10], max_new_tokens=new_tokens)
        assert state.cache.num_bytes == slot * (3 + (10 + new_tokens) + 3)
        for _ in range(new_tokens):
            decoder.step(state, torch.tensor([1]))
        assert state.cache.length == 10 + new_tokens
        assert state.cache.num_bytes == slot * (3 + (10 + new_tokens) + 3)


def test_feedback_costs_the_fusion_and_nothing_else(pair) -> None:
    """Operations in matrix products: two hidden x hidden matrices for each fused token; a pass for each pass."""

    def operations(action: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            action()
        return counter.get_total_flops()

    (prompt,) = random_prompts(10)
    prefill, step = {}, {}
    for mode in MODES:
        decoder = pair("glu, windows, untied").decoder(mode)
        prefill[mode] = operations(partial(decoder.prefill, [prompt], max_new_tokens=1))
        state = decoder.prefill([prompt, prompt], max_new_tokens=1)
        step[mode] = operations(partial(decoder.step, state, torch.tensor([1, 2])))
    standard, soft, *fused = MODES
    fusion = 2 * 2 * pair("glu").config.model.hidden_size ** 2
    assert step[standard] > 0
    assert prefill[soft] == prefill[standard] > 0
    assert all(step[mode] == step[standard] + 2 * fusion for mode in (soft, *fused))
    assert [prefill[mode] for mode in fused] == [n * prefill[standard] + (n - 1) * 10 * fusion for n in (2, 3)]


def test_a_forward_that_nothing_follows_keeps_nothing(pair) -> None:
    hidden, cache = pair("glu").decoder(MODES[2]).run_passes([[5] * 10])
    assert cache.num_bytes == 0
    state = pair("glu").decoder(MODES[2]).prefill([[5] * 10], max_new_tokens=0)
    assert torch.equal(state.hidden, hidden[:, -1])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_padding_of_the_vocabulary_is_never_generated(topology: ParallelTopology, mode: DecodeMode) -> None:
    """The trainer's model gives a padded column the largest logit; the text is that of the 60 true ids."""
    pair = Pair("add, no gate, no norms beside", topology)
    with torch.no_grad():
        pair.trained.head.weight[60:] = 100.0 * pair.trained.head.weight[:1]
        pair.trained.head.weight[61] *= -1
    (prompt,) = random_prompts(9, seed=8)
    with torch.no_grad():
        outputs = run_passes(pair.trained, batch_of(pair.trained, [packed_row(prompt)]), mode.prefill_passes)
        padded = pair.trained.logits(outputs[-1].hidden)[-1, 0]
    assert padded.argmax() >= 60
    (tokens,) = greedy(pair.decoder(mode), [prompt], 20)
    assert tokens[0] == padded[:60].argmax()
    assert max(tokens) < 60


def test_refusals(pair) -> None:
    for name, passes, expected in [
        ("greedy", None, "mode=greedy: must be one of standard, soft, fused"),
        ("standard", 2, "prefill passes=2: mode standard takes one pass"),
        ("soft", 3, "prefill passes=3: mode soft takes one pass"),
        ("fused", 1, "prefill passes=1: fused takes at least 2"),
    ]:
        with pytest.raises(DecodeError, match=expected):
            DecodeMode.of(name, prefill_passes=passes)
    assert DecodeMode.of("fused") == DecodeMode("fused", 2)
    for mode in MODES[1:]:
        with pytest.raises(DecodeError, match=f"mode={mode.name}: the model was trained without feedback"):
            pair("no feedback").decoder(mode)
    decoder = pair("glu").decoder(MODES[0])
    for prompt, expected in [
        ([], "prompt 2 has no tokens"),
        ([3, 60], "prompt 2 holds token id 60, outside the model's vocabulary of 60"),
        ([-1], "prompt 2 holds token id -1"),
        ([1] * (SEQ_LENGTH + 1), "prompt 2 has 49 tokens, but the model was trained on rows of 48"),
    ]:
        with pytest.raises(DecodeError, match=expected):
            decoder.prefill([[1], prompt], max_new_tokens=1)
