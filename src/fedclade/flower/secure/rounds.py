"""The server's side of secure aggregation: the five questions of a sum, put to all groups of a query at once."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from flwr.app import MessageType
from torch import Tensor

from fedclade.core import (
    REJECTED_SUM,
    ConfigError,
    Event,
    SumClipped,
    SumRejected,
    Sums,
    SumUnguarded,
    UpdateError,
    UpdateQuery,
    Updates,
    row_norms,
)
from fedclade.flower.models_sent import ModelsSent
from fedclade.flower.policy import CLEAR_SHARE
from fedclade.flower.replies import examples_trained_on, largest_of_class
from fedclade.flower.secure import adverts as advertising
from fedclade.flower.secure.adverts import Advert
from fedclade.flower.secure.encoding import DIGEST_BYTES, bitmap
from fedclade.flower.secure.group import BadSharesError, Group, by_row, too_small
from fedclade.flower.secure.masked_reply import MaskedReply, read_masked
from fedclade.flower.secure.numbers import BYTES_PER_ENTRY, ClusterSum, RejectedSumError
from fedclade.flower.secure.secrets import digest_of_numbers
from fedclade.flower.secure.setting import Asks, Members, SecureAggregation, check
from fedclade.flower.secure.statements import is_signed
from fedclade.flower.secure.sums_of_cluster import FEWEST_SUMS, combine, deal
from fedclade.flower.secure.terms import Terms, anchor_of, digest_of, listed, model_of, question_of
from fedclade.flower.wire import Content

LONGEST_CIPHERTEXT = 512  # bytes; two shares take some 130

T = TypeVar("T")

_log = logging.getLogger(__name__)


def secure_updates(
    of: SecureAggregation,
    asks: Asks,
    query: UpdateQuery,
    sent: ModelsSent,
    values: Mapping[str, Any],
    members: Members,
    n_parameters: int,
) -> Updates:
    """Return the sums of a query's updates, and signatures; ``values`` are what its training is told."""
    check(query)
    values = {**values, "signs": of.compared.dim > 0}
    return _Round(of, asks, query, sent, values, members, n_parameters).run()


class _Round:
    def __init__(
        self,
        of: SecureAggregation,
        asks: Asks,
        query: UpdateQuery,
        sent: ModelsSent,
        values: Mapping[str, Any],
        members: Members,
        D: int,
    ) -> None:
        self._of, self._asks, self._query, self._sent, self._values = of, asks, query, sent, values
        self._D, self._keys_of = D, members.keys
        sizes = {client: examples_trained_on(query, size) for client, size in members.sizes.items()}
        self._left_out = {client: why for client, why in of.barred.items() if client in query.ids}
        self._replies: dict[int, MaskedReply] = {}
        self._with_peers = set[int]()
        # A client may have registered with a size class; inside the sum it counts by its number of examples.
        self._weights = of.limiting.weights({client: largest_of_class(size) for client, size in sizes.items()})
        buffers = query.models[:, D:]
        norm_of_buffers = float(row_norms(buffers).max()) if buffers.numel() else 0.0
        self._norms = of.norms.in_round(query.round.number, norm_of_buffers, query.round.replicates)
        self._events: list[Event] = []
        dim, count = of.compared.dim, query.round.replicates
        self._parts = count if count > 1 and query.round.compares_parts else 0
        self._part_dim = int(values["dim"])
        self._clear = self._parts * self._part_dim + dim
        if CLEAR_SHARE * self._clear > D:
            raise ConfigError(
                f"network.secure_aggregation = true: {self._clear} numbers of each client that are sent as they are "
                f"tell too much of updates of {D} parameters; lower signature.dim ({self._part_dim or dim}), so that "
                f"they are at most {D // CLEAR_SHARE}"
            )

    def run(self) -> Updates:
        query = self._query
        ids = [client for client in query.ids if client not in self._left_out]
        row_of = dict(zip(query.ids, query.assignment, strict=True))
        groups: list[Group] = []
        for row, mine in by_row(ids, [row_of[client] for client in ids]).items():
            if len(mine) < (fewest := self._of.rules.fewest):
                self._left_out |= dict.fromkeys(mine, too_small(len(mine), fewest))
                continue
            dealt = deal(mine, self._of.rules.parts, fewest, query.round.generator(f"sums of model {row}"))
            self._note_unguarded(mine, len(dealt))
            groups += [Group(row, clients, self._terms(clients)) for clients in dealt]
        for stage in (self._keys, self._shares, self._masked, self._agree, self._unmask):
            groups = [group for group in groups if group.alive]
            if groups:
                stage({client: group for group in groups for client in group.alive})
            groups = [group for group in groups if self._goes_on(group, last=stage == self._unmask)]
        return self._collected(groups)

    def _note_unguarded(self, clients: Sequence[int], sums: int) -> None:
        """Note that one of a cluster's clients can turn its mean; if the config has one sum for each, note it once."""
        parts, fewest = self._of.rules.parts, self._of.rules.fewest
        if sums >= FEWEST_SUMS or (parts == 1 and self._of.is_unguarded_noted):
            return
        self._of.is_unguarded_noted = True
        because = "network.secure_parts = 1"
        if parts > 1:
            because = f"{len(clients)} clients are too few for {FEWEST_SUMS} sums of {fewest} (network.secure_fewest)"
        self._events.append(SumUnguarded(0, self._query.round.purpose, tuple(clients), sums, because))

    def _terms(self, clients: Sequence[int]) -> Terms:
        """Return the terms of a new sum of some clients, which are sent the same."""
        training = Content.of(self._asks.content("masked", self._values, self._sent.vectors[clients[0]]))
        return Terms(
            instance=secrets.token_hex(16),
            clients=len(clients),
            colluders=self._of.rules.colluders,
            neighbours=self._of.rules.neighbours,
            norm=self._norms.parameters,
            norm_of_buffers=self._norms.buffers,
            weight=max(self._weights[client] for client in clients),
            training=digest_of(training.values),
            question=question_of(training.values, training.vectors),
            model=model_of(training.vectors),
            anchor=anchor_of(training.vectors),
        )

    def _goes_on(self, group: Group, last: bool) -> bool:
        """Return whether a sum can still be had; if not, all its clients are left out."""
        if not (why := "" if last else group.too_few(self._of.rules)):
            return True
        self._left_out |= {client: why for client in [*group.alive, *group.masked] if client not in self._left_out}
        return False

    def _ask(
        self,
        of: Mapping[int, Group],
        kind: str,
        values: Callable[[int, Group], Mapping[str, Any]],
        read: Callable[[int, Content], T],
        largest: int = 0,
    ) -> Iterator[tuple[int, T]]:
        """Put a stage's question to clients; those that do not answer are no longer alive."""
        carries = kind == "masked"
        contents = {
            client: self._asks.content(
                kind,
                {"instance": group.terms.instance, **values(client, group)},
                self._sent.vectors[client] if carries else None,
            )
            for client, group in of.items()
        }

        def checked(client: int, content: Content) -> T:
            if content.get("instance", str) != of[client].terms.instance:
                raise UpdateError("answer about another sum than it was asked for")
            if not carries:
                content.has_only(())
            return read(client, content)

        answered = set[int]()
        number = str(self._query.round.number)
        for client, found in self._asks.request(contents, MessageType.TRAIN, number, checked, self._left_out, largest):
            answered.add(client)
            yield client, found
        for group in _groups(of):
            group.alive = [client for client in group.alive if client in answered]

    def _keys(self, of: Mapping[int, Group]) -> None:
        def read(client: int, content: Content) -> Advert:
            masking, sealing, signature = (content.get(name, bytes) for name in ("masking", "sealing", "signature"))
            insists = content.get("insists", bool)
            advert = Advert(client, masking, sealing, self._keys_of[client], signature, insists)
            advert.check(of[client].terms.context)
            if content.get("has_peers", bool):
                self._with_peers.add(client)
            return advert

        for client, advert in self._ask(
            of, "keys", lambda client, group: {"client": client, "terms": group.terms.text}, read
        ):
            of[client].adverts[client] = advert
        for group in _groups(of):
            self._left_out |= dict.fromkeys(group.leave_out_copies(), "shows a key that is shown twice in the sum")
            group.settle_list()

    def _shares(self, of: Mapping[int, Group]) -> None:
        lists = {id(group): self._list_of(group, has_signers=True) for group in _groups(of)}
        short_lists = {id(group): self._list_of(group, has_signers=False) for group in _groups(of)}

        def values(client: int, group: Group) -> Mapping[str, Any]:
            return (short_lists if client in self._with_peers else lists)[id(group)]

        def read(client: int, content: Content) -> tuple[dict[int, bytes], dict[int, bytes]]:
            group = of[client]
            holders, ciphertexts = listed(content, "clients", int), listed(content, "ciphertexts", bytes)
            promises = listed(content, "promises", bytes)
            others = [member for member in group.members if member != client]
            is_complete, count = group.graph.holders == 0, group.graph.holders or len(others)
            if sorted({*holders}) != holders or not {*holders} <= {*others} or len(holders) != count:
                raise UpdateError(f"shares for other clients than {count} of those that it was shown the keys of")
            if len(ciphertexts) != len(holders) or max(map(len, ciphertexts)) > LONGEST_CIPHERTEXT:
                raise UpdateError(
                    f"{len(ciphertexts)} sealed shares, expected {len(holders)} of at most {LONGEST_CIPHERTEXT} bytes"
                )
            if len(promises) != count + is_complete or {*map(len, promises)} != {2 * DIGEST_BYTES}:
                raise UpdateError(f"{len(promises)} promises of shares, expected {count + is_complete}")
            promise = content.get("commitment", bytes)
            if len(promise) != DIGEST_BYTES:
                raise UpdateError(f"a commitment of {len(promise)} bytes, expected {DIGEST_BYTES}")
            group.commitments[client] = promise
            promised = [*holders, client] if is_complete else holders
            return dict(zip(holders, ciphertexts, strict=True)), dict(zip(promised, promises, strict=True))

        for client, (ciphertexts, promises) in self._ask(of, "shares", values, read):
            of[client].ciphertexts[client], of[client].promises[client] = ciphertexts, promises
        for group in _groups(of):
            why = "too many of those that it has dealt shares to have dealt none themselves"
            self._left_out |= dict.fromkeys(group.settle_dealt(), why)

    def _list_of(self, group: Group, *, has_signers: bool) -> Mapping[str, Any]:
        """Return the whole list of a sum, as the values of a message; who has the clients' keys needs them not."""
        return advertising.told([group.adverts[client] for client in group.members], has_signers=has_signers)

    def _masked(self, of: Mapping[int, Group]) -> None:
        repeated = {"what": "masked", **{name: self._values[name] for name in ("round", "query", "purpose")}}
        S, dtype = self._query.models.shape[1], self._query.models.dtype
        statements = {id(group): group.statements for group in _groups(of)}
        lengths = {id(group): group.terms.numbers(self._D, S).length for group in _groups(of)}

        def values(client: int, group: Group) -> Mapping[str, Any]:
            sources = group.sources(client)
            ciphertexts = [group.ciphertexts[source][client] for source in sources]
            promises = [group.promises[source][client] for source in sources]
            dealt = {"dealt": statements[id(group)].dealt, "sources": sources}
            return {**self._values, **dealt, "ciphertexts": ciphertexts, "promises": promises}

        def read(client: int, content: Content) -> MaskedReply:
            expected = {**repeated, "model": self._sent.names[client]}
            reply = read_masked(content, lengths[id(of[client])], self._clear, dtype, expected)
            numbers, signature = digest_of_numbers(content.vector("masked")), content.get("signature", bytes)
            statement = statements[id(of[client])].masked(client, numbers)
            if not is_signed(statement, self._keys_of[client], signature):
                raise UpdateError("its masked update is not signed for this sum by its key")
            of[client].signed[client] = numbers, signature
            return reply

        largest = BYTES_PER_ENTRY * max(lengths.values()) + self._clear * dtype.itemsize
        self._replies = dict(self._ask(of, "masked", values, read, largest))
        for client, group in of.items():
            if client in self._replies:
                group.masked[client] = self._replies[client].masked
        for group in _groups(of):
            group.settle_active()

    def _agree(self, of: Mapping[int, Group]) -> None:
        statements = {id(group): group.statements for group in _groups(of)}
        active = {id(group): bitmap({*group.active}, group.members) for group in _groups(of)}

        def values(client: int, group: Group) -> Mapping[str, Any]:
            digests, signatures = group.signed_for(client)
            return {"active": active[id(group)], "digests": digests, "signatures": signatures}

        def read(client: int, content: Content) -> bytes:
            signature, key = content.get("signature", bytes), id(of[client])
            if not is_signed(statements[key].agreed(active[key]), self._keys_of[client], signature):
                raise UpdateError("its key has not signed that it agrees to the sum")
            return signature

        for client, signature in self._ask(of, "agree", values, read):
            of[client].agreements[client] = signature

    def _unmask(self, of: Mapping[int, Group]) -> None:
        agreements = {id(group): group.enough_agreements() for group in _groups(of)}

        def values(client: int, group: Group) -> Mapping[str, Any]:
            agreed = agreements[id(group)]
            return {"clients": list(agreed), "signatures": list(agreed.values())}

        def read(client: int, content: Content) -> None:
            of[client].take_shares(client, listed(content, "shares", bytes))

        for _ in self._ask(of, "unmask", values, read):
            pass

    def _collected(self, groups: Sequence[Group]) -> Updates:
        """Take the masks off, and return the sum of each cluster with what was sent in addition to it."""
        of_row = self._sums_by_row(groups)
        models = self._query.models
        totals: list[Tensor] = []
        figures: dict[int, tuple[int, ClusterSum]] = {}  # of each client: the place of its cluster's sum, and the sum
        for accepted in of_row.values():
            whole = combine([found for _, found in accepted], self._D, self._of.rule)
            for group, _ in accepted:
                figures |= dict.fromkeys(group.active, (len(totals), whole))
            totals.append(whole.total.to(models))
        ids = [client for client in self._query.ids if client in figures]
        for client in ids:  # that did not answer the last question: its update is in the sum
            self._left_out.pop(client, None)
        sums = [figures[client][1] for client in ids]
        places = [figures[client][0] for client in ids]
        stacked = torch.stack(totals) if totals else models.new_zeros(0, models.shape[1])
        replies = [self._replies[client] for client in ids]
        clear = torch.stack([each.clear for each in replies]) if replies else models.new_zeros(0, self._clear)
        clear = torch.where(clear >= 0, 1.0, -1.0).to(clear)  # signs, whatever a client sends
        split = self._parts * self._part_dim
        parts = clear[:, :split].view(len(ids), self._parts, self._part_dim) if self._parts else None
        losses = [torch.nan if self._of.withholds_losses else each.loss for each in sums]
        return Updates(
            ids=tuple(ids),
            # Every client counts with its share of its cluster's figures: of single clients there are none.
            sizes=torch.tensor([each.weight / each.clients for each in sums], dtype=torch.float64),
            losses=torch.tensor(losses, dtype=torch.float64),
            norms=torch.tensor([each.norm for each in sums], dtype=torch.float64),
            n_parameters=self._D,
            sums=Sums(stacked, torch.tensor(places, dtype=torch.int64)),
            sketches=clear[:, split:],
            parts=parts,
            left_out=self._left_out,
            events=tuple(self._events),
        )

    def _sums_by_row(self, groups: Sequence[Group]) -> Mapping[int, list[tuple[Group, ClusterSum]]]:
        """Return the sums that can be used, by the model that their clients were sent; note why others cannot."""
        size, what = self._query.models.shape[1], self._query.round.purpose
        of_row: dict[int, list[tuple[Group, ClusterSum]]] = {}
        for group in groups:
            clients = tuple(group.active)
            try:
                found = group.total(self._D, size)
            except RejectedSumError as error:
                _log.warning("round %d: a sum of %s is rejected: %s", self._query.round.number, what, error)
                self._left_out |= dict.fromkeys(clients, f"{REJECTED_SUM}: {error}")
                self._events.append(SumRejected(0, what, clients, str(error)))
            except UpdateError as error:
                if isinstance(error, BadSharesError):
                    self._of.barred[error.client] = str(error)
                self._left_out |= dict.fromkeys(clients, str(error))
            else:
                of_row.setdefault(group.row, []).append((group, found))
                if found.clipped:
                    _log.warning(
                        "round %d: %d of %d clients had their update shortened to norm %.3g (network.secure_norm)",
                        self._query.round.number,
                        found.clipped,
                        found.clients,
                        self._norms.parameters,
                    )
                    self._events.append(SumClipped(0, what, clients, found.clipped, self._norms.parameters))
        accepted = [found for sums in of_row.values() for _, found in sums]
        self._of.norms.take(self._query.round.number, self._norms, accepted, self._query.round.replicates)
        return of_row


def _groups(of: Mapping[int, Group]) -> list[Group]:
    """Return the groups of some clients, each once."""
    return list({id(group): group for group in of.values()}.values())
