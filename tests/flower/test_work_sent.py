"""The work of a training query in messages: a client reads the work that the server has stated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedclade import ConfigError, FedAvg, LocalTraining, UpdateError
from fedclade.core import (
    OWN,
    AllData,
    ClientWork,
    ControlVariates,
    DistanceToAnchor,
    Em,
    FromStored,
    FullGradient,
    HeadThenBody,
    Interpolation,
    LastLayer,
    LocalModel,
    Mixture,
    Models,
    NoReply,
    Nothing,
    OfRounds,
    PolicyError,
    Proximal,
    Round,
    Sgd,
    SplitPart,
    Splits,
    Steps,
    TrainQuery,
)
from fedclade.flower.models_sent import ModelsSent, training_values
from fedclade.flower.policy import QUERIES, Policy
from fedclade.flower.training_asked import TrainingAsked
from fedclade.flower.wire import Content
from fedclade.flower.work_sent import check_work_travels
from tests.flower.grids import FOUR, LOCAL, federated, grid_of, handler_of
from tests.flower.test_client_handler import MODEL, ask
from tests.tiny import federation_of

MODELS = torch.stack([MODEL, MODEL + 1])
OWN_MODEL = {"start": FromStored(), "store": LocalModel(), "reply": NoReply()}
TUNED = {"start": FromStored(latest=True), "store": LocalModel(state=False), "reply": NoReply()}


@dataclass(frozen=True)
class Dawdling(Steps):
    """Steps of a method's own."""


@dataclass(frozen=True)
class Mapped(Steps):
    """Steps with a field that messages cannot contain."""

    numbers: dict[str, float]


def hidden_steps() -> Steps:
    """Return steps of a class that cannot be imported by a name."""

    @dataclass(frozen=True)
    class Hidden(Steps):
        """Steps of a class inside a function."""

    return Hidden()


def query_of(
    work: ClientWork,
    start: int = 0,
    anchor: int | None = None,
    purpose: str = "train",
    local: LocalTraining = LOCAL,
) -> TrainQuery:
    anchors = None if anchor is None else [anchor]
    return TrainQuery([2], Models(MODELS, [start], anchors), Round(5, local, 3, purpose), work)


def read(query: TrainQuery) -> TrainingAsked:
    """Return what the client reads of the server's message."""
    check_work_travels(query)
    values = {"what": query.kind, **training_values(query, None)}
    vectors = {name: array.data for name, array in ModelsSent.of(query).vectors[2].items()}
    content = Content(values, vectors)
    return TrainingAsked.read(content, Policy(allow=QUERIES), 100, 2, is_closed=False)


def anchors_read(asked: TrainingAsked, query: TrainQuery) -> list[bytes] | None:
    """Return the models that a client reads as anchors of a message; None if it reads none."""
    sent = list(ModelsSent.of(query).vectors[2].values())
    assert len(asked.sent) == len(sent)
    if asked.anchors is None:
        return None
    return [sent[row].data for row in asked.anchors]


@pytest.mark.parametrize(
    "query",
    [
        query_of(ClientWork()),
        query_of(ClientWork(), local=replace(LOCAL, mu=0.5)),
        query_of(ClientWork(store=Nothing()), purpose="beside"),
        query_of(ClientWork(steps=Proximal(0.5)), anchor=1),
        query_of(ClientWork(steps=HeadThenBody(2))),
        query_of(ClientWork(steps=LastLayer())),
        query_of(ClientWork(**OWN_MODEL, steps=LastLayer()), start=OWN),
        query_of(ClientWork(**TUNED, steps=LastLayer()), purpose="finetune"),
        query_of(ClientWork(steps=Interpolation(alpha=0.25))),
        query_of(ClientWork(steps=ControlVariates()), anchor=1),
        query_of(ClientWork(steps=FullGradient(), store=Nothing())),
        query_of(ClientWork(data=Splits(2, 20, compared=False), store=Nothing())),
        query_of(ClientWork(**OWN_MODEL)),
        query_of(ClientWork(**OWN_MODEL), start=OWN),
        query_of(ClientWork(**OWN_MODEL, steps=Proximal(0.5)), start=OWN, anchor=0),
        query_of(ClientWork(**TUNED), purpose="finetune"),
        query_of(
            ClientWork(FromStored(), AllData(), Proximal(0.5), LocalModel(), DistanceToAnchor()),
            start=OWN,
            anchor=1,
        ),
    ],
    ids=lambda query: " ".join(
        type(part).__name__ for part in (query.work.steps, query.work.data, query.work.store)
    ),
)
def test_a_client_reads_the_work_that_the_server_has_stated(query: TrainQuery):
    asked = read(query)
    for part in ("start", "data", "steps", "store", "reply"):
        assert getattr(asked.work, part) == getattr(query.work, part)
    # A message states one μ, which a proximal term to an anchor replaces.
    settings = query.work.steps.settings
    assert settings(asked.round.local) == settings(query.round.local)
    assert replace(asked.round, local=LOCAL) == replace(query.round, local=LOCAL)
    assert asked.start_row == (OWN if query.models.start == [OWN] else 0)
    if query.models.anchor is None:
        expected = None
    else:
        expected = [MODELS[row].numpy().tobytes() for row in query.models.anchor]
    assert anchors_read(asked, query) == expected


def test_a_client_reads_the_mixture_of_the_models():
    asked = read(query_of(ClientWork(steps=Em(Mixture(by_label=True)))))
    assert isinstance(asked.work.steps, Em)
    assert asked.work.steps.mixture.by_label
    assert asked.sent == ["0", "1"]
    assert asked.anchors is None


@pytest.mark.parametrize(("mu", "anchor"), [(0.0, 1), (0.5, 0)])
def test_an_anchor_that_changes_nothing_is_not_sent(mu: float, anchor: int):
    """One without weight, or the model from which the client starts: FedProx."""
    query = query_of(ClientWork(steps=Proximal(mu)), anchor=anchor)
    assert ModelsSent.of(query).vectors[2].keys() == {"model"}
    asked = read(query)
    assert asked.work.steps == Sgd()
    assert asked.round.local.mu == mu


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (ClientWork(steps=hidden_steps()), "the class Hidden cannot be requested over a network"),
        (ClientWork(steps=Mapped({})), "field 'numbers' of Mapped cannot be sent .* got {}"),
        (ClientWork(data=OfRounds({2: (1, 2)})), "OfRounds runs in simulations only, since .* cur"),
        (ClientWork(data=SplitPart(0, 2)), "SplitPart runs in simulations only, since .* current"),
        (ClientWork(reply=NoReply()), "NoReply runs in simulations only, since .* their update"),
        (ClientWork(store=LocalModel()), "Delta runs in simulations only, since .* LocalModel"),
        (
            ClientWork(store=Nothing()),
            r"Nothing runs in .* 'train' a client in a network uses Lasting",
        ),
        (ClientWork(start=FromStored()), r"FromStored runs in simulations only.* FromServer\(\)"),
    ],
)
def test_a_server_refuses_work_that_no_message_can_state(work: ClientWork, why: str):
    with pytest.raises(ConfigError, match=why):
        check_work_travels(query_of(work))


class Dawdler(FedAvg):
    """A method with steps of its own."""

    def step(self, state: Any, cohort: Any, clients: Any, this_round: Any) -> Any:
        models = state.tree.nodes[0].params[None]
        work = ClientWork(steps=Dawdling())
        clients.train(cohort, models, [0] * len(cohort), this_round, work)
        raise AssertionError("no client should have trained")


def test_clients_refuse_steps_that_their_policy_does_not_name():
    name = "tests.flower.test_work_sent:Dawdling"
    with pytest.raises(UpdateError, match=f"all 4 clients refuse .*the training code '{name}'"):
        federated(grid_of(federation_of(FOUR)), Dawdler())


def test_a_purpose_other_than_training_stores_nothing_over_a_network():
    why = "Lasting runs in simulations only, since with the purpose 'probe' a client in a network"
    with pytest.raises(ConfigError, match=why):
        check_work_travels(query_of(ClientWork(), purpose="probe"))


@pytest.mark.parametrize(
    "words",
    [
        {"rule": '{"name": "meta_learning", "alpha": 0.1, "hessian": false, "delta": 0.1}'},
        {"spec": '{"mu": 0.5}', "sent": {"model": MODEL, "anchor": MODEL + 1}},
    ],
)
def test_a_client_refuses_two_kinds_of_steps_at_once(words: dict[str, Any]):
    with pytest.raises(
        UpdateError, match="requests epochs of only the personal parameters together with"
    ):
        ask(handler_of(2, federation_of(FOUR)), personal_epochs=1, **words)


@pytest.mark.parametrize(
    "words",
    [
        {"personal_epochs": 1},
        {"rule": '{"name": "meta_learning", "alpha": 0.1, "hessian": false, "delta": 0.1}'},
        {"spec": '{"mu": 0.5}', "sent": {"model": MODEL, "anchor": MODEL + 1}},
    ],
)
def test_a_client_refuses_the_last_layer_together_with_other_steps(words: dict[str, Any]):
    with pytest.raises(UpdateError, match="requests training of only the last layer together with"):
        ask(handler_of(2, federation_of(FOUR)), last_layer=True, **words)


def test_a_client_refuses_a_last_layer_that_is_no_truth_value():
    with pytest.raises(UpdateError, match="last_layer"):
        ask(handler_of(2, federation_of(FOUR)), last_layer=1)


def test_only_training_of_the_last_layer_is_stated():
    """Messages of all other training are as they were before."""
    assert "last_layer" not in training_values(query_of(ClientWork()), None)
    assert training_values(query_of(ClientWork(steps=LastLayer())), None)["last_layer"] is True


def test_a_policy_limits_training_of_the_last_layer_as_any_other():
    handler = handler_of(2, federation_of(FOUR), policy=Policy(allow=QUERIES, max_epochs=2))
    ask(handler, last_layer=True, spec='{"epochs": 2}')
    with pytest.raises(PolicyError, match="forbids 3 epochs; it allows at most 2"):
        ask(handler, last_layer=True, spec='{"epochs": 3}')
