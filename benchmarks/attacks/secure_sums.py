"""Open less than a whole sum by lies to the clients of secure aggregation: attacks that must stay unsuccessful.

The clients are the project's own (``Member``), with folders and complete lists of one another's
keys. One client of each federation colludes with the server. The server shows each client what it
likes, and keeps every share that it is given. An attack succeeds if the server could compute the
sum of fewer honest updates than clients allow, or if a client answers what it must refuse:

- ``neighbourhoods``: a victim sees a short list, its neighbours a longer one, and helpers a third
  one, in which the neighbours have dropped out. It once opened a single update without colluders.
- ``views``: random lists, sets of dealers and sums, different ones for different clients.
- ``isolate``: a victim is shown a sum that all its honest neighbours have dropped out of.
- ``grind``: the server begins anew until a victim's random holders are colluders.
- ``replay``: signatures and shares of an earlier sum are shown in a later one, under its name.
- ``twice``: two processes that share a client's folder are asked for two sums of one question.
- ``roster``: keys of nobody, or of a client under another number, are on the list.
- ``collide``: a client is sent another model, or other words, than the terms say.

    python benchmarks/attacks/secure_sums.py [--strategies N] [--json FILE]
"""

from __future__ import annotations

# Before torch, whose threads then sleep while they wait.
import fedclade  # noqa: F401  # isort: skip  # pyright: ignore[reportUnusedImport]

import random
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import REST, Row, parser, refused, report
from flwr.app import RecordDict
from lying_server import LyingServer, View, views_of_neighbourhoods

from fedclade.core import FedcladeError, Updates
from fedclade.flower import wire
from fedclade.flower.policy import Policy
from fedclade.flower.secure.member import Member
from fedclade.flower.secure.secrets import new_key, public_of
from fedclade.flower.signing import Key
from fedclade.flower.wire import Content

D = 8
COLLUDERS = 1
POLICY = Policy(
    max_colluders=COLLUDERS, min_honest=3, secure_aggregation=True, trust_server_keys=True
)
SPEC = '{"epochs": 1, "batch_size": 10, "lr": 0.1}'
TRAINING = {
    "round": 1,
    "query": 0,
    "purpose": "train",
    "spec": SPEC,
    "replicates": 1,
    "part_size": 0,
    "layout": "l",
    "run": "r",
}


@dataclass
class Client:
    """An honest client, and what Flower and its folder keep of it."""

    number: int
    key: Key
    peers: Mapping[str, int]
    folder: Path
    state: RecordDict = field(default_factory=RecordDict)

    def answer(self, content: Content) -> Content:
        """Answer a request of the server."""
        member, kind = Member(POLICY, self.peers, self.folder), content.get("what", str)
        if kind == "masked":
            return Content.of(
                member.masked(content, self.state, self.key, train=self._train, shape=(D, D))
            )
        if kind == "unmask":
            return Content.of(member.unmask(content, self.state))
        answers = {"keys": member.keys, "shares": member.shares, "agree": member.agree}
        return Content.of(answers[kind](content, self.state, self.key))

    def _train(self, content: Content) -> Updates:
        one = torch.ones(1, dtype=torch.float64)
        deltas = torch.full((1, D), float(self.number))
        return Updates.of(
            ids=(self.number,), sizes=10 * one, losses=one, norms=one, n_parameters=D, deltas=deltas
        )


class ServerOfMembers(LyingServer):
    """A lying server whose clients are in this process, each with a folder, and one of which colludes."""

    def __init__(self, folder: Path, honest: int) -> None:
        self.keys = {number: Key.new() for number in range(honest + COLLUDERS)}
        peers = {key.public: number for number, key in self.keys.items()}
        self.clients: dict[int, Client] = {}
        for number in range(honest):
            home = folder / str(number)
            home.mkdir(parents=True)
            self.clients[number] = Client(number, self.keys[number], peers, home)
        public = {number: self.keys[number].public for number in range(honest)}
        colluders = {number: key for number, key in self.keys.items() if number >= honest}
        super().__init__(public, colluders, TRAINING, torch.zeros(D), claimed=COLLUDERS)

    def deliver(
        self, kind: str, requests: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, Content | str]:
        """Ask one client after the other."""
        vectors = self.vectors if kind == "masked" else None
        replies: dict[int, Content | str] = {}
        for number, values in requests.items():
            try:
                replies[number] = self.clients[number].answer(
                    Content.of(wire.record(values, vectors))
                )
            except FedcladeError as error:
                replies[number] = str(error)
        return replies


def is_small(sums: Collection[set[int]]) -> bool:
    """Return whether one of the sums is of fewer honest clients than clients allow."""
    return any(len(found) < POLICY.min_honest for found in sums)


def row_of(attack: str, server: LyingServer) -> Row:
    """Return the row of an attack that ends with what the server learned."""
    sums = server.learned()
    if not sums:
        return Row(attack, False, f"no sum{server.why_stopped()}", budget=server.used())
    return Row(attack, is_small(sums), f"sums {sums}", budget=server.used())


def try_neighbourhoods(folder: Path) -> Iterator[Row]:
    """Show a victim, its neighbours, and helpers lists that do not fit together."""
    server = ServerOfMembers(folder, 9)
    server.play(views_of_neighbourhoods((1, 2, 3), (4, 5, 6, 7, 8), server.spoilers))
    yield row_of("neighbourhoods", server)


def try_views(folder: Path, strategies: int) -> Iterator[Row]:
    """Show random lists, sets of dealers and sums."""
    draw, opened, small = random.Random(0), 0, 0
    server = ServerOfMembers(folder, 6)
    for _ in range(strategies):
        server.begin()
        server.play(draw_views(draw, 6, server.spoilers))
        sums = server.learned()
        opened += bool(sums)
        small += is_small(sums)
    detail = f"{small or 'no'} small sum by {strategies} strategies; {opened} of them opened an allowed one"
    yield Row("views", small > 0, detail, budget=server.used())


def draw_views(draw: random.Random, honest: int, spoilers: tuple[int, ...]) -> dict[int, View]:
    """Return what each client is shown in one random strategy."""
    everybody = (*range(honest), *spoilers)

    def some(of: Sequence[int], share: float) -> tuple[int, ...]:
        return tuple(each for each in of if each in spoilers or draw.random() < share)

    lists = [everybody, some(everybody, 0.8)]
    views: dict[int, View] = {}
    options: dict[object, tuple[int, ...]] = {}
    for number in range(honest):
        members = draw.choice([each for each in lists if number in each])
        dealt = options.setdefault((members, draw.random() < 0.3), some(members, 0.9))
        dealt = dealt if number in dealt else members
        active = options.setdefault((dealt, draw.random() < 0.3), some(dealt, 0.85))
        views[number] = View(members, dealt, active if number in active else dealt)
    return views


def try_isolate(folder: Path) -> Iterator[Row]:
    """Tell a victim at each stage that no client but colluders and itself is left."""
    for stage in ("list", "dealers", "sum"):
        server = ServerOfMembers(folder / stage, 6)
        everybody, alone = (*range(6), *server.spoilers), (0, *server.spoilers)
        victim = {
            "list": View(alone, alone, alone),
            "dealers": View(everybody, alone, alone),
            "sum": View(everybody, everybody, alone),
        }
        whole, without_victim = View.honest(everybody), View(everybody, everybody, everybody[1:])
        others = without_victim if stage == "sum" else whole
        server.play({0: victim[stage], **dict.fromkeys(range(1, 6), others)})
        yield row_of(f"isolate, {stage}", server)


def try_grind(folder: Path) -> Iterator[Row]:
    """Begin one question again and again, and show a client its list twice."""
    server = ServerOfMembers(folder, 6)
    begun = 0
    for _ in range(10):
        begun += len(server.ask_keys(0))
        server.begin(same_question=True)
    server.begin()
    server.ask_keys(*range(6))
    server.show_spoilers()
    drawn = [len(server.ask_shares({0: range(7)})) for _ in range(2)]
    detail = f"{begun} beginnings of 10, then the client stops{REST}lists answered {drawn}"
    yield Row("grind", begun > 3 or drawn != [1, 0], detail, budget=server.used())


def try_replay(folder: Path) -> Iterator[Row]:
    """Show signatures and sealed shares of an earlier sum in a later one of the same name."""
    server = ServerOfMembers(folder, 6)
    views = dict.fromkeys(range(6), View.honest((*range(6), *server.spoilers)))
    server.play(views)
    name, old = server.terms.instance, server.agreements
    worked = server.learned() == [{*range(6)}]
    asked_again = server.ask_unmask(0)
    server.begin(instance=name, same_question=True)
    same_question = server.ask_keys(0)
    server.begin(instance=name)
    server.ask_keys(*views)
    server.show_spoilers()
    server.ask_shares({number: view.members for number, view in views.items()})
    server.ask_masked(views)
    server.ask_agree(0)
    server.agreements = {**old, 0: server.agreements[0]}
    opened = server.ask_unmask(0)
    succeeded = not worked or bool(asked_again or same_question or opened)
    yield row_of_refusal("replay", server, "unmask", succeeded=succeeded)


def try_twice(folder: Path) -> Iterator[Row]:
    """Ask two processes of one client for two sums of one question."""
    server = ServerOfMembers(folder, 6)
    everybody = (*range(6), *server.spoilers)
    whole = View.honest(everybody)
    masked_by_all(server, whole)
    client = server.clients[0]
    another = replace(client, state=client.state.copy())
    first_one = server.ask_agree(0)
    server.clients[0] = another
    server.views[0] = replace(whole, active=everybody[:-2])
    second_one = server.ask_agree(0)
    succeeded = not first_one or bool(second_one)
    yield row_of_refusal("twice", server, "agree", succeeded=succeeded)


def try_roster(folder: Path) -> Iterator[Row]:
    """Put keys of nobody, or of a client under another number, on the list."""
    for name in ("sybil", "renumbered", "unsigned"):
        server = ServerOfMembers(folder / name, 6)
        server.ask_keys(*range(6))
        server.show_spoilers()
        advert, key = server.adverts[5], Key.new()
        changed = {
            "sybil": replace(advert, signer=key.public, masking=public_of(new_key())).signed(
                server.terms.context, key
            ),
            "renumbered": replace(advert, signer=server.keys[6].public).signed(
                server.terms.context, server.keys[6]
            ),
            "unsigned": replace(advert, masking=public_of(new_key())),
        }
        server.adverts[5] = changed[name]
        succeeded = bool(server.ask_shares({0: range(6)}))
        yield row_of_refusal(f"roster, {name}", server, "shares", succeeded=succeeded)


def try_collide(folder: Path) -> Iterator[Row]:
    """Send one client another model, another seed, or a further vector, than the terms say."""
    for change in ("model", "seed", "vector"):
        server = ServerOfMembers(folder / change, 6)
        whole = View.honest((*range(6), *server.spoilers))
        server.ask_keys(*range(6))
        server.show_spoilers()
        server.ask_shares(dict.fromkeys(range(6), whole.members))
        if change == "seed":
            server.training["seed"] += 1
        else:
            server.vectors = {**server.vectors, change: wire.raw_vector(torch.ones(D))}
        succeeded = bool(server.ask_masked({0: whole}))
        yield row_of_refusal(f"collide, {change}", server, "masked", succeeded=succeeded)
    server = ServerOfMembers(folder / "digest", 6)
    bits = 4 * len(server.terms.model)
    yield Row("collide, digest", bits < 256, f"digests of {bits} bits", budget=server.used())


def masked_by_all(server: LyingServer, view: View) -> None:
    """Go through a sum of honest views up to the masked updates."""
    numbers = tuple(server.public)
    server.ask_keys(*numbers)
    server.show_spoilers()
    server.ask_shares(dict.fromkeys(numbers, view.members))
    server.ask_masked(dict.fromkeys(numbers, view))


def row_of_refusal(attack: str, server: LyingServer, kind: str, *, succeeded: bool) -> Row:
    """Return the row of an attack that a client should refuse at one kind of request."""
    detail = "answered" if succeeded else refused(server.refused[kind])
    return Row(attack, succeeded, detail, budget=server.used())


def rows(folder: Path, strategies: int) -> Iterator[Row]:
    """Run all attacks."""
    attacks: Sequence[Callable[[Path], Iterator[Row]]] = (
        try_neighbourhoods,
        lambda folder: try_views(folder, strategies),
        try_isolate,
        try_grind,
        try_replay,
        try_twice,
        try_roster,
        try_collide,
    )
    for place, attack in enumerate(attacks):
        yield from attack(folder / str(place))


def main() -> int:
    """Run all attacks; return 1 if one of them succeeds."""
    options = parser(__doc__)
    options.add_argument("--strategies", type=int, default=40, help="how many random ones to try")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        return report(rows(Path(name), arguments.strategies), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
