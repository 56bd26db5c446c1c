"""Private clients reply alike whatever their data are: in kind, fields, lengths, counters, and bookings."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedclade import ConfigError, DataError, DifferentialPrivacy, ExamplePrivacy, UpdateError
from fedclade.channel import Budget, Ledger
from fedclade.core import KEEPS_NONE, LARGEST_NORM, ModelError, PolicyError, make_usable
from fedclade.core.errors import PrivacyError
from fedclade.core.updates import Updates
from fedclade.data.federation import Federation
from fedclade.flower import LocalNode, client_app, wire
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.private_replies import (
    BUDGET_SPENT,
    FAILED,
    FORBIDDEN,
    NOT_POSSIBLE,
    without_details,
)
from tests.flower.grids import FOUR, LOCAL, grid_of, node_of, request_to
from tests.flower.test_client_handler import LAYOUT, MODEL, OPEN, ask, update_of
from tests.tiny import federation_of, perceptron

CLIENT = DifferentialPrivacy(clip_norm=0.5, noise_multiplier=2.0)
EXAMPLE = ExamplePrivacy(clip_norm=0.5, noise_multiplier=2.0)
LEDGERS = ("privacy.json", "example-privacy.json", "policy.json")
HUGE = torch.finfo(torch.float32).max


def alone(change: Any = None) -> Federation:
    """Return the first client's federation; ``change`` is applied to the inputs of its training examples."""
    federation = federation_of(FOUR).alone(0)
    if change is None:
        return federation
    inputs = federation.pool.x.clone()
    places = torch.from_numpy(federation.clients[0].train)
    inputs[places] = change(inputs[places])
    return replace(federation, pool=replace(federation.pool, x=inputs))


def one_outlier(inputs: torch.Tensor) -> torch.Tensor:
    inputs[0] = 1e30
    return inputs


def all_huge(inputs: torch.Tensor) -> torch.Tensor:
    return torch.full_like(inputs, 1e37)


DATA = {"as it is": None, "one outlier": one_outlier, "all huge": all_huge}

QUERIES: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "large step": {"spec": wire.to_json(replace(LOCAL, lr=1e25))},
    "huge model": {"sent": {"model": torch.full_like(MODEL, 1e37)}},
    "model of NaN": {"sent": {"model": torch.full_like(MODEL, math.nan)}},
    "infinite model": {"sent": {"model": torch.full_like(MODEL, math.inf)}},
    "replicates": {"replicates": 2, "spec": wire.to_json(replace(LOCAL, lr=1e25))},
    "own model": {
        "own": True,
        "sent": {"model": MODEL, "anchor": MODEL},
        "spec": wire.to_json(replace(LOCAL, lr=1e25)),
    },
}


CASES = [
    *(("loop", query) for query in QUERIES),
    *((engine, query) for engine in ("stacked", "vmap") for query in ("large step", "huge model")),
]


@dataclass(frozen=True)
class Seen:
    """All that a server may see of a reply but for the noisy numbers, and what the client has counted."""

    fields: dict[str, Any]
    lengths: dict[str, int]
    is_finite: bool
    counted: dict[str, Any]


def see(folder: Path, privacy: Any, data: Any, query: dict[str, Any], engine: str) -> Seen:
    folder.mkdir(parents=True)
    level = "example" if isinstance(privacy, ExamplePrivacy) else "client"
    client = ClientHandler(
        alone(data),
        perceptron,
        number=0,
        engine=engine,
        folder=folder,
        policy=replace(OPEN, min_part=8),
        privacy=privacy,
        budget=Budget(epsilon=math.inf, level=level),
    )
    reply = ask(client, **query)
    files = [folder / name for name in LEDGERS]
    return Seen(
        fields=dict(reply.values),
        lengths={name: len(data) for name, data in reply.vectors.items()},
        is_finite="update" not in reply.vectors or bool(update_of_first(reply).isfinite().all()),
        counted={path.name: json.loads(path.read_text()) for path in files if path.exists()},
    )


def check_counted(seen: Seen, query: str) -> None:
    """Check that the client has counted a query, unless what it trained stays with it."""
    assert ("policy.json" in seen.counted) == (query != "own model")


def update_of_first(reply: wire.Content) -> torch.Tensor:
    return torch.frombuffer(bytearray(reply.vector("update")), dtype=torch.float32)[: LAYOUT.size]


@pytest.mark.parametrize(("engine", "query"), CASES)
def test_a_client_private_as_a_whole_replies_alike_whatever_its_data(
    engine: str, query: str, tmp_path: Path
):
    seen = [
        see(tmp_path / name, CLIENT, data, QUERIES[query], engine) for name, data in DATA.items()
    ]
    check_counted(seen[0], query)
    assert seen[0].is_finite
    assert all(other == seen[0] for other in seen)


@pytest.mark.parametrize(("engine", "query"), CASES)
def test_a_client_with_private_examples_replies_alike_whatever_its_data(
    engine: str, query: str, tmp_path: Path
):
    seen = [
        see(tmp_path / name, EXAMPLE, data, QUERIES[query], engine) for name, data in DATA.items()
    ]
    check_counted(seen[0], query)
    assert all(other == seen[0] for other in seen)


class Failing(nn.Module):
    """A model that fails on some data once it takes a step, which no check before round 1 does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled() and bool((x.abs() > 1e20).any()):
            raise RuntimeError(f"an input of {float(x.max())} was met")
        return self.inner(x)


def test_training_that_fails_ends_in_noise_and_is_booked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    client = ClientHandler(
        alone(one_outlier),
        lambda seed: Failing(),
        number=0,
        folder=tmp_path,
        privacy=CLIENT,
        budget=Budget(epsilon=math.inf),
    )
    layout = wire.layout_digest(client._layout)
    first, second = (update_of(ask(client, layout=layout)) for _ in range(2))
    assert float(first.std()) == pytest.approx(1.0, rel=0.3)  # the noise's: 2.0 times 0.5
    assert not torch.equal(first, second)
    (entry,) = json.loads((tmp_path / "privacy.json").read_text())["entries"]
    assert entry["releases"] == 2
    assert "training failed; the reply consists of noise only" in caplog.text


def test_without_privacy_the_same_failure_is_reported_with_its_reason():
    client = ClientHandler(alone(one_outlier), lambda seed: Failing(), number=0)
    with pytest.raises(ModelError, match=r"an input of 1.0000000150474662e\+30 was met"):
        ask(client, layout=wire.layout_digest(client._layout))


def test_a_query_counts_in_the_policy_as_soon_as_it_is_accepted(tmp_path: Path):
    client = ClientHandler(alone(), perceptron, number=0, folder=tmp_path)
    with pytest.raises(UpdateError, match="entries of the update are NaN or infinite"):
        ask(client, sent={"model": torch.full_like(MODEL, math.nan)})
    assert json.loads((tmp_path / "policy.json").read_text())["releases"] == 1


def test_residuals_of_a_run_without_noise_are_not_added_to_private_updates(tmp_path: Path):
    """A residual behind the noise would be a part of an update without any."""
    model = {"model": MODEL}
    plain = ClientHandler(alone(), perceptron, number=0, folder=tmp_path, encoding="int8")
    for _ in range(3):
        ask(plain, sent=model)
    (residual,) = tmp_path.glob("residual-*.safetensors")
    before = residual.read_bytes()
    exact = DifferentialPrivacy(clip_norm=0.5)
    private = ClientHandler(
        alone(),
        perceptron,
        number=0,
        folder=tmp_path,
        encoding="int8",
        privacy=exact,
        budget=Budget(epsilon=math.inf),
    )
    fresh_folder = tmp_path / "fresh"
    fresh_folder.mkdir()
    fresh = ClientHandler(
        alone(),
        perceptron,
        number=0,
        folder=fresh_folder,
        encoding="int8",
        privacy=exact,
        budget=Budget(epsilon=math.inf),
    )
    assert ask(private, sent=model).vector("update") == ask(fresh, sent=model).vector("update")
    assert residual.read_bytes() == before


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            PolicyError(
                "the client's policy forbids 9 separate updates from 9 parts of 60 examples"
            ),
            PolicyError,
            FORBIDDEN,
        ),
        (
            PrivacyError("with this update the client would have spent ε = 3.7"),
            PrivacyError,
            BUDGET_SPENT,
        ),
        (UpdateError("norm 1.59e+25, more than 1e+18"), UpdateError, NOT_POSSIBLE),
        (
            UpdateError(
                f"{KEEPS_NONE}: client 3 has not trained one, or has lost its stored tensors"
            ),
            UpdateError,
            KEEPS_NONE,
        ),
        (ModelError("client 3 in round 2: index 77 is out of range"), UpdateError, FAILED),
        (RuntimeError("index 77 is out of range"), UpdateError, FAILED),
        (
            ConfigError("local rule scaffold takes other steps"),
            ConfigError,
            "local rule scaffold takes other steps",
        ),
    ],
)
def test_a_private_clients_errors_have_no_details(
    error: Exception, kind: type[Exception], text: str
):
    reported = without_details(error)
    assert type(reported) is kind
    assert str(reported) == text


def test_details_of_a_refusal_are_in_the_clients_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    client = ClientHandler(
        alone(),
        perceptron,
        number=0,
        folder=tmp_path,
        privacy=CLIENT,
        budget=Budget(epsilon=math.inf),
    )
    with caplog.at_level(logging.WARNING), pytest.raises(PolicyError) as caught:
        ask(client, replicates=8)
    assert str(caught.value) == FORBIDDEN
    assert "8 separate updates from 8 parts of 16 training examples" in caplog.text


def reason_of(app: Any, config: dict[str, Any]) -> str:
    """Return why the client of a node refuses a query to register."""
    grid = grid_of(federation_of(FOUR))
    node = node_of(0)
    grid.nodes[node] = LocalNode(app, {"partition-id": 0, **config})
    hello = wire.record({"what": "hello", "layout": "", "run": "r"})
    (identity,) = grid.push_messages([request_to(node, hello, "query")])
    (reply,) = grid.pull_messages([identity])
    return str(wire.Content.of(reply.content).values["refused"])


def read_nothing(context: Any) -> Federation:
    raise DataError("patients.csv: row 3 of column 'hiv' is 'positive?'")


def break_down(context: Any) -> Federation:
    raise KeyError("hiv: positive?")


def test_errors_of_the_data_of_a_node_with_a_budget_stay_in_its_log(tmp_path: Path):
    app = client_app(perceptron, read_nothing)
    assert "patients.csv" in reason_of(app, {})
    assert reason_of(app, {"epsilon": 1.0, "folder": str(tmp_path)}) == FAILED


def test_unexpected_errors_stay_in_the_clients_log(caplog: pytest.LogCaptureFixture):
    assert reason_of(client_app(perceptron, break_down), {}) == FAILED
    assert "hiv: positive?" in caplog.text


def test_client_level_budgets_count_earlier_private_steps(tmp_path: Path):
    """These bound what is learned of an example, and not of all the data of a client."""
    budget = Budget(epsilon=math.inf, level="example")
    ask(
        ClientHandler(
            alone(), perceptron, number=0, folder=tmp_path, privacy=EXAMPLE, budget=budget
        )
    )
    ledger = Ledger(tmp_path / "privacy.json", steps=tmp_path / "example-privacy.json")
    assert ledger.spent(1e-5) == math.inf
    later = ClientHandler(
        alone(),
        perceptron,
        number=0,
        folder=tmp_path,
        privacy=CLIENT,
        budget=Budget(epsilon=1000.0),
    )
    with pytest.raises(PrivacyError, match=BUDGET_SPENT):
        ask(later)
    assert not (tmp_path / "privacy.json").exists()


def test_updates_are_made_usable_in_place():
    deltas = torch.tensor([[3.0, 4.0], [math.nan, 1.0], [math.inf, 1.0], [HUGE, HUGE], [1e18, 0.0]])
    losses = torch.tensor([1.0, math.nan, math.inf, 2.0, 3.0], dtype=torch.float64)
    make_usable(deltas, losses)
    assert deltas[:3].tolist() == [[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
    norms = deltas.double().norm(dim=1)
    assert norms[3:].tolist() == pytest.approx([LARGEST_NORM / 2, LARGEST_NORM / 2])
    received = Updates.received(range(5), [1] * 5, deltas, 2, losses, 1)
    assert received.ids == tuple(range(5))
    assert not received.left_out


def test_no_updates_can_be_made_usable():
    deltas = torch.empty(0, 3)
    make_usable(deltas, torch.empty(0, dtype=torch.float64))
    assert deltas.shape == (0, 3)
