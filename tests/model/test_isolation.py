"""Nothing of one packed document reaches another, and nothing of a later token an earlier one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fbt_megatron.model.builder import build_model
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.model.masks import build_masks
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.parallel.topology import ParallelTopology
from tests.model.toy import batch_of, packed_row, run_passes, tiny_config

FIRST, SECOND = [5, 6, 7, 2], [8, 9, 2]
NOISE = FeedbackNoise(seed=3, jitter=0.02, prefix_mixin="row")


@pytest.fixture(scope="module", params=["glu", "concat", "add"])
def model(request: pytest.FixtureRequest, topology: ParallelTopology) -> FBTModel:
    # Untied: the head's gradient would reach every row of a tied embedding.
    return build_model(tiny_config(fusion=request.param, tie_embeddings=False), topology)


def logits(model: FBTModel, *documents: list[int], num_passes: int, noise: FeedbackNoise | None = None) -> Tensor:
    """Logits [S, V] of the last pass over one row."""
    outputs = run_passes(model, batch_of(model, [packed_row(*documents)]), num_passes, noise)
    return model.logits(outputs[-1].hidden)[:, 0].detach()


def test_visible_pairs() -> None:
    documents = torch.tensor([packed_row(FIRST, SECOND).documents])
    masks = build_masks(documents, windows=[None, 2], reset=True, kernel="sdpa")
    assert int(masks[None].sum()) == 16
    assert int(masks[2].sum()) == 7 + 5  # each token and the one before it, if there is one


@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("noise", [None, NOISE])
def test_a_changed_document_leaves_the_next_one_alone(
    model: FBTModel, num_passes: int, noise: FeedbackNoise | None
) -> None:
    before = logits(model, FIRST, SECOND, num_passes=num_passes, noise=noise)
    after = logits(model, [50, *FIRST[1:]], SECOND, num_passes=num_passes, noise=noise)
    assert torch.equal(before[4:], after[4:])
    assert not torch.equal(before[:4], after[:4])


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_no_gradient_across_documents(model: FBTModel, num_passes: int) -> None:
    row = packed_row([50, *FIRST[1:]], SECOND)
    row.labels[:4] = [-100] * 4
    outputs = run_passes(model, batch_of(model, [row]), num_passes, NOISE)
    gradient = torch.autograd.grad(sum(out.losses.ce_sum for out in outputs), model.embedding.weight)[0]
    assert torch.count_nonzero(gradient[50]) == 0
    assert torch.count_nonzero(gradient[8]) > 0


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_packed_equals_alone(model: FBTModel, num_passes: int) -> None:
    packed = logits(model, FIRST, SECOND, num_passes=num_passes)
    torch.testing.assert_close(packed[4:], logits(model, SECOND, num_passes=num_passes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_later_tokens_never_reach_earlier_ones(model: FBTModel, num_passes: int) -> None:
    document = [*FIRST, *SECOND]
    before = logits(model, document, num_passes=num_passes)
    for t in range(1, len(document)):
        changed = [*document[:t], 40, *document[t + 1 :]]
        after = logits(model, changed, num_passes=num_passes)
        assert torch.equal(before[:t], after[:t])
        assert not torch.equal(before[t], after[t])


def test_feedback_reaches_the_whole_document(model: FBTModel) -> None:
    """The other half of isolation: inside a document the state of t - 1 does change the input of t."""
    batch = batch_of(model, [packed_row(FIRST, SECOND)])
    hidden = torch.randn(7, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    plain = model.stack_input(batch, 0, None, None)
    fused = model.stack_input(batch, 1, hidden, None)
    same = [bool(torch.equal(plain[t], fused[t])) for t in range(7)]
    assert same == [True, False, False, False, True, False, False]


def test_nothing_of_an_infinite_state_crosses_a_boundary(model: FBTModel) -> None:
    """The last state of a document is dropped, not multiplied by zero."""
    batch = batch_of(model, [packed_row(FIRST, SECOND)])
    hidden = torch.randn(7, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    matrices = list(model.fusion.parameters())

    def gradients(state: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(model.stack_input(batch, 1, state, None).square().sum(), matrices))

    poisoned = hidden.clone()
    poisoned[3] = torch.inf  # end of the first document
    poisoned[6] = torch.nan  # end of the row
    for clean, other in zip(gradients(hidden), gradients(poisoned), strict=True):
        assert torch.equal(clean, other)


def test_without_attention_reset_feedback_still_stops(topology: ParallelTopology) -> None:
    model = build_model(tiny_config(reset=False), topology)
    batch = batch_of(model, [packed_row(FIRST, SECOND)])
    hidden = torch.randn(7, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.stack_input(batch, 1, hidden, None)[4], model.stack_input(batch, 0, None, None)[4])
    one_pass = [logits(model, first, SECOND, num_passes=1) for first in (FIRST, [50, *FIRST[1:]])]
    assert not torch.equal(one_pass[0][4:], one_pass[1][4:])
