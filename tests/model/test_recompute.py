"""Recomputation changes what is kept, and nothing else: losses and gradients are the same to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.parallel.topology import ParallelTopology
from tests.model.toy import batch_of, random_rows, run_passes, tiny_config

NOISE = FeedbackNoise(seed=5, jitter=0.1, prefix_mixin="row")


def built(topology: ParallelTopology, recompute: str, *, precision: str = "fp32", **options: object) -> FBTModel:
    parallel = ParallelConfig(precision=precision, recompute=recompute)
    return build_model(tiny_config(parallel=parallel, **options), topology)


def losses_of(model: FBTModel, num_passes: int) -> list[Tensor]:
    """Objective terms of each pass over a packed batch."""
    batch = batch_of(model, random_rows(torch.Generator().manual_seed(11), [5, 1, 6, 2], [14]), numbers=[3, 8])
    outputs = run_passes(model, batch, num_passes, NOISE)
    return [out.losses.ce_sum + 1e-2 * out.losses.z_sum for out in outputs]


@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    "options",
    [{}, {"embedding_norm": False, "tie_embeddings": False, "fusion": "concat"}, {"precision": "bf16"}],
    ids=["tied", "untied", "bf16"],
)
def test_losses_and_gradients_are_equal_to_the_last_bit(
    topology: ParallelTopology, num_passes: int, recompute: str, options: dict[str, object]
) -> None:
    found = []
    for choice in ("none", recompute):
        model = built(topology, choice, **options)
        losses = losses_of(model, num_passes)
        torch.stack(losses).sum().backward()
        found.append(([loss.detach() for loss in losses], {name: p.grad for name, p in model.named_parameters()}))
    (losses, gradients), (again, gradients_again) = found
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, losses, strict=True))
    for name, gradient in gradients.items():
        assert (gradient is None) == (gradients_again[name] is None), name
        assert gradient is None or torch.equal(gradients_again[name], gradient), name


def kept_for_backward(model: FBTModel, num_passes: int) -> int:
    """Bytes of the distinct storages that autograd saves, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = losses_of(model, num_passes)  # alive until all is counted
    assert len(losses) == num_passes
    return sum(size for address, size in sizes.items() if address not in parameters)


def test_full_keeps_nothing_but_what_a_pass_receives(topology: ParallelTopology) -> None:
    state = 14 * 2 * 24 * 4  # S, B, H, bytes of fp32
    model = built(topology, "full")
    assert [kept_for_backward(model, passes) for passes in (1, 2, 3)] == [0, state, 2 * state]
    plain = [kept_for_backward(built(topology, recompute), 1) for recompute in ("selective", "none")]
    assert 3 * state < plain[0] < plain[1]


def test_nothing_is_kept_or_computed_twice_without_gradients(topology: ParallelTopology) -> None:
    model = built(topology, "full")
    calls = []
    model.stack.register_forward_hook(lambda *unused: calls.append(1))
    with torch.no_grad():
        losses_of(model, 2)
    assert len(calls) == 2
    torch.stack(losses_of(model, 2)).sum().backward()
    assert len(calls) == 2 + 2 * 2
