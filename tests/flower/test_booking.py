"""A real client whose examples are private: it books its steps, draws from the system, and keeps to its level."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedclade import (
    ConfigError,
    DataSchema,
    DifferentialPrivacy,
    ExamplePrivacy,
    PrivacyError,
    federation,
)
from fedclade.channel import Budget, noisy_steps
from fedclade.channel.accounting import Ledger
from fedclade.core import Models, Round, TrainQuery
from fedclade.data.agreement import Proposal
from fedclade.flower import LocalGrid, LocalNode, client_app
from fedclade.flower.client_handler import ClientHandler, privatizing_of
from fedclade.flower.from_config import budget_of
from fedclade.flower.policy import Policy
from fedclade.flower.schema_exchange import SchemaSharing
from fedclade.flower.wire import Content
from tests.flower.grids import LOCAL, handler_of, hello_to
from tests.flower.test_client_handler import OPEN, ask, update_of

PRIVACY = ExamplePrivacy(clip_norm=1.0, noise_multiplier=4.0)
EXAMPLES = 24
QUERY = TrainQuery([0], Models(torch.zeros(1, 1), [0]), Round(2, LOCAL))
ONCE = noisy_steps(QUERY, EXAMPLES)


def private(folder: Path, epsilon: float = float("inf"), **more: Any):
    return handler_of(
        privacy=PRIVACY, budget=Budget(epsilon=epsilon, level="example"), folder=folder, **more
    )


def test_it_withholds_its_loss_and_draws_from_the_system(tmp_path: Path):
    """Two answers to one question differ: the server, which knows its seed, cannot take samples or noise off."""
    client = private(tmp_path)
    first, second = ask(client), ask(client)
    assert "loss" not in first.values
    assert not torch.isin(update_of(first), update_of(second)).any()


def test_its_steps_are_booked_before_the_update_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def crash(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    client = private(tmp_path)
    monkeypatch.setattr(client._residuals, "encoded", crash)
    with pytest.raises(KeyboardInterrupt):
        ask(client)
    (entry,) = json.loads((tmp_path / "example-privacy.json").read_text())["entries"]
    assert (entry["round"], entry["noise_multiplier"], {entry["rate"]: entry["steps"]}) == (
        2,
        4.0,
        ONCE,
    )


def test_beyond_its_budget_it_sends_nothing(tmp_path: Path):
    """Nor where whole updates of client-level privacy have spent it, in another run."""
    epsilon = 1.1 * PRIVACY.epsilon(ONCE)
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    ask(private(tmp_path / "one", epsilon))
    with pytest.raises(
        PrivacyError, match="the privacy budget of this client allows no further update"
    ):
        ask(private(tmp_path / "one", epsilon))
    Ledger(tmp_path / "other" / "privacy.json").book(2.0, "network", 1)
    with pytest.raises(
        PrivacyError, match="the privacy budget of this client allows no further update"
    ):
        ask(private(tmp_path / "other", epsilon))


def test_a_budget_holds_for_its_level_alone(tmp_path: Path):
    """Or whoever writes the run's config could have examples protected in place of the client."""
    with pytest.raises(
        ConfigError,
        match=r"ε = 3 of level 'client'.*privacy.level is 'example'.*set level='example'",
    ):
        privatizing_of(PRIVACY, Budget(epsilon=3.0), tmp_path, {0: EXAMPLES})
    whole = DifferentialPrivacy(clip_norm=1.0)
    with pytest.raises(
        ConfigError,
        match=r"ε = 3 of level 'example'.*privacy.level is 'client'.*set level='client'",
    ):
        privatizing_of(whole, Budget(epsilon=3.0, level="example"), tmp_path, {0: EXAMPLES})
    with pytest.raises(
        ConfigError,
        match=r"this client has a privacy budget of ε = 3, and an update without noise has no bounded",
    ):
        privatizing_of(None, Budget(epsilon=3.0, level="example"), tmp_path, {0: EXAMPLES})
    with pytest.raises(
        ConfigError,
        match=r"a client with differential privacy needs a folder for its privacy ledger",
    ):
        privatizing_of(PRIVACY, Budget(epsilon=3.0, level="example"), None, {0: EXAMPLES})
    with pytest.raises(
        ConfigError, match=r"this client has no privacy budget; set epsilon in its node"
    ):
        privatizing_of(PRIVACY, None, tmp_path, {0: EXAMPLES})
    assert privatizing_of(None, None, None, {}) is None


def test_a_node_says_whom_its_budget_protects():
    def given(**node_config: Any) -> Any:
        return budget_of(SimpleNamespace(node_config=node_config))  # pyright: ignore[reportArgumentType]

    assert given(epsilon=3, level="example") == Budget(epsilon=3.0, level="example")
    assert given(epsilon=3) == Budget(epsilon=3.0)
    with pytest.raises(ConfigError, match=r"budget\.level should be client or example, got 'all'"):
        given(epsilon=3, level="all")


def test_a_question_for_gradients_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"do not reveal gradients over all their examples"):
        ask(private(tmp_path, policy=OPEN), what="gradients")


def test_a_client_whose_examples_are_private_scales_by_no_statistics_of_its_own(tmp_path: Path):
    x, y = torch.arange(60.0).reshape(20, 3).cos(), torch.arange(20) % 2
    own = federation({"one": ((x, y), (x, y))}, standardize="client")
    budget = Budget(epsilon=8.0, level="example")
    why = "with standardize = 'client', an example changes the mean"
    with pytest.raises(ConfigError, match=why):
        ClientHandler(own, "mclr", privacy=PRIVACY, budget=budget, folder=tmp_path)
    app = client_app("mclr", lambda context: own, privacy=PRIVACY, budget=budget)
    (answer,) = LocalGrid({7: LocalNode(app, {"folder": str(tmp_path)})}).send_and_receive(
        [hello_to(7)]
    )
    assert why in str(Content.of(answer.content).values["refused"])


def test_a_client_whose_examples_are_private_proposes_no_words_of_its_own():
    proposal = Proposal(DataSchema(words=("<pad>", "<unk>", "film")))
    sharing = SchemaSharing(Policy(share_schema=True), is_private=True, by_example=True)
    with pytest.raises(
        ConfigError, match="a vocabulary from this client's own texts, since single examples change"
    ):
        sharing.check(proposal, 100)
    SchemaSharing(Policy(share_schema=True), is_private=True).check(proposal, 100)
