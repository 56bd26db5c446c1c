from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade import LocalTraining
from fedclade.core import IGNORED, rng
from fedclade.core.params import Layout
from fedclade.tasks import FittedTask
from fedclade.training import loop


def linear(inputs: int = 2, outputs: int = 2) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def one_example() -> tuple[Tensor, Tensor]:
    return torch.tensor([[1.0, 2.0]]), torch.tensor([0])


def examples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, generator=draw), torch.randint(2, (n,), generator=draw)


def trained(
    model: Tensor, data, module=None, seed: int = 0, anchor: Tensor | None = None, **spec
) -> Tensor:
    module = module or linear()
    settings, draw = LocalTraining(**spec), rng.torch_generator(seed, "t")
    return loop.train(
        module, Layout.of(module), model, data, settings, settings.lr, FittedTask(), draw, anchor
    )[0]


def gradient_at_zero() -> Tensor:
    """With zero weights both labels have probability ½: ∂/∂W = (p − onehot) xᵀ = [[−½, −1], [½, 1]]."""
    return torch.tensor([(0.5 - 1) * 1, (0.5 - 1) * 2, 0.5 * 1, 0.5 * 2])


def gradient_at(model: Tensor, data) -> Tensor:
    weight = model.view(2, 2).clone().requires_grad_()
    loss = functional.cross_entropy(data[0] @ weight.T, data[1])
    return torch.autograd.grad(loss, weight)[0].flatten()


def test_one_step_is_minus_lr_times_the_gradient():
    """Eq. 1 with one step of SGD."""
    update = trained(torch.zeros(4), one_example(), lr=0.3)
    torch.testing.assert_close(update, -0.3 * gradient_at_zero())


def test_two_epochs_of_full_batches_are_two_steps():
    data = examples(5)
    theta = torch.tensor([0.1, -0.2, 0.3, 0.4])
    middle = theta - 0.5 * gradient_at(theta, data)
    end = middle - 0.5 * gradient_at(middle, data)
    torch.testing.assert_close(trained(theta, data, epochs=2, batch_size=5, lr=0.5), end - theta)


def test_momentum_adds_the_last_step():
    """The second step is −lr (0.9 g₁ + g₂), and a round starts without momentum."""
    data = one_example()
    first = -0.1 * gradient_at_zero()
    second = -0.1 * (0.9 * gradient_at_zero() + gradient_at(first, data))
    update = trained(torch.zeros(4), data, epochs=2, lr=0.1, momentum=0.9)
    torch.testing.assert_close(update, first + second)
    torch.testing.assert_close(trained(torch.zeros(4), data, epochs=1, lr=0.1, momentum=0.9), first)


def test_weight_decay_adds_a_multiple_of_the_parameters_to_the_gradient():
    theta = torch.tensor([1.0, 2.0, 3.0, 4.0])
    update = trained(theta, one_example(), lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(update, -0.1 * (gradient_at(theta, one_example()) + 0.5 * theta))


def test_proximal_term_adds_mu_times_the_way_gone():
    """FedProx: ∇(μ/2·‖θ − θ_received‖²) = μ (θ − θ_received), which is zero in the first step."""
    data, theta = one_example(), torch.tensor([0.5, 0.0, -0.5, 1.0])
    first = -0.2 * gradient_at(theta, data)
    second = -0.2 * (gradient_at(theta + first, data) + 3.0 * first)
    torch.testing.assert_close(trained(theta, data, epochs=1, lr=0.2, mu=3.0), first)
    torch.testing.assert_close(trained(theta, data, epochs=2, lr=0.2, mu=3.0), first + second)


def test_proximal_term_pulls_to_the_anchor_from_the_first_step_on():
    """Ditto: ∇(λ/2·‖v − w‖²) = λ (v − w), while the update is counted from v."""
    data, v, w = (
        one_example(),
        torch.tensor([0.5, 0.0, -0.5, 1.0]),
        torch.tensor([0.0, 1.0, 2.0, 3.0]),
    )
    first = -0.2 * (gradient_at(v, data) + 3.0 * (v - w))
    second = -0.2 * (gradient_at(v + first, data) + 3.0 * (v + first - w))
    torch.testing.assert_close(trained(v, data, anchor=w, epochs=2, lr=0.2, mu=3.0), first + second)
    assert torch.equal(trained(v, data, anchor=w, lr=0.2), trained(v, data, lr=0.2))


def test_a_gradient_is_clipped_with_the_proximal_term_and_before_decay_and_momentum():
    """v₁ = c₁ + wθ, v₂ = 0.9 v₁ + c₂ + wθ₁, where c is the gradient of loss and proximal term, of norm 0.1 at most."""
    data, theta, anchor = (
        one_example(),
        torch.tensor([0.5, 0.0, -0.5, 1.0]),
        torch.tensor([0.0, 1.0, 2.0, 3.0]),
    )

    def clipped(model: Tensor) -> Tensor:
        gradient = gradient_at(model, data) + 3.0 * (model - anchor)
        assert gradient.norm() > 1
        return 0.1 * gradient / gradient.norm()

    velocity = clipped(theta) + 0.5 * theta
    middle = theta - 0.2 * velocity
    velocity = 0.9 * velocity + clipped(middle) + 0.5 * middle
    settings = {"lr": 0.2, "mu": 3.0, "momentum": 0.9, "weight_decay": 0.5, "clip_norm": 0.1}
    got = trained(theta, data, anchor=anchor, epochs=2, **settings)
    torch.testing.assert_close(got, middle - 0.2 * velocity - theta, rtol=1e-4, atol=0)


def test_a_gradient_below_the_norm_stays():
    data, theta = one_example(), torch.tensor([0.5, 0.0, -0.5, 1.0])
    assert torch.equal(trained(theta, data, clip_norm=100.0), trained(theta, data))


def test_the_last_batch_of_an_epoch_may_be_smaller():
    """5 examples in batches of 2: the third step is the gradient of the one example left, in drawn order."""
    x, y = examples(5)
    order = torch.randperm(5, generator=rng.torch_generator(7, "t"))
    theta = torch.zeros(4)
    for batch in (order[:2], order[2:4], order[4:]):
        theta = theta - 0.5 * gradient_at(theta, (x[batch], y[batch]))
    torch.testing.assert_close(trained(torch.zeros(4), (x, y), seed=7, batch_size=2, lr=0.5), theta)


def test_the_loss_is_the_mean_over_all_examples_seen():
    """Two one-example steps: −log ½, then the loss after the first step."""
    module = linear()
    spec = LocalTraining(epochs=2, lr=0.3)
    _, loss = loop.train(
        module,
        Layout.of(module),
        torch.zeros(4),
        one_example(),
        spec,
        0.3,
        FittedTask(),
        rng.torch_generator(0, "t"),
    )
    margin = 0.3 * 5.0  # after the step the logits are ±0.3·(½·1 + 1·2), apart by 0.3·5
    assert loss == pytest.approx((math.log(2) + math.log(1 + math.exp(-margin))) / 2)


def test_the_given_step_size_counts_not_the_first_rounds():
    module = linear()
    draw = rng.torch_generator(0, "t")
    update, _ = loop.train(
        module,
        Layout.of(module),
        torch.zeros(4),
        one_example(),
        LocalTraining(lr=0.3),
        0.03,
        FittedTask(),
        draw,
    )
    torch.testing.assert_close(update, -0.03 * gradient_at_zero())


def dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), linear(2, 2))


def test_dropout_belongs_to_the_key():
    data, theta = examples(8), torch.tensor([0.1, 0.2, 0.3, 0.4])
    torch.manual_seed(1)
    first = trained(theta, data, dropout(), batch_size=8, epochs=3)
    torch.manual_seed(2)
    assert torch.equal(trained(theta, data, dropout(), batch_size=8, epochs=3), first)
    assert not torch.equal(trained(theta, data, dropout(), seed=1, batch_size=8, epochs=3), first)
    assert not torch.equal(trained(theta, data, batch_size=8, epochs=3), first), "dropout was off"


def test_training_leaves_the_global_generator_alone():
    module, data = dropout(), examples(8)
    before = torch.get_rng_state()
    trained(torch.zeros(4), data, module)
    assert torch.equal(torch.get_rng_state(), before)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(2), linear(2, 2))


def test_running_statistics_travel_with_the_update():
    """One step with momentum 0.1: the running mean moves from 0 by a tenth of the batch's mean."""
    module, data = batch_norm(), examples(6)
    layout = Layout.of(module)
    update = trained(layout.flatten(module), data, module, batch_size=6)
    moved = layout.unflatten(update)
    torch.testing.assert_close(moved["0.running_mean"], 0.1 * data[0].mean(0))
    assert int(moved["0.num_batches_tracked"]) == 1


def test_frozen_parameters_stay():
    module = nn.Sequential(linear(2, 2), linear(2, 2))
    module[0].requires_grad_(False)
    before, layout = module[0].weight.clone(), Layout.of(module)
    update = layout.unflatten(
        trained(layout.flatten(module), examples(6), module, weight_decay=0.1)
    )
    assert torch.equal(module[0].weight, before)
    assert list(update) == ["1.weight"]
    assert update["1.weight"].abs().max() > 0


def test_batch_norm_in_eval_keeps_its_statistics():
    module, data = batch_norm(), examples(6)
    module[0].eval()
    layout = Layout.of(module)
    moved = layout.unflatten(trained(layout.flatten(module), data, module, batch_size=6))
    assert "0.running_mean" not in moved  # it is frozen
    assert module[0].running_mean.abs().max() == module[0].num_batches_tracked == 0
    assert moved["0.weight"].abs().max() > 0


def test_a_parameter_that_the_loss_does_not_reach_stays():
    module = nn.Sequential(linear(2, 2))
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    layout = Layout.of(module)
    update = layout.unflatten(trained(layout.flatten(module), examples(6), module, mu=0.5))
    assert update["unused"].tolist() == [0, 0, 0]
    gradient, _ = loop.gradient(
        module, layout, layout.flatten(module), examples(6), FittedTask(), 4
    )
    assert layout.unflatten(gradient)["unused"].tolist() == [0, 0, 0]


class Places(nn.Module):
    """Logits for each of several places in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.ones(*x.shape, 3)


def test_padded_places_do_not_count():
    """Targets [0, 1, padding, padding]: the gradient at zero is the mean of (⅓ − onehot) over the first two."""
    module, layout = Places(), Layout.of(Places())
    data = torch.zeros(1, 4), torch.tensor([[0, 1, IGNORED, IGNORED]])
    expected = -torch.tensor([(1 / 3 - 1 + 1 / 3) / 2, (1 / 3 + 1 / 3 - 1) / 2, 1 / 3])
    torch.testing.assert_close(trained(torch.zeros(3), data, module, lr=1.0), expected)
    gradient, loss = loop.gradient(module, layout, torch.zeros(3), data, FittedTask(), 1)
    torch.testing.assert_close(gradient, expected)
    assert loss == pytest.approx(math.log(3))


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_gradient_is_minus_that_of_the_mean_loss_however_it_is_cut(chunk):
    """Eq. 50: −∇r_i over all examples, ragged chunks included."""
    data, theta = examples(7), torch.tensor([0.1, -0.2, 0.3, 0.4])
    update, loss = loop.gradient(linear(), Layout.of(linear()), theta, data, FittedTask(), chunk)
    torch.testing.assert_close(update, -gradient_at(theta, data))
    assert loss == pytest.approx(
        float(functional.cross_entropy(data[0] @ theta.view(2, 2).T, data[1]))
    )


def test_gradient_is_of_the_model_as_it_is_served():
    """No dropout, and BatchNorm with its running statistics, which stay as they are."""
    data = examples(6)
    plain, _ = loop.gradient(linear(), Layout.of(linear()), torch.ones(4), data, FittedTask(), 6)
    dropped, _ = loop.gradient(
        dropout(), Layout.of(dropout()), torch.ones(4), data, FittedTask(), 6
    )
    torch.testing.assert_close(dropped, plain)
    module = batch_norm()
    layout = Layout.of(module)
    update, _ = loop.gradient(module, layout, layout.flatten(module), data, FittedTask(), 6)
    assert update[layout.n_parameters :].abs().max() == 0


@pytest.mark.parametrize(("large", "times"), [(4 * 4, 12), (4 * 4 + 1, 0)])
def test_memory_of_large_gradients_is_returned_after_the_first_steps_and_then_rarely(
    large: int, times: int, monkeypatch: pytest.MonkeyPatch
):
    """After steps 1 to 7, 8, 16, 32 and the last of 40, and before the first."""
    returned: list[None] = []
    monkeypatch.setattr(loop, "return_freed_memory", lambda: returned.append(None))
    monkeypatch.setattr(loop, "LARGE", large)
    settings = LocalTraining(batch_size=1, lr=0.1)

    def update(returns_memory: bool) -> Tensor:
        module, draw = linear(), rng.torch_generator(0, "t")
        model = torch.tensor([0.1, -0.2, 0.3, 0.4])
        return loop.train(
            module,
            Layout.of(module),
            model,
            examples(40),
            settings,
            settings.lr,
            FittedTask(),
            draw,
            returns_memory=returns_memory,
        )[0]

    assert torch.equal(update(True), update(False))
    assert len(returned) == times
