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

    python benchmarks/attacks/secure_sums.py
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict

from fedclade.core import FedcladeError, Updates
from fedclade.flower import wire
from fedclade.flower.keys import Key
from fedclade.flower.policy import Policy
from fedclade.flower.secure import adverts as advertising
from fedclade.flower.secure.adverts import Advert, digest_of_list
from fedclade.flower.secure.encoding import bitmap
from fedclade.flower.secure.member import Member
from fedclade.flower.secure.secrets import (
    agreed,
    combined,
    digest_of_numbers,
    is_key_of,
    is_seed_of,
    new_key,
    public_of,
    unseal,
)
from fedclade.flower.secure.statements import Statements
from fedclade.flower.secure.terms import Terms, anchor_of, digest_of, model_of, question_of
from fedclade.flower.wire import Content

D = 8
COLLUDERS = 1
POLICY = Policy(max_colluders=COLLUDERS, min_honest=3)


@dataclass
class Client:
    """An honest client, and what Flower and its folder keep of it."""

    number: int
    key: Key
    peers: Mapping[str, int]
    folder: Path
    state: RecordDict = field(default_factory=RecordDict)

    def answer(self, content: Content) -> Content:
        """Answer a question of the server's."""
        member, kind = Member(POLICY, self.peers, self.folder), content.get("what", str)
        if kind == "masked":
            return Content.of(member.masked(content, self.state, self.key, train=self._train, shape=(D, D)))
        if kind == "unmask":
            return Content.of(member.unmask(content, self.state))
        answers = {"keys": member.keys, "shares": member.shares, "agree": member.agree}
        return Content.of(answers[kind](content, self.state, self.key))

    def _train(self, content: Content) -> Updates:
        one = torch.ones(1, dtype=torch.float64)
        deltas = torch.full((1, D), float(self.number))
        return Updates(ids=(self.number,), sizes=10 * one, losses=one, norms=one, n_parameters=D, deltas=deltas)


@dataclass(frozen=True)
class View:
    """What the server shows to one client: the list, and bitmaps of who dealt shares and of the sum."""

    members: tuple[int, ...]
    dealt: tuple[int, ...]
    active: tuple[int, ...]


class LyingServer:
    """A server and its colluding clients, in one sum; it notes all that it is given."""

    def __init__(self, folder: Path, honest: int) -> None:
        numbers = range(honest + COLLUDERS)
        self.keys = {number: Key.new() for number in numbers}
        peers = {key.public: number for number, key in self.keys.items()}
        self.clients: dict[int, Client] = {}
        for number in range(honest):
            home = folder / str(number)
            home.mkdir(parents=True)
            self.clients[number] = Client(number, self.keys[number], peers, home)
        self.spoilers = range(honest, honest + COLLUDERS)
        self.seed = 0
        self.refused: dict[str, str] = {}
        self.begin()

    def begin(self, *, instance: str = "", same_question: bool = False) -> None:
        """Begin a new sum, by honest terms; ``same_question`` is about what was asked before."""
        self.seed += not same_question
        spec = json.dumps({"epochs": 1, "batch_size": 10, "lr": 0.1})
        self.training: dict[str, Any] = {
            **{"round": 1, "query": 0, "purpose": "train", "seed": self.seed, "spec": spec},
            **{"replicates": 1, "part_size": 0, "layout": "l", "run": "r"},
        }
        self.vectors = {"model": wire.raw_vector(torch.zeros(D))}
        sent = {name: array.data for name, array in self.vectors.items()}
        self.terms = Terms(
            instance=instance or f"sum {random.random()}",
            clients=len(self.keys),
            colluders=COLLUDERS,
            neighbours=0,
            norm=8.0,
            norm_of_buffers=8.0,
            weight=10,
            training=digest_of(self.training),
            question=question_of(self.training, sent),
            model=model_of(sent),
            anchor=anchor_of(sent),
        )
        self.adverts: dict[int, Advert] = {}
        self.commitments: dict[int, bytes] = {}
        self.secret: dict[int, tuple[bytes, bytes]] = {}
        self.dealt: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = {}
        self.signed: dict[int, tuple[bytes, bytes]] = {}
        self.agreements: dict[int, bytes] = {}
        self.shares: dict[tuple[int, str], dict[int, bytes]] = {}
        self.views: dict[int, View] = {}

    def ask(self, number: int, kind: str, values: Mapping[str, Any]) -> Content | None:
        """Put a question to a client; None if it refuses, which is noted."""
        words = {"what": kind, "instance": self.terms.instance, "layout": "l", "run": "r", **values}
        vectors = self.vectors if kind == "masked" else None
        try:
            return self.clients[number].answer(Content.of(wire.record(words, vectors)))
        except FedcladeError as error:
            self.refused.setdefault(kind, str(error))
            return None

    def ask_keys(self, number: int) -> bool:
        """Ask a client for its keys."""
        answer = self.ask(number, "keys", {"client": number, "terms": self.terms.text})
        if answer is None:
            return False
        masking, sealing, signature = (answer.get(name, bytes) for name in ("masking", "sealing", "signature"))
        insists = answer.get("insists", bool)
        self.adverts[number] = Advert(number, masking, sealing, self.keys[number].public, signature, insists)
        return True

    def show_spoilers(self) -> None:
        """Make the colluders' keys."""
        for number in self.spoilers:
            masking, sealing = new_key(), new_key()
            advert = Advert(number, public_of(masking), public_of(sealing), self.keys[number].public, insists=True)
            self.adverts[number] = advert.signed(self.terms.context, self.keys[number])
            self.secret[number] = masking, sealing

    def ask_shares(self, number: int, members: Sequence[int]) -> bool:
        """Show a client a list, and ask for shares of its secrets."""
        answer = self.ask(
            number, "shares", advertising.told([self.adverts[each] for each in sorted(members)], has_signers=True)
        )
        if answer is None:
            return False
        self.commitments[number] = answer.get("commitment", bytes)
        holders, ciphertexts = answer.values["clients"], answer.values["ciphertexts"]
        promises = [*holders, number], answer.values["promises"]
        self.dealt[number] = (dict(zip(holders, ciphertexts, strict=True)), dict(zip(*promises, strict=True)))
        return True

    def ask_masked(self, number: int, view: View) -> bool:
        """Show a client who has dealt shares, and ask for its masked update."""
        sources = [each for each in view.dealt if each != number]
        nothing: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}
        dealt = [self.dealt.get(source, nothing) for source in sources]
        shares = {
            "sources": sources,
            "ciphertexts": [ciphertexts.get(number, b"forged") for ciphertexts, _ in dealt],
            "promises": [promises.get(number, b"forged") for _, promises in dealt],
        }
        bits = bitmap({*view.dealt}, view.members)
        answer = self.ask(number, "masked", {**self.training, **shares, "dealt": bits})
        if answer is None:
            return False
        numbers = digest_of_numbers(answer.vector("masked"))
        self.signed[number] = numbers, answer.get("signature", bytes)
        self.views[number] = view
        return True

    def ask_agree(self, number: int) -> bool:
        """Ask a client to agree to a sum; colluders sign whatever it would like to see."""
        view = self.views[number]
        statements = self.statements(view)
        digests, signatures = list[bytes](), list[bytes]()
        for partner in view.dealt:
            if partner == number or partner not in view.active:
                continue
            mine = self.signed.get(partner, (bytes(32), bytes(64)))
            if partner in self.spoilers:
                mine = bytes(32), self.keys[partner].private.sign(statements.masked(partner, bytes(32)))
            digests.append(mine[0])
            signatures.append(mine[1])
        bits = bitmap({*view.active}, view.members)
        answer = self.ask(number, "agree", {"active": bits, "digests": digests, "signatures": signatures})
        if answer is None:
            return False
        self.agreements[number] = answer.get("signature", bytes)
        return True

    def ask_unmask(self, number: int) -> bool:
        """Ask a client for its shares, with all agreements to its sum that there are."""
        view = self.views[number]
        alike = [each for each in self.agreements if self.views[each] == view]
        signatures = {each: self.agreements[each] for each in alike}
        statement = self.statements(view).agreed(bitmap({*view.active}, view.members))
        for spoiler in self.spoilers:
            if spoiler in view.active:
                signatures[spoiler] = self.keys[spoiler].private.sign(statement)
        answer = self.ask(number, "unmask", {"clients": list(signatures), "signatures": list(signatures.values())})
        if answer is None:
            return False
        for dealer, share in zip(view.dealt, answer.values["shares"], strict=True):
            if share:
                which = "seed" if dealer in view.active else "key"
                self.shares.setdefault((dealer, which), {})[number] = share
        return True

    def statements(self, view: View) -> Statements:
        """Return what a client signs by what it was shown."""
        listing = digest_of_list(self.terms.context, [self.adverts[each] for each in view.members])
        return Statements((self.terms.context, listing), bitmap({*view.dealt}, view.members))

    def play(self, views: Mapping[int, View]) -> None:
        """Go through all questions of a sum, with what each client is to be shown; refusals are noted."""
        there = [number for number in views if self.ask_keys(number)]
        self.show_spoilers()
        there = [number for number in there if self.ask_shares(number, views[number].members)]
        there = [number for number in there if self.ask_masked(number, views[number])]
        there = [number for number in there if self.ask_agree(number)]
        for number in there:
            self.ask_unmask(number)
        self.read_own_shares()

    def read_own_shares(self) -> None:
        """Note the shares that colluders were dealt."""
        for dealer, (ciphertexts, _) in self.dealt.items():
            if dealer not in self.views:
                continue
            listing = self.statements(self.views[dealer]).scope[1]
            for spoiler in self.spoilers:
                if spoiler not in ciphertexts:
                    continue
                shared = agreed(self.secret[spoiler][1], self.adverts[dealer].sealing)
                way, scope = (dealer, spoiler), (self.terms.context, listing)
                opened = unseal(shared, scope, way, ciphertexts[spoiler])
                if opened is not None:
                    self.shares.setdefault((dealer, "seed"), {})[spoiler] = opened[0]
                    self.shares.setdefault((dealer, "key"), {})[spoiler] = opened[1]

    def learned(self) -> list[set[int]]:
        """Return the sets of honest clients of which the server can compute the sum of updates."""
        seeds = {number for number in self.signed if self._is_open(number, "seed")}
        keys = {number for number in self.signed if self._is_open(number, "key")}
        sums: dict[int, set[int]] = {number: {number} for number in self.signed}
        closed = {number for number in self.signed if number not in seeds}
        for number in self.signed:
            for other in self.views[number].dealt:
                is_known = other == number or other in self.spoilers or number in keys or other in keys
                if is_known:
                    continue
                if self._share_a_mask(number, other):
                    merged = sums[number] | sums[other]
                    sums |= dict.fromkeys(merged, merged)
                else:
                    closed.add(number)
        return [found for found in {id(each): each for each in sums.values()}.values() if not found & closed]

    def _share_a_mask(self, number: int, other: int) -> bool:
        if other not in self.signed:
            return False
        same_list = self.views[number].members == self.views[other].members
        return same_list and number in self.views[other].dealt

    def _is_open(self, number: int, which: str) -> bool:
        """Return whether the server has enough shares of a client's secret: it tries."""
        shares = self.shares.get((number, which), {})
        needed = self.terms.graph(len(self.views[number].members)).needed
        of_seed = is_seed_of(self.commitments[number], self.statements(self.views[number]).scope, number)
        holds = of_seed if which == "seed" else is_key_of(self.adverts[number].masking)
        return len(shares) >= needed and combined(list(shares.values())[:needed], holds) is not None


@dataclass(frozen=True)
class Outcome:
    """Whether an attack has succeeded, and a word on it."""

    attack: str
    succeeded: bool
    detail: str


def is_small(sums: Collection[set[int]]) -> bool:
    """Return whether one of the sums is of fewer honest clients than clients allow."""
    return any(len(found) < POLICY.min_honest for found in sums)


def try_neighbourhoods(folder: Path) -> Outcome:
    """Show a victim, its neighbours, and helpers lists that do not fit together."""
    server = LyingServer(folder, 9)
    victim, near, helpers = 0, (1, 2, 3), (4, 5, 6, 7, 8)
    spoilers = tuple(server.spoilers)
    short = (victim, *near, *spoilers)
    whole = (victim, *near, *helpers, *spoilers)
    rest = (*near, *helpers, *spoilers)
    views = {victim: View(short, short, short)}
    views |= {each: View(whole, whole, whole) for each in near}
    views |= {each: View(rest, rest, (*helpers, *spoilers)) for each in helpers}
    server.play(views)
    sums = server.learned()
    return Outcome("neighbourhoods", is_small(sums), f"sums {sums or 'none'}; {first(server.refused)}")


def try_views(folder: Path, strategies: int) -> Outcome:
    """Show random lists, sets of dealers and sums."""
    draw, opened, small = random.Random(0), 0, 0
    server = LyingServer(folder, 6)
    for _ in range(strategies):
        server.begin()
        server.play(draw_views(draw, 6, tuple(server.spoilers)))
        sums = server.learned()
        opened += bool(sums)
        small += is_small(sums)
    return Outcome("views", small > 0, f"{small} small sums in {strategies} strategies, of which {opened} opened one")


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


def try_isolate(folder: Path) -> Outcome:
    """Tell a victim that nobody but colluders and itself is left, at each question."""
    details: list[str] = []
    succeeded = False
    for stage in ("list", "dealt", "active"):
        server = LyingServer(folder / stage, 6)
        everybody = (*range(6), *server.spoilers)
        alone = (0, *server.spoilers)
        whole = View(everybody, everybody, everybody)
        victim = {
            "list": View(alone, alone, alone),
            "dealt": View(everybody, alone, alone),
            "active": View(everybody, everybody, alone),
        }
        others = View(everybody, everybody, everybody[1:])
        server.play({0: victim[stage], **dict.fromkeys(range(1, 6), others if stage == "active" else whole)})
        succeeded = succeeded or is_small(server.learned())
        details.append(f"{stage}: {first(server.refused)}")
    return Outcome("isolate", succeeded, "; ".join(details)[:150])


def try_grind(folder: Path) -> Outcome:
    """Begin one question again and again, and show a client its list twice."""
    server = LyingServer(folder, 6)
    begun = 0
    for _ in range(10):
        begun += server.ask_keys(0)
        server.begin(same_question=True)
    server.begin()
    for number in range(6):
        server.ask_keys(number)
    server.show_spoilers()
    drawn = [server.ask_shares(0, range(7)) for _ in range(2)]
    return Outcome("grind", begun > 3 or drawn != [True, False], f"{begun} of 10 beginnings, lists answered {drawn}")


def try_replay(folder: Path) -> Outcome:
    """Show signatures and sealed shares of an earlier sum in a later one of the same name."""
    server = LyingServer(folder, 6)
    everybody = (*range(6), *server.spoilers)
    views = dict.fromkeys(range(6), View(everybody, everybody, everybody))
    server.play(views)
    name, old = server.terms.instance, server.agreements
    worked = server.learned() == [{*range(6)}]
    asked_again = server.ask_unmask(0)
    server.begin(instance=name, same_question=True)
    same_question = server.ask_keys(0)
    server.begin(instance=name)
    for number in views:
        server.ask_keys(number)
    server.show_spoilers()
    for number in views:
        server.ask_shares(number, everybody)
        server.ask_masked(number, views[number])
    server.ask_agree(0)
    server.agreements = {**old, 0: server.agreements[0]}
    opened = server.ask_unmask(0)
    succeeded = not worked or asked_again or same_question or opened
    return Outcome("replay", succeeded, f"{server.refused['unmask'][:90]}")


def try_twice(folder: Path) -> Outcome:
    """Ask two processes of one client for two sums of one question."""
    server = LyingServer(folder, 6)
    everybody = (*range(6), *server.spoilers)
    whole = View(everybody, everybody, everybody)
    for number in range(6):
        server.ask_keys(number)
    server.show_spoilers()
    for number in range(6):
        server.ask_shares(number, everybody)
        server.ask_masked(number, whole)
    client = server.clients[0]
    another = replace(client, state=client.state.copy())
    first_one = server.ask_agree(0)
    server.clients[0] = another
    server.views[0] = replace(whole, active=everybody[:-2])
    second_one = server.ask_agree(0)
    return Outcome("twice", not first_one or second_one, server.refused["agree"][:90])


def try_roster(folder: Path) -> Outcome:
    """Put keys of nobody, or of a client under another number, on the list."""
    details: list[str] = []
    succeeded = False
    for name in ("sybil", "renumbered", "unsigned"):
        server = LyingServer(folder / name, 6)
        for number in range(6):
            server.ask_keys(number)
        server.show_spoilers()
        advert, key = server.adverts[5], Key.new()
        changed = {
            "sybil": replace(advert, signer=key.public, masking=public_of(new_key())).signed(server.terms.context, key),
            "renumbered": replace(advert, signer=server.keys[6].public).signed(server.terms.context, server.keys[6]),
            "unsigned": replace(advert, masking=public_of(new_key())),
        }
        server.adverts[5] = changed[name]
        succeeded = succeeded or server.ask_shares(0, range(6))
        details.append(f"{name}: {first(server.refused)}")
    return Outcome("roster", succeeded, "; ".join(details)[:150])


def try_collide(folder: Path) -> Outcome:
    """Send one client another model, another seed, or a further vector, than the terms say."""
    succeeded = False
    for place, change in enumerate(("model", "seed", "vector")):
        server = LyingServer(folder / str(place), 6)
        everybody = (*range(6), *server.spoilers)
        for number in range(6):
            server.ask_keys(number)
        server.show_spoilers()
        for number in range(6):
            server.ask_shares(number, everybody)
        other = wire.raw_vector(torch.ones(D))
        if change == "seed":
            server.training["seed"] += 1
        else:
            server.vectors = {**server.vectors, change: other}
        succeeded = succeeded or server.ask_masked(0, View(everybody, everybody, everybody))
    bits = 4 * len(server.terms.model)
    return Outcome("collide", succeeded or bits < 256, f"{server.refused['masked'][:70]}; digests of {bits} bits")


def first(refused: Mapping[str, str]) -> str:
    """Return the first refusal, cut short."""
    return next((f"{kind}: {why[:90]}" for kind, why in refused.items()), "nothing refused")


def main() -> int:
    """Run all attacks; return 1 if one of them succeeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", type=int, default=40, help="how many random ones to try")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    attacks: Sequence[Callable[[Path], Outcome]] = (
        try_neighbourhoods,
        lambda folder: try_views(folder, arguments.strategies),
        try_isolate,
        try_grind,
        try_replay,
        try_twice,
        try_roster,
        try_collide,
    )
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        for place, attack in enumerate(attacks):
            outcomes.append(attack(Path(name) / str(place)))
            outcome = "SUCCEEDS" if outcomes[-1].succeeded else "fails"
            print(f"{outcomes[-1].attack:<15} {outcome:<9} {outcomes[-1].detail}", flush=True)
    if arguments.json:
        rows = [vars(outcome) for outcome in outcomes]
        arguments.json.write_text(json.dumps(rows, indent=1))
    return int(any(outcome.succeeded for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
