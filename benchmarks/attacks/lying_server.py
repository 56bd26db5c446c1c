"""A server that lies to the clients of a sum, with colluding clients of its own.

It shows each client whatever list, dealers and sum it likes, and keeps all that it is given. :class:`LyingServer` is
abstract: ``secure_sums.py`` attacks clients in its own process, ``over_tls_app.py`` real SuperNodes.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import REST, Requests
from torch import Tensor

from fedclade.flower import wire
from fedclade.flower.secure import adverts as advertising
from fedclade.flower.secure.adverts import Advert, digest_of_list
from fedclade.flower.secure.encoding import bitmap
from fedclade.flower.secure.secrets import (
    MODULUS,
    Masked,
    agreed,
    combined,
    digest_of_numbers,
    is_key_of,
    is_seed_of,
    new_key,
    own_mask,
    pair_mask,
    public_of,
    unpack,
    unseal,
)
from fedclade.flower.secure.statements import Statements
from fedclade.flower.secure.terms import Terms, anchor_of, digest_of, model_of, question_of
from fedclade.flower.signing import Key
from fedclade.flower.wire import Content

WEIGHT = 60
"""Number of examples from which on a client counts no more."""


STAGES = {
    "keys": "the terms",
    "shares": "the list",
    "masked": "the dealers",
    "agree": "the sum",
    "unmask": "the agreements",
}
"""By the kind of request: what a client is shown in it, or asked for."""


@dataclass(frozen=True)
class View:
    """What the server shows to one client: the list, and who dealt shares and is in the sum."""

    members: tuple[int, ...]
    dealt: tuple[int, ...]
    active: tuple[int, ...]

    @classmethod
    def honest(cls, members: Iterable[int]) -> View:
        """Return the view of a sum that no client has dropped out of."""
        everybody = tuple(sorted(members))
        return cls(everybody, everybody, everybody)


def views_of_neighbourhoods(
    near: Sequence[int], helpers: Sequence[int], spoilers: Sequence[int]
) -> dict[int, View]:
    """Return views for the victim 0, its neighbours and helpers that do not fit together.

    The victim and its neighbours see lists without a drop-out. Helpers see a list without the victim and a sum that the
    neighbours have dropped out of, and so are to give shares of the neighbours' keys.
    """
    short, whole, rest = (
        (0, *near, *spoilers),
        (0, *near, *helpers, *spoilers),
        (*near, *helpers, *spoilers),
    )
    views = {0: View.honest(short), **dict.fromkeys(near, View.honest(whole))}
    return views | dict.fromkeys(helpers, View(rest, rest, (*helpers, *spoilers)))


class LyingServer(ABC):
    """A server and its colluding clients, in one sum after the other.

    Parameters
    ----------
    keys
        Public keys of the honest clients by number, in hexadecimal.
    colluders
        Keys of the colluding clients by number.
    training
        Values of the request for training; the seed is changed with each sum.
    model
        The model that is trained, ``[S]``.
    claimed
        Number of colluding clients that the terms of a sum state.
    """

    def __init__(
        self,
        keys: Mapping[int, str],
        colluders: Mapping[int, Key],
        training: Mapping[str, Any],
        model: Tensor,
        *,
        claimed: int = 1,
    ) -> None:
        self.public = dict(keys)
        self.colluders = dict(colluders)
        self.spoilers = tuple(sorted(colluders))
        self.claimed = claimed
        self.seed = 0
        self.refused: dict[str, str] = {}
        self.requests: defaultdict[int, Requests] = defaultdict(Requests)
        self._plain_training, self._model = dict(training), model
        self.begin()

    @abstractmethod
    def deliver(
        self, kind: str, requests: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, Content | str]:
        """Send each client the values of a request of a kind; return the replies, or why a client refuses.

        Requests of the kind ``masked`` carry :attr:`vectors`.
        """

    def begin(self, *, instance: str = "", same_question: bool = False) -> None:
        """Begin a new sum; with ``same_question`` it is about what was asked before."""
        self.seed += not same_question
        self.training: dict[str, Any] = {**self._plain_training, "seed": self.seed}
        self.vectors = {"model": wire.raw_vector(self._model)}
        sent = {name: array.data for name, array in self.vectors.items()}
        self.terms = Terms(
            instance=instance or f"sum {secrets.token_hex(8)}",
            clients=len(self.public) + len(self.colluders),
            colluders=self.claimed,
            neighbours=0,
            norm=8.0,
            norm_of_buffers=8.0,
            weight=WEIGHT,
            training=digest_of(self.training),
            question=question_of(self.training, sent),
            model=model_of(sent),
            anchor=anchor_of(sent),
        )
        self.adverts: dict[int, Advert] = {}
        self.commitments: dict[int, bytes] = {}
        self.secret: dict[int, tuple[bytes, bytes]] = {}
        self.dealt: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = {}
        self.masked: dict[int, bytes] = {}
        self.signatures: dict[int, bytes] = {}
        self.agreements: dict[int, bytes] = {}
        self.shares: dict[tuple[int, str], dict[int, bytes]] = {}
        self.views: dict[int, View] = {}

    def play(self, views: Mapping[int, View]) -> None:
        """Go through all stages of a sum; ``views`` says what each client is shown. Refusals are noted."""
        present = self.ask_keys(*views)
        self.show_spoilers()
        present = self.ask_shares({number: views[number].members for number in present})
        present = self.ask_masked({number: views[number] for number in present})
        present = self.ask_agree(*present)
        self.ask_unmask(*present)
        self.read_own_shares()

    def ask(self, kind: str, requests: Mapping[int, Mapping[str, Any]]) -> dict[int, Content]:
        """Send requests of a stage, and return the replies by client; refusals are noted."""
        if not requests:
            return {}
        named = {"what": kind, "instance": self.terms.instance}
        scope = {name: self.training[name] for name in ("layout", "run")}
        sent = {number: {**named, **scope, **values} for number, values in requests.items()}
        for number in sent:
            self.requests[number].count(kind)
        replies: dict[int, Content] = {}
        for number, reply in self.deliver(kind, sent).items():
            if isinstance(reply, str):
                self.refused.setdefault(kind, reply)
            else:
                replies[number] = reply
        return replies

    def ask_keys(self, *numbers: int) -> list[int]:
        """Ask clients for their keys; return those that replied."""
        values = {"terms": self.terms.text}
        replies = self.ask("keys", {number: {"client": number, **values} for number in numbers})
        for number, reply in replies.items():
            self.adverts[number] = Advert(
                number,
                masking=reply.get("masking", bytes),
                sealing=reply.get("sealing", bytes),
                signer=self.public[number],
                signature=reply.get("signature", bytes),
                min_honest=reply.get("min_honest", int),
            )
        return list(replies)

    def show_spoilers(self) -> None:
        """Make the colluders' keys for the sum; they claim to insist on sums if honest clients do."""
        demand = 2 if any(advert.min_honest > 0 for advert in self.adverts.values()) else 0
        for number, key in self.colluders.items():
            masking, sealing = new_key(), new_key()
            advert = Advert(
                number, public_of(masking), public_of(sealing), key.public, min_honest=demand
            )
            self.adverts[number] = advert.signed(self.terms.context, key)
            self.secret[number] = masking, sealing

    def ask_shares(self, lists: Mapping[int, Sequence[int]]) -> list[int]:
        """Show clients their lists, and ask for shares of their secrets; return those that replied."""
        requests: dict[int, Mapping[str, Any]] = {}
        for number, members in lists.items():
            shown = [self.adverts[each] for each in sorted(members) if each in self.adverts]
            requests[number] = advertising.told(shown, has_signers=True)
        replies = self.ask("shares", requests)
        for number, reply in replies.items():
            self.commitments[number] = reply.get("commitment", bytes)
            holders, promises = reply.values["clients"], reply.values["promises"]
            ciphertexts = dict(zip(holders, reply.values["ciphertexts"], strict=True))
            self.dealt[number] = ciphertexts, dict(zip([*holders, number], promises, strict=True))
        return list(replies)

    def ask_masked(self, views: Mapping[int, View]) -> list[int]:
        """Show clients who has dealt shares, and ask for masked updates; return those that replied."""
        replies = self.ask(
            "masked", {number: self._dealt_to(number, view) for number, view in views.items()}
        )
        for number, reply in replies.items():
            self.masked[number] = reply.vector("masked")
            self.signatures[number] = reply.get("signature", bytes)
            self.views[number] = views[number]
        return list(replies)

    def _dealt_to(self, number: int, view: View) -> dict[str, Any]:
        """Return a request for a masked update; where a client dealt no shares, the server forges them."""
        sources = [each for each in view.dealt if each != number]
        nothing: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}
        dealt = [self.dealt.get(source, nothing) for source in sources]
        shares = {
            "sources": sources,
            "ciphertexts": [ciphertexts.get(number, b"forged") for ciphertexts, _ in dealt],
            "promises": [promises.get(number, b"forged") for _, promises in dealt],
        }
        return {**self.training, **shares, "dealt": bitmap({*view.dealt}, view.members)}

    def ask_agree(self, *numbers: int) -> list[int]:
        """Ask clients to agree to their sums; colluders sign whatever a client would like to see."""
        replies = self.ask("agree", {number: self._signed_for(number) for number in numbers})
        for number, reply in replies.items():
            self.agreements[number] = reply.get("signature", bytes)
        return list(replies)

    def _signed_for(self, number: int) -> dict[str, Any]:
        view = self.views[number]
        statements = self.statements(view)
        digests, signatures = list[bytes](), list[bytes]()
        for partner in view.dealt:
            if partner == number or partner not in view.active:
                continue
            numbers, signature = bytes(32), bytes(64)
            if partner in self.colluders:
                statement = statements.masked(partner, numbers)
                signature = self.colluders[partner].private.sign(statement)
            elif partner in self.masked:
                numbers, signature = (
                    digest_of_numbers(self.masked[partner]),
                    self.signatures[partner],
                )
            digests.append(numbers)
            signatures.append(signature)
        bits = bitmap({*view.active}, view.members)
        return {"active": bits, "digests": digests, "signatures": signatures}

    def ask_unmask(self, *numbers: int) -> list[int]:
        """Ask clients for their shares, with all agreements to their sums; return those that replied."""
        replies = self.ask("unmask", {number: self._agreements_for(number) for number in numbers})
        for number, reply in replies.items():
            view = self.views[number]
            for dealer, share in zip(view.dealt, reply.values["shares"], strict=True):
                which = "seed" if dealer in view.active else "key"
                if share:
                    self.shares.setdefault((dealer, which), {})[number] = share
        return list(replies)

    def _agreements_for(self, number: int) -> dict[str, Any]:
        view = self.views[number]
        signatures = {
            each: self.agreements[each] for each in self.agreements if self.views[each] == view
        }
        statement = self.statements(view).agreed(bitmap({*view.active}, view.members))
        for spoiler, key in self.colluders.items():
            if spoiler in view.active:
                signatures[spoiler] = key.private.sign(statement)
        return {"clients": list(signatures), "signatures": list(signatures.values())}

    def statements(self, view: View) -> Statements:
        """Return what a client signs by what it was shown."""
        adverts = [self.adverts[each] for each in view.members if each in self.adverts]
        listing = digest_of_list(self.terms.context, adverts)
        return Statements((self.terms.context, listing), bitmap({*view.dealt}, view.members))

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
        seeds = {number for number in self.masked if self.find_secret(number, "seed") is not None}
        keys = {number for number in self.masked if self.find_secret(number, "key") is not None}
        sums: dict[int, set[int]] = {number: {number} for number in self.masked}
        closed = {number for number in self.masked if number not in seeds}
        for number in self.masked:
            for other in self.views[number].dealt:
                is_known = (
                    other == number or other in self.spoilers or number in keys or other in keys
                )
                if is_known:
                    continue
                if self._share_a_mask(number, other):
                    merged = sums[number] | sums[other]
                    sums |= dict.fromkeys(merged, merged)
                else:
                    closed.add(number)
        return [
            found
            for found in {id(each): each for each in sums.values()}.values()
            if not found & closed
        ]

    def _share_a_mask(self, number: int, other: int) -> bool:
        if other not in self.masked:
            return False
        same_list = self.views[number].members == self.views[other].members
        return same_list and number in self.views[other].dealt

    def find_secret(self, number: int, which: str) -> bytes | None:
        """Return a client's seed or masking key, if the server has enough shares of it."""
        shares = self.shares.get((number, which), {})
        members = self.views[number].members
        insisting = sum(self.adverts[member].min_honest > 0 for member in members)
        needed = self.terms.graph(len(members), insisting).needed
        of_seed = is_seed_of(
            self.commitments[number], self.statements(self.views[number]).scope, number
        )
        holds = of_seed if which == "seed" else is_key_of(self.adverts[number].masking)
        return combined(list(shares.values())[:needed], holds) if len(shares) >= needed else None

    def used(self) -> str:
        """Return the requests to client 0, which is the victim of every attack."""
        return str(self.requests[0])

    def why_stopped(self) -> str:
        """Return the first refusal, as the end of a row's detail; an empty text if no client refused."""
        for kind, reason in self.refused.items():
            return f": the client stops at {STAGES[kind]}{REST}{reason[:90]}"
        return ""

    def open_update(self, number: int, *, parameters: int) -> Tensor | None:
        """Take all masks off a client's update; None if the server does not know one of them.

        Parameters
        ----------
        number
            The client.
        parameters
            D of the model; further entries are buffers.
        """
        if number not in self.masked or (seed := self.find_secret(number, "seed")) is None:
            return None
        scope, total = self.statements(self.views[number]).scope, unpack(self.masked[number])
        total = total - own_mask(seed, scope, number, len(total))
        for other in self.views[number].dealt:
            if other == number:
                continue
            shared = self._find_shared(number, other)
            if shared is None:
                return None
            mask: Masked = pair_mask(shared, scope, (number, other), len(total))
            total = total - mask if number < other else total + mask
        numbers = self.terms.numbers(parameters, len(self._model))
        found = numbers.decode(total % MODULUS, 1)
        return found.total / found.weight

    def _find_shared(self, number: int, other: int) -> bytes | None:
        """Return the secret by which two clients mask, if the server knows the key of one of them."""
        if other in self.spoilers:
            return agreed(self.secret[other][0], self.adverts[number].masking)
        for one, partner in ((number, other), (other, number)):
            key = self.find_secret(one, "key") if one in self.views else None
            if key is not None:
                return agreed(key, self.adverts[partner].masking)
        return None
