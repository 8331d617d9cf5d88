"""The engine on one rank: gradients, norm, clipping and the update pass through every covered combination unharmed."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fbt_megatron.errors import ConfigError
from fbt_megatron.parallel.logical_tensor import ParamKind
from fbt_megatron.training.engine import TrainEngine, build_engine
from tests.training.toy import (
    BAG_LAYOUTS,
    EACH_COMBINATION,
    PASSES,
    TILTED,
    Bag,
    Net,
    assert_same_training,
    bag_engine,
    global_batches,
    layout,
    momentum_of,
    run_config,
    settings,
    train_net,
    weights_of,
)

# A matrix gets orthogonalised, whatever wrapper DeepSpeed chooses


@EACH_COMBINATION
@pytest.mark.parametrize(("coefficients", "tolerance"), [("polar_express", 0.1), ("quintic", 0.35)])
def test_every_combination_orthogonalises(topology, zero_stage, precision, coefficients, tolerance):
    engine = bag_engine(topology, zero_stage, precision, coefficients=coefficients, scale="none")
    engine.module.send(matrix=TILTED, vector=torch.ones(2))
    engine.step(settings(lr_normuon=1.0, uses_feedback=False))
    update = -weights_of(engine)["matrix"]
    singular_values = torch.linalg.svdvals(update)
    assert singular_values[0] / singular_values[1] < 1.7  # the gradient's own ratio is 16
    polar = math.sqrt(0.5) * torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    assert (singular_values - 1).abs().max() < tolerance
    assert (update / update.norm() - polar / polar.norm()).abs().max() < tolerance


def test_bf16_without_zero_is_refused(topology):
    with pytest.raises(ConfigError, match="zero_stage=0 with precision=bf16"):
        bag_engine(topology, 0, "bf16")


# No factor is applied to gradients, and one call is one step


@EACH_COMBINATION
@pytest.mark.parametrize("rows_per_microbatch", [1, 2, 4])
def test_accumulation_applies_no_factor(topology, zero_stage, precision, rows_per_microbatch):
    """y = w2 (w1 x), x = 1..4, loss = mean of y: dL/dw1 = 7.5, dL/dw2 = 5 however the rows are grouped."""
    shapes = {"w1": torch.tensor([[2.0]]), "w2": torch.tensor([[3.0]]), "bias": torch.zeros(1)}
    kinds = {"w1": ParamKind.MATRIX, "w2": ParamKind.MATRIX, "bias": ParamKind.VECTOR}
    layouts = {name: layout(name, tuple(value.shape), kinds[name]) for name, value in shapes.items()}
    engine = build_engine(Bag(**shapes), layouts, run_config(zero_stage, precision, momentum=0.0), topology)
    model, inputs = engine.module, torch.tensor([1.0, 2.0, 3.0, 4.0])
    for rows in inputs.split(rows_per_microbatch):
        outputs = model.w2 * (model.w1 * rows.to(model.w1)) + model.bias
        (outputs.sum() / len(inputs)).backward()
    result = engine.step(settings())
    assert momentum_of(engine, "w1").item() == 7.5
    assert momentum_of(engine, "w2").item() == 5.0
    assert result.grad_norm == pytest.approx(math.sqrt(7.5**2 + 5**2 + 1), rel=1e-6)


@EACH_COMBINATION
def test_many_small_gradients_add_up(topology, zero_stage, precision):
    """1024 gradients of 1/1024 add up to 1; a bf16 accumulator stops at 0.25."""
    engine = bag_engine(topology, zero_stage, precision, momentum=0.0)
    for _ in range(1024):
        engine.module.send(matrix=torch.full((2, 2), 1 / 1024), vector=torch.ones(2))
    engine.step(settings(uses_feedback=False))
    torch.testing.assert_close(momentum_of(engine), torch.ones(4), rtol=0, atol=1e-3)


@EACH_COMBINATION
@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_one_update_per_call(topology, zero_stage, precision, num_passes):
    engine = build_engine(Net(), Net.layouts(), run_config(zero_stage, precision), topology)
    for row in torch.arange(8).view(4, 2) % Net.VOCAB:
        (engine.module(row[None], num_passes) / 8).backward()
    assert engine.optimizer.counters()["adam"] == 0
    engine.step(settings(uses_feedback=num_passes > 1))
    assert engine.optimizer.counters() == {"adam": 1, "adam_feedback": int(num_passes > 1)}
    before = momentum_of(engine, "up")
    with pytest.raises(RuntimeError, match="no gradient reached parameters"):
        engine.step(settings(uses_feedback=num_passes > 1))  # the first call left no gradient behind
    torch.testing.assert_close(momentum_of(engine, "up"), before, rtol=0, atol=0)


# Rates per group, norm and clipping


@EACH_COMBINATION
def test_each_group_keeps_its_own_rate(topology, zero_stage, precision):
    """With constant gradients both rules move a weight by rate times a constant, so weights show the rates in use."""
    engine = bag_engine(topology, zero_stage, precision, scale="none")
    previous, moved = masters_of(engine), []
    for update in range(1, 5):
        engine.module.send(matrix=TILTED, vector=torch.ones(2))
        engine.step(settings(lr_normuon=0.02 * update / 4, lr_adam=0.0003 * update / 4, uses_feedback=False))
        current = masters_of(engine)
        moved.append([(current[name] - previous[name]).norm().item() for name in ("matrix", "vector")])
        previous = current
    matrix_rates = [0.005, 0.01, 0.015, 0.02]
    vector_rates = [7.5e-5, 1.5e-4, 2.25e-4, 3e-4]
    size_of_direction = moved[0][0] / matrix_rates[0]
    assert [m / size_of_direction for m, _ in moved] == pytest.approx(matrix_rates, rel=1e-3)
    assert [v / math.sqrt(2) for _, v in moved] == pytest.approx(vector_rates, rel=1e-3)
    assert size_of_direction == pytest.approx(math.sqrt(2), rel=0.1)  # a 2x2 polar factor


def masters_of(engine: TrainEngine) -> dict[str, Tensor]:
    """fp32 weights by parameter, flat, of one rank that holds everything."""
    return {fragment.layout.name: master.clone() for fragment, master in engine.master_fragments()}


@EACH_COMBINATION
@pytest.mark.parametrize(("norm", "grad_clip", "factor"), [(13.0, 0.0, 1.0), (6.5, 10.0, 1.0), (13.0, 1.0, 1 / 13)])
def test_clipping_acts_on_the_raw_gradient(topology, zero_stage, precision, norm, grad_clip, factor):
    engine = bag_engine(topology, zero_stage, precision, grad_clip=grad_clip, momentum=0.0)
    matrix, vector = torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([12.0, 0.0])  # together of norm 13
    engine.module.send(matrix=matrix * norm / 13, vector=vector * norm / 13)
    result = engine.step(settings(uses_feedback=False))
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(momentum_of(engine), (matrix * norm / 13 * factor).flatten(), rtol=1e-6, atol=0)


# Guards against steps that do nothing


@EACH_COMBINATION
def test_a_parameter_without_gradient_is_named(topology, zero_stage, precision):
    engine = bag_engine(topology, zero_stage, precision)
    engine.module.send(matrix=TILTED)
    with pytest.raises(RuntimeError, match="fusion, vector"):
        engine.step(settings(uses_feedback=True))


@EACH_COMBINATION
def test_zero_norm_in_the_first_steps_is_an_error(topology, zero_stage, precision):
    engine = bag_engine(topology, zero_stage, precision)
    engine.module.send(matrix=torch.zeros(2, 2), vector=torch.zeros(2))
    with pytest.raises(RuntimeError, match="do not reach the optimizer"):
        engine.step(settings(uses_feedback=False))


@EACH_COMBINATION
def test_weights_load_into_parameters_and_masters(topology, zero_stage, precision):
    engine = bag_engine(topology, zero_stage, precision)
    weights = {name: torch.rand(entry.shape) for name, entry in BAG_LAYOUTS.items()}
    engine.load_weights(weights)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.detach(), weights[name].to(dtype))
        assert torch.equal(masters_of(engine)[name], weights[name].flatten())
    engine.module.send(matrix=TILTED, vector=torch.ones(2))
    engine.step(settings(lr_adam=0.01, uses_feedback=False))
    # Adam's first update is the rate itself, and starts from the fp32 weight.
    torch.testing.assert_close(masters_of(engine)["vector"], weights["vector"] - 0.01, rtol=0, atol=1e-6)
    assert torch.equal(masters_of(engine)["fusion"], weights["fusion"].flatten())
    with pytest.raises(ValueError, match="vector"):
        engine.load_weights({name: value for name, value in weights.items() if name != "vector"})


# Training as an independent implementation does it


def plain_training() -> dict[str, list]:
    """The same five steps, written from the equations for one process and whole tensors."""
    net, norms, weights = Net(), [], []
    state = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    squares = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for update, (batch, num_passes) in enumerate(zip(global_batches(), PASSES, strict=True), start=1):
        names = [name for name, _ in net.named_parameters() if num_passes > 1 or name != "fusion"]
        parameters = [getattr(net, name) for name in names]
        gradients = torch.autograd.grad(net(batch, num_passes) / batch.numel(), parameters)
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        with torch.no_grad():
            for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
                rule = plain_adam if name in ("embedding", "norm") else plain_normuon
                rule(parameter, gradient * min(1.0, 1.0 / (norm + 1e-6)), state[name], squares[name], update)
        norms.append(norm)
        weights.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return {"norms": norms, "weights": weights}


def plain_normuon(weight: Tensor, gradient: Tensor, momentum: Tensor, row_moment: Tensor, _update: int) -> None:
    momentum.copy_(0.95 * momentum + 0.05 * gradient)
    x = momentum / (1.02 * momentum.norm())
    for a, b, c in (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    row_moment.copy_(0.95 * row_moment + 0.05 * (x * x).mean(1, keepdim=True))  # the same number along each row
    direction = x / (row_moment.sqrt() + 1e-8)
    direction *= x.norm() / direction.norm()
    rows, cols = weight.shape
    weight.copy_((1 - 0.1 * 0.1) * weight - 0.1 * math.sqrt(rows / cols) * direction)


def plain_adam(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, update: int) -> None:
    mean.copy_(0.9 * mean + 0.1 * gradient)
    square.copy_(0.95 * square + 0.05 * gradient**2)
    weight -= 0.01 * (mean / (1 - 0.9**update)) / ((square / (1 - 0.95**update)).sqrt() + 1e-8)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_one_rank_trains_as_the_equations_say(topology, zero_stage):
    trained = train_net(topology, zero_stage, "fp32")
    assert_same_training(trained, plain_training(), tolerance=1e-5)
    start, first = dict(Net().named_parameters()), trained["weights"][0]
    assert torch.equal(first["fusion"], start["fusion"])  # bit-identical: a step of one pass does not use it
    assert torch.equal(trained["weights"][1]["fusion"], trained["weights"][2]["fusion"])


def test_bf16_trains_as_the_equations_say_up_to_its_precision(topology):
    assert_same_training(train_net(topology, 1, "bf16"), plain_training(), tolerance=0.05)


# A machine without tools

ALONE = """
import torch
from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.topology import build_topology, init_distributed
from fbt_megatron.training.engine import build_engine
from tests.training.toy import Net, run_config, settings

init_distributed()
topology = build_topology(ParallelConfig())
for combination in ((0, "fp32"), (1, "fp32"), (1, "bf16")):
    engine = build_engine(Net(), Net.layouts(), run_config(*combination), topology)
    (engine.module(torch.zeros(1, 3, dtype=torch.long), 2) / 3).backward()
    assert not engine.step(settings()).skipped
print("done")
"""


def test_needs_no_compiler_and_prints_nothing():
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"} | {"PATH": ""}
    ran = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done\n"
