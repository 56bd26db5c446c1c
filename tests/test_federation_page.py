"""Tables of settings and messages in the pages on federations agree with the code. Other tests run their blocks."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from flwr.app import Context, Message

from fedclade import APFL, CFL, IFCA, Auto, Ditto, LocalTraining, Signature, Task
from fedclade.algorithms import FLUX
from fedclade.flower import LocalGrid, LocalNode, Network, client_app_from_config, federate
from fedclade.flower.from_config import AppSettings, RunConfig
from fedclade.flower.policy import Policy
from fedclade.flower.wire import Content
from tests.docs.blocks import blocks_of
from tests.docs.configs import check_toml

DOCS = Path(__file__).parents[1] / "docs"
DATA = {
    "data.name": "digits",
    "data.clients": 4,
    "data.samples_per_client": 25,
    "data.validation_fraction": 0.2,
    "model.name": "mclr",
}


def table(page: str, first: str) -> list[list[str]]:
    """Return the cells of a table of a page, by the start of its head."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (found,) = re.findall(
        rf"^\| {re.escape(first)} \|.*\n\|[:|-]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def test_the_run_config_of_the_page_is_one():
    (text,) = (
        block.text
        for block in blocks_of("docs/federation.md")
        if block.language == "toml" and block.text.startswith("[tool.flwr.app.config]")
    )
    read = check_toml(text)
    assert isinstance(read, RunConfig)
    assert read.network == Network(clients=4)
    assert read.apps == AppSettings(out="runs/flower")
    assert read.config.top.rounds == 6


def test_the_page_has_every_network_setting_with_its_default():
    written = {
        key.strip("`"): default.strip("`")
        for key, default, _ in table("federation.md", "`[network]` key")
    }
    told = {
        key: None if value == "–" else tomllib.loads(f"x = {value}")["x"]
        for key, value in written.items()
    }
    assert told == {**asdict(Network()), **asdict(AppSettings())}


def test_the_page_has_every_limit_of_a_client_with_its_default():
    told = {
        key.strip("`"): default.strip("`")
        for key, default, _ in table("client-policy.md", "policy setting")
    }
    defaults = {field.name.replace("_", "-"): field.default for field in fields(Policy)}
    shown = {
        "allow": '"train evaluate statistics"',
        "imports": '""',
        "trainers": '""',
        "max-partings": "an eighth of its training examples, at most 64",
        "max-clear": "half the number of parameters; for a closed client without `sketch` in `disclose`: `0",
        "disclose": '""',
        "max-evaluations": "50000`; closed: `100",
        "scores-epsilon": "a tenth of `epsilon",
        "share-schema": "true`; with differential privacy: `false",
    }
    # TOML writes true and false
    assert told == {
        key: shown.get(key, str(default).lower() if isinstance(default, bool) else str(default))
        for key, default in defaults.items()
    }


class Overheard:
    """An app whose messages are noted: by question, the names of its values and vectors, and those of the answers."""

    def __init__(self, app: Callable[[Message, Context], Message]) -> None:
        self._app = app
        self.heard: dict[str, list[set[str]]] = defaultdict(lambda: [set(), set(), set(), set()])

    def __call__(self, message: Message, context: Context) -> Message:
        answer = self._app(message, context)
        noted = self.heard[Content.of(message.content).values["what"]]
        for place, record in enumerate((message.content, answer.content)):
            content = Content.of(record)
            noted[2 * place] |= {"protocol", "fedclade", *content.values}
            noted[2 * place + 1] |= set(content.vectors)
        return answer


def test_messages_have_what_the_page_says(tmp_path: Path):
    """With everything that can be asked: gradients, several models at once, subspaces, a secret, an anchor, sums."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 2)
    app = Overheard(client_app_from_config())
    for algorithm, shares in (
        (CFL(similarity="gradients", split_rounds=(1,), eps2=1e-9), True),
        ("pacfl", False),
        (Ditto(), False),
        (APFL(), False),
        (Auto(budget=20.0), False),
        ("ifca", False),
        (IFCA(clusters=2, reports="choice"), False),
        ("fedsoft", False),
        ("flexcfl", False),
        (FLUX(earliest=1, latest=1), False),
    ):
        config = {"allow": "train evaluate gradients subspaces shifts descriptors"}
        config |= {"secret-file": str(secret)} if shares else {}
        nodes = {10 + k: LocalNode(app, {"partition-id": k, **config}) for k in range(4)}
        grid = LocalGrid(nodes, DATA)
        local = LocalTraining(epochs=1)
        federate(
            grid,
            algorithm,
            "mclr",
            rounds=2,
            local=local,
            network=Network(clients=4),
            permute=shares,
        )
    grid = LocalGrid({10 + k: LocalNode(app, {"partition-id": k}) for k in range(4)}, DATA)
    network, signature = (
        Network(clients=4, secure_aggregation=True, secure_norm=8.0),
        Signature(kind="projected", dim=64),
    )
    federate(grid, "cfl", "mclr", rounds=1, local=local, network=network, signature=signature)
    of_all = {"count", "means", "squares", "numbers", "labels"}
    (tmp_path / "all.csv").write_text(
        "who,x,y\n" + "".join(f"{k % 2},{k}.5,{k % 3 % 2}\n" for k in range(60))
    )
    table_of_two = {
        "data.files": "all.csv",
        "data.client": "who",
        "data.target": "y",
        "data.standardize": "federated",
    }
    nodes = {
        10 + k: LocalNode(app, {"partition-id": k, "data-dir": str(tmp_path)}) for k in range(2)
    }
    grid = LocalGrid(
        nodes, {**table_of_two, "model.name": "mclr", "task.class_weights": "balanced"}
    )
    weighed = Task(class_weights="balanced")
    federate(
        grid, "fedavg", "mclr", rounds=1, local=local, network=Network(clients=2), task=weighed
    )
    numbers = {**table_of_two, "data.target": "x", "task.name": "regression"}
    grid = LocalGrid(nodes, {**numbers, "model.name": "mclr"})
    network = Network(clients=2)
    federate(grid, "fedavg", "mclr", rounds=1, local=local, network=network, task="regression")
    rows = table("wire-protocol.md", "request | request fields")
    told = {row[0].split()[0]: [names(cell) for cell in row[1:]] for row in rows}
    assert set(app.heard) == set(told)
    for question, (says, carries, answers, gives) in told.items():
        heard = app.heard[question]
        assert heard[0] - of_all - {"agreed"} == says | {"protocol", "fedclade"}, question
        assert (of_all <= heard[0]) == (question in ("train", "evaluate", "gains")), question
        assert heard[2] == answers | {"protocol", "fedclade"}, question
        assert {name for name in heard[1] if not name.isdigit()} == {
            name for name in carries if not name.isdigit()
        }
        assert {name for name in heard[3] if not name.isdigit()} == {
            name for name in gives if not name.isdigit()
        }
        assert bool(heard[1]) == bool(carries)
        assert bool(heard[3]) == bool(gives)
