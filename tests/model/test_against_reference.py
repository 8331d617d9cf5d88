"""The objective and all its gradients equal a second implementation written from the equations."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.parallel.topology import ParallelTopology
from tests.model.reference import Draws, Row, row_losses
from tests.model.toy import TINY, batch_of, random_rows, run_passes, tiny_config, whole_tensors

TOLERANCE = 1e-5
Z_COEFFICIENT = 1e-2

VARIANTS = {
    "default": {},
    "untied": {"tie_embeddings": False},
    "no gate": {"attention_gate": False},
    "no qk norm": {"qk_norm": False},
    "window": {"sliding_window": 3, "full_attention_every": 3},
    "window everywhere": {"sliding_window": 3},
    "no post norm": {"post_norm": False},
    "residual unscaled": {"residual_scale": "none"},
    "plain embedding": {"embedding_norm": False},
    "concat": {"fusion": "concat"},
    "add": {"fusion": "add"},
    "add, plain embedding": {"fusion": "add", "embedding_norm": False},
    "whole row": {"reset": False},
    "window over the whole row": {"reset": False, "sliding_window": 5, "full_attention_every": 2},
    "one key/value head per head": {"num_query_groups": 4},
}


def pass_weights(num_passes: int, reduction: str, loss_weight: float) -> list[float]:
    """L = L_1 + lambda * (mean or sum of L_2 ... L_K)."""
    divisor = max(num_passes - 1, 1) if reduction == "mean" else 1
    return [1.0] + [loss_weight / divisor] * (num_passes - 1)


def reference_objective(model, rows: list[Row], weights_of_passes: list[float], draws=None, **options):
    """Objective in fp64 and the gradient of every whole matrix."""
    weights = {name: tensor.requires_grad_() for name, tensor in whole_tensors(model).items()}
    count = sum(label != -100 for row in rows for label in row.labels)
    total = torch.zeros((), dtype=torch.float64)
    for index, row in enumerate(rows):
        losses = row_losses(
            row,
            weights,
            model.model,
            num_passes=len(weights_of_passes),
            draws=None if draws is None else draws[index],
            **options,
        )
        for weight, (ce, z, _) in zip(weights_of_passes, losses, strict=True):
            total = total + weight * (ce + Z_COEFFICIENT * z) / count
    total.backward()
    return total.detach(), {name: tensor.grad for name, tensor in weights.items() if tensor.grad is not None}


def product_objective(model, rows: list[Row], weights_of_passes: list[float], noise=None) -> Tensor:
    batch = batch_of(model, rows)
    outputs = run_passes(model, batch, len(weights_of_passes), noise)
    total = sum(
        weight * (out.losses.ce_sum + Z_COEFFICIENT * out.losses.z_sum) / out.losses.num_tokens
        for weight, out in zip(weights_of_passes, outputs, strict=True)
    )
    total.backward()
    return total.detach()


def assert_equal_objectives(model, rows, weights_of_passes, *, noise=None, draws=None, **options) -> None:
    expected, expected_gradients = reference_objective(model, rows, weights_of_passes, draws, **options)
    actual = product_objective(model, rows, weights_of_passes, noise)
    gradients = whole_tensors(model, gradients=True)
    assert abs(actual - expected) <= TOLERANCE * abs(expected)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        difference = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()
        assert difference <= TOLERANCE, f"{name}: {difference:.2e}"


def perturb_norms(model) -> None:
    """Norm weights away from 1, where a forgotten or doubled norm would not show."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.mul_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))


def build(topology: ParallelTopology, **options: object):
    model = build_model(tiny_config(**options), topology)
    perturb_norms(model)
    return model


def rows_for_test() -> list[Row]:
    return random_rows(torch.Generator().manual_seed(11), [5, 1, 6, 2], [14])


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_passes_of_every_architecture(topology: ParallelTopology, variant: str) -> None:
    options = VARIANTS[variant]
    model = build(topology, **options)
    reference = {name: options[name] for name in ("fusion", "reset") if name in options}
    assert_equal_objectives(model, rows_for_test(), pass_weights(2, "mean", 1.0), **reference)


@pytest.mark.parametrize(
    ("num_passes", "reduction", "loss_weight"), [(1, "mean", 1.0), (3, "mean", 0.7), (3, "sum", 0.7)]
)
def test_numbers_of_passes(topology: ParallelTopology, num_passes: int, reduction: str, loss_weight: float) -> None:
    model = build(topology)
    assert_equal_objectives(model, rows_for_test(), pass_weights(num_passes, reduction, loss_weight))


@pytest.mark.parametrize("prefix_mixin", ["row", "document", "off"])
def test_with_jitter_and_plain_prefixes(topology: ParallelTopology, prefix_mixin: str) -> None:
    """The draws are taken from the product; where they enter the equations is the reference's."""
    model, rows = build(topology), rows_for_test()
    noise = FeedbackNoise(seed=5, jitter=0.3, prefix_mixin=prefix_mixin)
    documents = torch.tensor([row.documents for row in rows])
    zeros = torch.zeros(documents.shape[1], len(rows), TINY.hidden_size)
    draws: list[list[Draws]] = [[] for _ in rows]
    for k in (1, 2):
        jitter = noise.add_jitter(zeros, rows=range(len(rows)), pass_idx=k).double()
        prefix = noise.plain_prefix(documents, rows=range(len(rows)), pass_idx=k)
        plain = torch.zeros_like(documents, dtype=torch.bool) if prefix is None else prefix
        for index in range(len(rows)):
            draws[index].append(Draws(jitter[:, index], plain[index].tolist()))
    assert_equal_objectives(model, rows, pass_weights(3, "mean", 1.0), noise=noise, draws=draws)


def test_ordinary_transformer_has_no_feedback_parameters(topology: ParallelTopology) -> None:
    model = build(topology, fusion="none", embedding_norm=False)
    assert not [name for name, _ in model.named_parameters() if name.startswith(("fusion", "embedding_norm"))]
    assert_equal_objectives(model, rows_for_test(), [1.0], fusion="none")


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(topology: ParallelTopology, recompute: str) -> None:
    """The same loss to the bit, and gradients up to the order in which the passes are summed."""
    results = []
    for mode in ("none", recompute):
        parallel = ParallelConfig(precision="fp32", recompute=mode)
        model = build(topology, parallel=parallel, sliding_window=3)
        value = product_objective(model, rows_for_test(), pass_weights(2, "mean", 1.0))
        results.append((value, whole_tensors(model, gradients=True)))
    (value, gradients), (value_again, gradients_again) = results
    assert torch.equal(value, value_again)
    for name, gradient in gradients.items():
        assert (gradient - gradients_again[name]).norm() <= 1e-6 * gradient.norm(), name


def test_bf16_follows_fp32(topology: ParallelTopology) -> None:
    """bf16 has 8 bits of mantissa: the loss agrees to 1 %, and the loss sums are fp32."""
    losses = []
    for precision in ("fp32", "bf16"):
        model = build(topology, parallel=replace(ParallelConfig(), precision=precision))
        output = run_passes(model, batch_of(model, rows_for_test()), 2)[-1]
        assert output.losses.ce_sum.dtype is torch.float32
        losses.append(output.losses.ce_sum.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_validation_builds_no_graph(topology: ParallelTopology) -> None:
    """Not inside the layers either, where megatron-core turns gradients on."""
    model = build(topology)
    outputs: list[Tensor] = []
    for layer in model.stack.layers:
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    with torch.no_grad():
        run_passes(model, batch_of(model, rows_for_test()), 2)
    assert len(outputs) == 6
    assert not any(hidden.requires_grad for hidden in outputs)
