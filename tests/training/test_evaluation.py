"""Evaluation of many clients at once gives what one client after another gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedclade import DataError, LocalTraining, ModelError
from fedclade.core import IGNORED
from fedclade.core.queries import Evaluation, Round
from fedclade.data.federation import ClientData, Federation, Pool
from fedclade.models import build_model
from fedclade.tasks import FittedTask
from fedclade.training import SimulatedClients, evaluation
from fedclade.training.evaluation import score
from tests.reference import evaluation as reference
from tests.tiny import VIEWS, federation_of, linear, perceptron, simulated
from tests.training.worlds import Counts, Mixes

SIDE, LABELS, WORDS, TIMES = 4, 4, 7, 5
IDS = (0, 1, 2, 3, 4, 5, 6, 7)
MAPS = [None if view is None else torch.tensor(view) for view in VIEWS]


def pool_of(x: Tensor, y: Tensor, outputs: int, **more) -> Pool:
    everything = np.arange(len(x))
    return Pool(
        "tiny", x, y, np.zeros(len(x), dtype=np.int64), everything, everything[:0], outputs, **more
    )


def clients_of(n: int, maps: list[Tensor | None], turns: int) -> tuple[ClientData, ...]:
    """Return eight clients of n examples: they share test data, overlap in it, or have their own, one of them twice.

    Every other one is turned if ``turns`` says so; training data are everyone's own and of different sizes.
    """
    draw = np.random.default_rng(3)
    order = draw.permutation(n)
    shared, parts = (
        order[: n // 2],
        np.array_split(order[n // 2 :], np.cumsum([3, 5, 2, 9, 4, 1, 6])),
    )
    tests = [
        shared,
        shared,
        shared,
        shared[5:],
        shared[::-2].copy(),
        *parts[:2],
        np.repeat(parts[2], 2),
    ]
    return tuple(
        ClientData(
            i, f"c{i}", i, parts[i], parts[-i - 1], tests[i], maps[i % len(maps)], turns * (i % 3)
        )
        for i in IDS
    )


def images() -> Federation:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (120, 1, SIDE, SIDE), generator=draw, dtype=torch.uint8)
    y = torch.randint(LABELS, (120,), generator=draw)
    return Federation(pool_of(x, y, LABELS, mean=0.4, std=0.3), clients_of(120, MAPS, turns=1))


def sentences() -> Federation:
    """Text with padding; two clients see other words where the others see the pool's."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randint(WORDS, (100, TIMES), generator=draw) for _ in range(2))
    padding = torch.randint(1, TIMES + 1, (100, 1), generator=draw)
    y = y.masked_fill(torch.arange(TIMES) >= padding, IGNORED)
    return Federation(pool_of(x, y, WORDS, task="language"), clients_of(100, [None], turns=0))


def perceptron_of_images(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, 8), *layers, nn.ReLU(), nn.Linear(8, LABELS)
    )


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    norm.running_mean, norm.running_var = (
        torch.tensor([0.1, -0.2, 0.3]),
        torch.tensor([0.5, 2.0, 1.0]),
    )
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3), norm, nn.ReLU(), nn.Dropout2d(0.5)),
        nn.Flatten(),
        nn.Linear(12, LABELS),
    )


class Reads(nn.Module):
    """Predicts next words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.lstm, self.output = (
            nn.Embedding(WORDS, 4),
            nn.LSTM(4, 6, batch_first=True),
            nn.Linear(6, WORDS),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(self.words(x))[0])


def models_of(clients: SimulatedClients, module: nn.Module, n: int = 3) -> Tensor:
    first = clients.layout.flatten(module)
    draw = torch.Generator().manual_seed(1)
    models = first.repeat(n, 1)
    models[1:] += 0.3 * torch.rand(n - 1, len(first), generator=draw)
    return models


def agree(got: Evaluation, expected: list[tuple[float, float, int]]) -> None:
    accuracies, losses, counts = zip(*expected, strict=True)
    assert got.scores[:, -1].tolist() == list(accuracies)
    assert got.losses.tolist() == pytest.approx(losses, rel=1e-5)
    assert got.examples.tolist() == list(counts)


WORLDS: dict[str, tuple[Callable[[], Federation], Callable[[], nn.Module]]] = {
    "perceptron": (images, perceptron_of_images),
    "batch norm": (images, convolutional),
    "dropout": (images, lambda: perceptron_of_images(nn.BatchNorm1d(8), nn.Dropout(0.5))),
    "language": (sentences, Reads),
}


@pytest.mark.parametrize("memory", [None, 1], ids=["kept", "fetched"])
@pytest.mark.parametrize("world", WORLDS)
def test_evaluation_equals_that_of_one_client_after_another(world, memory):
    """Whether clients share their test data, overlap or have their own, and however they see images and labels."""
    federation, module = (make() for make in WORLDS[world])
    clients = SimulatedClients(federation, module, memory=memory)
    models, rows = models_of(clients, module), [0, 0, 1, 0, 0, 2, 2, 1]
    for split in ("test", "validation", "train", "test"):
        module.train()  # as a round of training leaves it
        got = clients.evaluate(IDS, models, rows, split)
        assert got.ids == IDS
        agree(got, reference.evaluate(federation, module, IDS, models, rows, split))


def test_the_worlds_are_not_trivial():
    """Views, turns and models make a difference, and some predictions are right."""
    federation, module = images(), convolutional()
    clients = SimulatedClients(federation, module)
    losses = clients.evaluate([0, 1, 2, 0], models_of(clients, module), [0, 0, 0, 1], "test").losses
    assert len(set(losses.tolist())) == 4


@pytest.mark.parametrize("world", WORLDS)
def test_clients_can_be_asked_about_several_models(world):
    """As IFCA asks everyone about every model, on training data; and one of them twice about the same."""
    federation, module = (make() for make in WORLDS[world])
    clients = SimulatedClients(federation, module)
    models = models_of(clients, module)
    ids, rows = [*IDS, *IDS, *IDS, 3, 3], [*[0] * 8, *[1] * 8, *[2] * 8, 1, 1]
    got = clients.evaluate(ids, models, rows, "train")
    assert got.ids == tuple(ids)
    agree(got, reference.evaluate(federation, module, ids, models, rows, "train"))
    assert got.losses[-1] == got.losses[-2] == got.losses[8 + 3]


def test_labels_of_language_data_may_differ_too():
    """Where there is a target: padding stays padding."""
    federation = sentences()
    swapped = torch.tensor([1, 0, 2, 3, 4, 6, 5])
    # so that the reference can map it
    whole = federation.pool.y.where(federation.pool.y != IGNORED, 2)
    federation = replace(
        federation,
        pool=replace(federation.pool, y=whole),
        clients=tuple(
            replace(c, label_map=swapped if c.id % 2 else None) for c in federation.clients
        ),
    )
    module = Reads()
    clients = SimulatedClients(federation, module)
    models = models_of(clients, module)
    agree(
        clients.evaluate(IDS, models, [0] * 8, "test"),
        reference.evaluate(federation, module, IDS, models, [0] * 8, "test"),
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("entries", "largest", "examples"), [(1, 1024, 2**20), (200, 3, 10), (1000, 7, 1)]
)
def test_the_size_of_passes_changes_nothing(world, entries, largest, examples, monkeypatch):
    federation, module = (make() for make in WORLDS[world])
    models = models_of(SimulatedClients(federation, module), module)
    rows = [0, 0, 1, 0, 0, 2, 2, 1]
    whole = SimulatedClients(federation, module).evaluate(IDS, models, rows, "test")
    monkeypatch.setattr(evaluation, "ENTRIES_AT_A_TIME_ON_CPU", entries)
    monkeypatch.setattr(evaluation, "LARGEST_PASS", largest)
    monkeypatch.setattr(evaluation, "EXAMPLES_AT_A_TIME", examples)
    cut = SimulatedClients(federation, module).evaluate(IDS, models, rows, "test")
    assert torch.equal(cut.scores[:, -1], whole.scores[:, -1])
    torch.testing.assert_close(cut.losses, whole.losses, rtol=1e-6, atol=0)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel())
        return result


@pytest.mark.parametrize(("world", "limit"), [("batch norm", 500), ("language", 1500)])
def test_no_tensor_is_larger_than_the_limit(world, limit, monkeypatch):
    """Of 190 images of 16 pixels, and of 70 sentences of 5 words with 24 gates each; clients hold 277 examples."""
    federation, module = (make() for make in WORLDS[world])
    clients = SimulatedClients(federation, module, memory=1)
    monkeypatch.setattr(evaluation, "ENTRIES_AT_A_TIME_ON_CPU", limit)
    monkeypatch.setattr(evaluation, "EXAMPLES_AT_A_TIME", 100)
    with Largest() as seen:
        clients.evaluate(IDS, models_of(clients, module), [0] * 8, "test")
    assert limit // 2 < seen.entries <= limit


@pytest.fixture
def passed() -> tuple[nn.Module, list[int]]:
    """A module, and the number of inputs of each pass through it."""
    module, sizes = perceptron_of_images(), list[int]()
    module.register_forward_pre_hook(lambda _module, inputs: sizes.append(len(inputs[0])))
    return module, sizes


def test_every_input_passes_through_a_model_once(passed):
    """Clients 0 to 4 hold 60 of the images in different parts, in three turns; 5, 6 and 7 hold 3, 5 and 2."""
    module, sizes = passed
    federation = images()
    upright = replace(
        federation, clients=tuple(replace(c, quarter_turns=0) for c in federation.clients)
    )
    for world, distinct in ((upright, 60 + 3 + 5 + 2), (federation, 3 * 60 + 3 + 5 + 2)):
        clients = SimulatedClients(world, module)
        models = models_of(clients, module)
        clients.evaluate(IDS, models, [0] * 8, "test")  # which tries the module, too
        sizes.clear()
        clients.evaluate([*IDS, *IDS], models, [0] * 8 + [2] * 8, "test")
        assert len(sizes) == 2
        assert sum(sizes) == 2 * distinct


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how many inputs are fetched from the pool each time."""
    sizes: list[int] = []
    inputs = Pool.inputs
    monkeypatch.setattr(
        Pool,
        "inputs",
        lambda self, which, turns=0: sizes.append(len(which)) or inputs(self, which, turns),
    )
    return sizes


def test_what_fits_is_fetched_once(fetched):
    clients, params = simulated(federation_of([0, 1]), linear())
    clients.evaluate([0, 1], params[None], [0, 0], "test")
    fetched.clear()
    clients.evaluate([1, 0], params[None], [0, 0], "test")
    assert fetched == []


def test_what_does_not_fit_is_fetched_as_it_is_needed(fetched, monkeypatch):
    clients = SimulatedClients(federation_of([0, 1]), linear(), memory=1)
    params = clients.layout.flatten(linear())
    monkeypatch.setattr(evaluation, "LARGEST_PASS", 16)
    clients.evaluate([0, 1], params[None], [0, 0], "test")
    fetched.clear()
    clients.evaluate([0, 1], params[None], [0, 0], "test")
    assert fetched == [16, 16, 8]


class OwnStatistics(nn.Module):
    """BatchNorm that keeps no statistics, and takes those of the batch in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, LABELS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("make", [OwnStatistics, lambda: nn.Sequential(Mixes(), linear())])
def test_clients_do_not_meet_in_a_module_that_mixes_examples(make):
    """Whatever clients are evaluated beside it, a client sees the results of its own examples."""
    module = make()
    clients, params = simulated(federation_of([0, 1, 2]), module)
    together = clients.evaluate([0, 1, 2], params[None], [0] * 3, "test")
    alone = [clients.evaluate([client], params[None], [0], "test") for client in range(3)]
    assert together.losses.tolist() == pytest.approx(
        [float(one.losses[0]) for one in alone], rel=1e-6
    )
    assert together.scores[:, 0].tolist() == [float(one.scores[:, 0][0]) for one in alone]


class Drifts(Counts):
    """Gives something else each time it is called."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.arange(8.0) * self.calls


def test_what_forward_does_to_buffers_reaches_nobody_else():
    module = nn.Sequential(nn.Linear(6, 8), Drifts(), nn.Linear(8, LABELS))
    clients, params = simulated(federation_of([0, 1]), module)
    models = params.repeat(2, 1)
    losses = clients.evaluate([0, 1, 1], models, [0, 0, 1], "test").losses
    assert losses[1] == losses[2]
    assert torch.equal(clients.evaluate([0, 1], models, [0, 0], "test").losses, losses[:2])
    assert torch.equal(models, params.repeat(2, 1))


def test_clients_train_after_they_evaluated_on_their_training_data():
    """What an evaluation gathers serves training, though it was gathered where no gradients are taken."""
    federation, spec = federation_of([0, 1]), LocalTraining(lr=0.1)
    clients, params = simulated(federation, perceptron())
    clients.evaluate([0, 1], params[None], [0, 0], "train")
    fresh, _ = simulated(federation, perceptron())
    updates, expected = (
        c.train([0, 1], params[None], [0, 0], Round(1, spec)) for c in (clients, fresh)
    )
    assert torch.equal(updates.deltas, expected.deltas)


def test_nobody_can_be_asked():
    clients, params = simulated(federation_of([0]), linear())
    assert clients.evaluate([], params[None], [], "test").scores[:, 0].tolist() == []


def test_a_split_without_examples_is_an_error_that_names_the_client():
    federation = federation_of([0, 1])
    bare = replace(federation.clients[1], validation=np.arange(0))
    clients, params = simulated(
        replace(federation, clients=(federation.clients[0], bare)), linear()
    )
    text = "client 1 has no validation examples; set data.validation_fraction above 0"
    with pytest.raises(DataError, match=text):
        clients.evaluate([0, 1], params[None], [0, 0], "validation")


def test_a_model_of_another_length_is_refused():
    clients, params = simulated(federation_of([0]), linear())
    n = len(params)
    with pytest.raises(
        ModelError, match=rf"the vector of a model should have {n} entries, got shape \({n - 1},\)"
    ):
        clients.evaluate([0], params[None, 1:], [0], "test")


def test_every_client_needs_a_model():
    clients, params = simulated(federation_of([0, 1]), linear())
    with pytest.raises(ValueError, match="shorter"):
        clients.evaluate([0, 1], params[None], [0], "test")


def test_score_counts_right_answers_and_nats_of_each_example():
    """Logits (0, 1) predict label 1 at −log p = log(1 + 1/e), against log(1 + e) for label 0."""
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    right, nats, counted = score(
        FittedTask(), logits, torch.tensor([0, 0, 1]), torch.tensor([1, 0, 1])
    ).tolist()
    hit, miss = math.log(1 + math.exp(-1)), math.log(1 + math.e)
    assert (right, counted) == ([1, 0, 0], [1, 1, 1])
    assert nats == pytest.approx([hit, miss, miss], rel=1e-6)


def test_padded_places_do_not_count():
    """Of the targets (0, 1, padding, padding), the first is predicted; logits are (1, 0, 0) everywhere."""
    logits = torch.tensor([1.0, 0.0, 0.0]).expand(1, 4, 3).contiguous()
    seen = torch.tensor([[0, 1, IGNORED, IGNORED]])
    right, nats, counted = score(FittedTask(), logits, torch.tensor([0]), seen).flatten().tolist()
    assert (right, counted) == (1, 2)
    assert nats == pytest.approx(2 * math.log(math.e + 2) - 1)


@pytest.mark.parametrize(("inputs", "threads"), [(30, 1), (31, 8)])
def test_only_passes_with_enough_work_get_more_than_one_thread(inputs, threads, monkeypatch):
    """2·900² operations for each example, which are 5·10⁷ from 31 examples on."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    module = nn.Linear(900, 900)
    assert evaluation.Traits.of(module, torch.zeros(4, 900)).threads(inputs) == threads


@pytest.mark.parametrize("entry", [math.nan, math.inf, 1e38])
def test_a_model_that_has_diverged_can_be_evaluated(entry):
    """Its outputs are NaN or infinite, by which passes cannot be compared."""
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, entry)
    traits = evaluation.Traits.of(module, torch.ones(4, 3) * torch.tensor([1.0, -1.0, 100.0]))
    assert not traits.mixes


def test_a_pass_is_as_large_as_its_largest_tensor_allows():
    """FL+HC's network: 32 channels of 24 × 24 behind the first convolution, of which 227 are 2²² entries."""
    module = build_model("cnn", input_shape=(1, 28, 28), outputs=10).eval()
    traits = evaluation.Traits.of(module, torch.zeros(4, 1, 28, 28))
    assert traits.entries == 32 * 24 * 24
    assert traits.pass_size(2**22) == 227
    assert traits.pass_size(2**30) == evaluation.LARGEST_PASS
    assert traits.pass_size(1) == 1
    assert not traits.mixes
