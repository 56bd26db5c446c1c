"""Server's side of secure aggregation: five requests to all clients of a training query.

All clients that receive the same model form one or several groups, and the updates of each group
are added up to one sum. Every request is sent to all groups at the same time. The requests are the
rounds of Bonawitz et al. 2017.
``docs/secure-aggregation.md`` describes the protocol.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from flwr.app import MessageType
from torch import Tensor

from fedclade.core import (
    NOT_ASKED,
    REJECTED_SUM,
    ConfigError,
    Event,
    SumClipped,
    SumRejected,
    Sums,
    SumUnguarded,
    TrainQuery,
    UpdateError,
    Updates,
    row_norms,
)
from fedclade.flower.models_sent import ModelsSent
from fedclade.flower.policy import CLEAR_SHARE
from fedclade.flower.replies import examples_trained_on, largest_of_class
from fedclade.flower.secure import adverts as advertising
from fedclade.flower.secure.adverts import Advert, check_min_honest
from fedclade.flower.secure.encoding import DIGEST_BYTES, bitmap
from fedclade.flower.secure.group import BadSharesError, Group
from fedclade.flower.secure.norms import Norms
from fedclade.flower.secure.secrets import (
    BYTES_PER_ENTRY,
    ClusterSum,
    Masked,
    RejectedSumError,
    digest_of_numbers,
    unpack,
)
from fedclade.flower.secure.statements import is_signed
from fedclade.flower.secure.sums_of_cluster import FEWEST_SUMS, combine, deal
from fedclade.flower.secure.terms import (
    Asks,
    Members,
    SecureAggregation,
    Terms,
    anchor_of,
    check,
    digest_of,
    listed,
    model_of,
    question_of,
)
from fedclade.flower.wire import Content, read_vector, shown

LONGEST_CIPHERTEXT = 512
"""Largest number of bytes of two encrypted shares, which usually take about 130 bytes."""

T = TypeVar("T")

GroupOf = Mapping[int, Group]
"""Group of each client to which a request is sent."""

_log = logging.getLogger(__name__)


def secure_updates(
    settings: SecureAggregation,
    asks: Asks,
    query: TrainQuery,
    sent: ModelsSent,
    values: Mapping[str, Any],
    members: Members,
    n_parameters: int,
) -> Updates:
    """Let clients train under secure aggregation; return the sum of their updates by cluster.

    Parameters
    ----------
    settings
        Secure aggregation of the run. Its barred clients are left out, and clients that break the
        protocol in this call are added to its barred clients.
    asks
        Sender of requests to clients.
    query
        Training query.
    sent
        Models of the query as they are sent.
    values
        Values of the training request, which clients need to train.
    members
        Number of examples and public key of each client.
    n_parameters
        Number of parameters of the model, without its buffers.

    Returns
    -------
    Updates
        Updates with a sum for each cluster in place of single updates, and with sketches of the
        updates of single clients if the algorithm compares clients.

    Raises
    ------
    ConfigError
        If updates of the query cannot be added up, or if sketches reveal too much of an update.
    """
    check(query)
    values = {**values, "signs": settings.compared.dim > 0}
    return _SecureQuery(
        settings, asks, query, sent=sent, values=values, members=members, n_parameters=n_parameters
    ).run()


@dataclass(frozen=True, eq=False)
class MaskedReply:
    """Client's reply to the third request of secure aggregation.

    It consists of the client's masked vector and, in clear, the concatenated sketches by which the
    server compares clients.
    """

    masked: Masked
    clear: Tensor


def read_masked(
    content: Content, length: int, clear: int, dtype: torch.dtype, expected: Mapping[str, Any]
) -> MaskedReply:
    """Check and read a client's masked vector, the reply to the third request of a sum.

    Parameters
    ----------
    content
        Content of the reply.
    length, clear
        Expected numbers of masked entries, and of entries in clear.
    dtype
        Floating-point type of the entries in clear.
    expected
        Values that the reply must repeat from the request.

    Raises
    ------
    UpdateError
        If a value, a length or an entry is not as expected.
    """
    for name, sent in expected.items():
        got = content.get(name, type(sent))
        if got != sent:
            raise UpdateError(
                f"the reply has the {name} {shown(got)}, expected {sent!r} as in the request, so the "
                "server ignores it"
            )
    vectors = ["masked"]
    if clear:
        vectors.append("clear")
    content.has_only(vectors)
    data = content.vector("masked")
    if len(data) != BYTES_PER_ENTRY * length:
        raise UpdateError(
            f"the masked update has {len(data)} bytes, expected {BYTES_PER_ENTRY * length}"
        )
    sketches = torch.empty(0, dtype=dtype)
    if clear:
        sketches = read_vector(content.vector("clear"), (clear,), dtype, "signatures")
        not_finite = int((~torch.isfinite(sketches)).sum())
        if not_finite:
            raise UpdateError(
                f"{not_finite} of {clear} entries of the client's unmasked sketches are NaN or "
                "infinite"
            )
    return MaskedReply(unpack(data), sketches)


def clients_by_row(ids: Sequence[int], assignment: Sequence[int]) -> Mapping[int, list[int]]:
    """Return the clients that receive each model, by the row of the model in the query."""
    clients_of: dict[int, list[int]] = {}
    for client, row in zip(ids, assignment, strict=True):
        clients_of.setdefault(row, []).append(client)
    return clients_of


class _SecureQuery:
    """Execution of one training query under secure aggregation.

    The parameters are those of :func:`secure_updates`.
    """

    def __init__(
        self,
        settings: SecureAggregation,
        asks: Asks,
        query: TrainQuery,
        sent: ModelsSent,
        values: Mapping[str, Any],
        members: Members,
        n_parameters: int,
    ) -> None:
        self._settings = settings
        self._asks = asks
        self._query = query
        self._sent = sent
        self._values = values
        self._public_keys = members.keys
        self._n_parameters = n_parameters
        self._replies: dict[int, MaskedReply] = {}
        self._has_peers_file = set[int]()
        self._events: list[Event] = []
        barred = settings.barred
        self._left_out = {client: barred[client] for client in query.ids if client in barred}
        self._weights = self._weights_of(members.sizes)
        self._norms = self._norms_of_round()
        self._set_clear_lengths()

    def _weights_of(self, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Return the weight of each client: its number of training examples, limited by the run."""
        trained_on = {
            client: examples_trained_on(self._query, size) for client, size in sizes.items()
        }
        # A client may have registered with a size class (a power of two). In the sum its weight is
        # its true number of examples, which may be any number of the class.
        largest = {client: largest_of_class(size) for client, size in trained_on.items()}
        return self._settings.limiting.weights(largest)

    def _norms_of_round(self) -> Norms:
        """Return the limits on the norms of updates in this round, for parameters and buffers."""
        buffers = self._query.models.vectors[:, self._n_parameters :]
        norm_of_buffers = 0.0
        if buffers.numel():
            norm_of_buffers = float(row_norms(buffers).max())
        return self._settings.norms.in_round(
            self._query.round.number, norm_of_buffers, self._query.work.split_count
        )

    def _set_clear_lengths(self) -> None:
        """Set how many numbers each client sends in clear, and check that they are not too many.

        The numbers are the signs in the sketch of the client's update and in the sketches of its
        updates from disjoint parts of its data, if the query requests these sketches.

        Raises
        ------
        ConfigError
            If the numbers reveal too much of an update.
        """
        compared = self._query.work.compared_splits
        self._parts = 0 if compared is None else compared.count
        self._part_dim = int(self._values["dim"])
        dim = self._settings.compared.dim
        self._clear = self._parts * self._part_dim + dim
        if CLEAR_SHARE * self._clear > self._n_parameters:
            raise ConfigError(
                f"network.secure_aggregation = true: {self._clear} unmasked numbers of each client "
                f"reveal too much of an update of {self._n_parameters} parameters; lower "
                f"signature.dim ({self._part_dim or dim}) until there are at most "
                f"{self._n_parameters // CLEAR_SHARE} unmasked numbers"
            )

    def run(self) -> Updates:
        """Send the five requests of the protocol, and return the sums of the clients' updates."""
        groups = self._make_groups()
        stages = (
            self._request_keys,
            self._request_shares,
            self._request_masked_vectors,
            self._request_agreements,
            self._request_opened_shares,
        )
        for stage in stages:
            groups = [group for group in groups if group.alive]
            if groups:
                stage({client: group for group in groups for client in group.alive})
            # After the last request, removing the masks checks whether there are enough shares.
            if stage != self._request_opened_shares:
                groups = [group for group in groups if self._is_possible(group)]
        return self._updates_of(groups)

    def _make_groups(self) -> list[Group]:
        """Divide the clients of each model into groups, one for each sum.

        The clients of a model are left out if they are too few for a sum.
        """
        query = self._query
        rules = self._settings.rules
        row_of = dict(zip(query.ids, query.models.start, strict=True))
        ids = [client for client in query.ids if client not in self._left_out]
        groups: list[Group] = []
        for row, clients in clients_by_row(ids, [row_of[client] for client in ids]).items():
            if len(clients) < rules.fewest:
                why = (
                    f"{NOT_ASKED}: its cluster has {len(clients)} clients in this round, and a sum "
                    f"needs at least {rules.fewest} (network.secure_fewest)"
                )
                self._left_out |= dict.fromkeys(clients, why)
                continue
            generator = query.round.generator(f"sums of model {row}")
            dealt = deal(clients, rules.parts, rules.fewest, generator)
            self._note_unguarded(clients, len(dealt))
            groups += [Group(row, members, self._terms_of(members)) for members in dealt]
        return groups

    def _note_unguarded(self, clients: Sequence[int], sums: int) -> None:
        """Record an event if a single client could choose the direction of a cluster's mean update.

        This is possible if the clients of the cluster are divided into too few sums. If the config
        sets one sum for each cluster, it is possible in every round, and recorded once per run.

        Parameters
        ----------
        clients
            Clients of the cluster.
        sums
            Number of sums into which they are divided.
        """
        rules = self._settings.rules
        is_noted = rules.parts == 1 and self._settings.is_unguarded_noted
        if sums >= FEWEST_SUMS or is_noted:
            return
        self._settings.is_unguarded_noted = True
        because = "network.secure_parts = 1"
        if rules.parts > 1:
            because = (
                f"{len(clients)} clients are too few for {FEWEST_SUMS} sums of {rules.fewest} "
                "(network.secure_fewest)"
            )
        purpose = self._query.round.purpose
        event = SumUnguarded(0, purpose, tuple(clients), sums=sums, because=because)
        self._events.append(event)

    def _terms_of(self, clients: Sequence[int]) -> Terms:
        """Return the terms of a new sum of clients that receive the same model."""
        vectors = self._sent.vectors[clients[0]]
        training = Content.of(self._asks.content("masked", self._values, vectors))
        return Terms(
            instance=secrets.token_hex(16),
            clients=len(clients),
            colluders=self._settings.rules.colluders,
            neighbours=self._settings.rules.neighbours,
            norm=self._norms.parameters,
            norm_of_buffers=self._norms.buffers,
            weight=max(self._weights[client] for client in clients),
            training=digest_of(training.values),
            question=question_of(training.values, training.vectors),
            model=model_of(training.vectors),
            anchor=anchor_of(training.vectors),
        )

    def _is_possible(self, group: Group) -> bool:
        """Return whether a group can still complete its sum; if not, leave its clients out."""
        why = group.why_impossible(self._settings.rules)
        if not why:
            return True
        for client in [*group.alive, *group.masked]:
            self._left_out.setdefault(client, why)
        return False

    def _request(
        self,
        group_of: GroupOf,
        kind: str,
        values: Callable[[int, Group], Mapping[str, Any]],
        read: Callable[[int, Content], T],
        largest: int = 0,
    ) -> Iterator[tuple[int, T]]:
        """Send one request of the protocol to clients; yield each client with its parsed reply.

        After the last reply, clients without a valid reply are removed from the ``alive`` clients
        of their groups.

        Parameters
        ----------
        group_of
            Group of each client.
        kind
            Name of the request. The request ``masked`` also contains the client's model.
        values
            Function that returns the values of the request to a client.
        read
            Function that parses and checks a client's reply; if it raises an UpdateError, the
            client is left out.
        largest
            Largest number of bytes of the vectors of a reply.
        """
        trains = kind == "masked"
        contents = {
            client: self._asks.content(
                kind,
                {"instance": group.terms.instance, **values(client, group)},
                self._sent.vectors[client] if trains else None,
            )
            for client, group in group_of.items()
        }

        def read_checked(client: int, content: Content) -> T:
            if content.get("instance", str) != group_of[client].terms.instance:
                raise UpdateError(
                    "the reply belongs to another sum than the request, so the server ignores it"
                )
            if not trains:
                content.has_only(())
            return read(client, content)

        replied = set[int]()
        number = str(self._query.round.number)
        replies = self._asks.request(
            contents,
            MessageType.TRAIN,
            group=number,
            read=read_checked,
            left_out=self._left_out,
            largest=largest,
        )
        for client, reply in replies:
            replied.add(client)
            yield client, reply
        for group in _groups_in(group_of):
            group.alive = [client for client in group.alive if client in replied]

    # Message 1: public keys.

    def _request_keys(self, group_of: GroupOf) -> None:
        """Send the first request: clients join and reply with their public keys.

        Clients with invalid keys or unmet demands are left out, and the list of clients is fixed.
        """

        def values(client: int, group: Group) -> Mapping[str, Any]:
            return {"client": client, "terms": group.terms.text}

        def read(client: int, content: Content) -> Advert:
            min_honest = content.get("min_honest", int)
            check_min_honest(min_honest)
            advert = Advert(
                client=client,
                masking=content.get("masking", bytes),
                sealing=content.get("sealing", bytes),
                signer=self._public_keys[client],
                signature=content.get("signature", bytes),
                min_honest=min_honest,
            )
            advert.check(group_of[client].terms.context)
            if content.get("has_peers", bool):
                self._has_peers_file.add(client)
            return advert

        for client, advert in self._request(group_of, "keys", values, read):
            group_of[client].adverts[client] = advert
        for group in _groups_in(group_of):
            copied = group.leave_out_copied_keys()
            self._left_out |= dict.fromkeys(copied, "its public key for the sum is not unique")
            self._left_out |= group.leave_out_unprotected()
            group.settle_list()

    # Message 2: the server sends the list of clients, and receives encrypted shares.

    def _request_shares(self, group_of: GroupOf) -> None:
        """Send the second request: clients receive the list and reply with encrypted shares."""
        full_lists: dict[Group, Mapping[str, Any]] = {}
        lists_without_signers: dict[Group, Mapping[str, Any]] = {}
        for group in _groups_in(group_of):
            adverts = [group.adverts[client] for client in group.members]
            full_lists[group] = advertising.told(adverts, has_signers=True)
            lists_without_signers[group] = advertising.told(adverts, has_signers=False)

        def values(client: int, group: Group) -> Mapping[str, Any]:
            # A client with a peers-file takes the other clients' public keys from this file.
            return (lists_without_signers if client in self._has_peers_file else full_lists)[group]

        def read(client: int, content: Content) -> _DealtShares:
            return _read_dealt_shares(client, content, group_of[client])

        for client, dealt in self._request(group_of, "shares", values, read):
            group = group_of[client]
            group.ciphertexts[client] = dealt.ciphertexts
            group.promises[client] = dealt.promises
            group.commitments[client] = dealt.commitment
        for group in _groups_in(group_of):
            why = "too many clients that hold its shares have dealt no shares themselves"
            self._left_out |= dict.fromkeys(group.settle_dealt(), why)

    # Message 3: the server sends encrypted shares and the model, and receives masked vectors.

    def _request_masked_vectors(self, group_of: GroupOf) -> None:
        """Send the third request: clients train and reply with masked updates."""
        groups = _groups_in(group_of)
        entries = self._query.models.vectors.shape[1]
        dtype = self._query.models.vectors.dtype
        repeated = {name: self._values[name] for name in ("round", "query", "purpose")}
        repeated["what"] = "masked"
        statements = {group: group.statements for group in groups}
        lengths = {
            group: group.terms.numbers(self._n_parameters, entries).length for group in groups
        }

        def values(client: int, group: Group) -> Mapping[str, Any]:
            dealers = group.dealers_to(client)
            return {
                **self._values,
                "dealt": statements[group].dealt,
                "sources": dealers,
                "ciphertexts": [group.ciphertexts[dealer][client] for dealer in dealers],
                "promises": [group.promises[dealer][client] for dealer in dealers],
            }

        def read(client: int, content: Content) -> MaskedReply:
            group = group_of[client]
            expected = {**repeated, "model": self._sent.names[client]}
            reply = read_masked(content, lengths[group], self._clear, dtype, expected=expected)
            digest = digest_of_numbers(content.vector("masked"))
            signature = content.get("signature", bytes)
            statement = statements[group].masked(client, digest)
            if not is_signed(statement, self._public_keys[client], signature):
                raise UpdateError(
                    "the masked update is not signed for this sum by the client's key, so the server "
                    "leaves it out of the sum"
                )
            group.signed[client] = (digest, signature)
            return reply

        largest = BYTES_PER_ENTRY * max(lengths.values()) + self._clear * dtype.itemsize
        self._replies = dict(self._request(group_of, "masked", values, read, largest=largest))
        for client, reply in self._replies.items():
            group_of[client].masked[client] = reply.masked
        for group in groups:
            group.settle_active()

    # Message 4: the server sends the set of clients in the sum, and receives signatures of it.

    def _request_agreements(self, group_of: GroupOf) -> None:
        """Send the fourth request: clients sign the set of clients whose updates are added up."""
        groups = _groups_in(group_of)
        active = {group: bitmap({*group.active}, group.members) for group in groups}
        statements = {group: group.statements.agreed(active[group]) for group in groups}

        def values(client: int, group: Group) -> Mapping[str, Any]:
            digests, signatures = group.signed_vectors_for(client)
            return {"active": active[group], "digests": digests, "signatures": signatures}

        def read(client: int, content: Content) -> bytes:
            signature = content.get("signature", bytes)
            if not is_signed(statements[group_of[client]], self._public_keys[client], signature):
                raise UpdateError(
                    "the agreement to the sum is not signed by the client's key, so it does not count"
                )
            return signature

        for client, signature in self._request(group_of, "agree", values, read):
            group_of[client].agreements[client] = signature

    # Message 5: the server sends the signatures, and receives decrypted shares.

    def _request_opened_shares(self, group_of: GroupOf) -> None:
        """Send the fifth request: clients reply with decrypted shares to remove the masks."""
        agreements = {group: group.first_agreements() for group in _groups_in(group_of)}

        def values(_: int, group: Group) -> Mapping[str, Any]:
            signatures = agreements[group]
            return {"clients": list(signatures), "signatures": list(signatures.values())}

        def read(client: int, content: Content) -> None:
            group_of[client].take_shares(client, listed(content, "shares", bytes))

        for _ in self._request(group_of, "unmask", values, read):
            pass

    def _updates_of(self, groups: Sequence[Group]) -> Updates:
        """Remove the masks of all groups; return updates that contain the sum of each cluster."""
        totals: list[Tensor] = []
        place_of: dict[int, int] = {}
        sum_of: dict[int, ClusterSum] = {}
        for accepted in self._accepted_sums(groups).values():
            of_cluster = combine(
                [found for _, found in accepted], self._n_parameters, self._settings.rule
            )
            for group, _ in accepted:
                place_of |= dict.fromkeys(group.active, len(totals))
                sum_of |= dict.fromkeys(group.active, of_cluster)
            totals.append(of_cluster.total.to(self._query.models.vectors))
        ids = [client for client in self._query.ids if client in sum_of]
        for client in ids:
            # A client without a reply to the last request is still part of the sum.
            self._left_out.pop(client, None)
        return self._as_updates(
            ids, totals, [place_of[client] for client in ids], [sum_of[client] for client in ids]
        )

    def _as_updates(
        self,
        ids: Sequence[int],
        totals: Sequence[Tensor],
        places: Sequence[int],
        sums: Sequence[ClusterSum],
    ) -> Updates:
        """Return the updates of a query, with the sum of each cluster in place of single updates.

        The server does not know the number of examples, the loss or the norm of the update of a
        single client. The result states the mean over the client's cluster instead.

        Parameters
        ----------
        ids
            Clients whose updates are part of a sum.
        totals
            Sum of the updates of each cluster, ``[S]``.
        places
            For each client, the index of its cluster's sum in ``totals``.
        sums
            For each client, the object with its cluster's number of examples, loss and norm.
        """
        models = self._query.models.vectors
        no_totals = models.new_zeros(0, models.shape[1])
        sketches, parts = self._signatures_of(ids)
        losses = [found.loss for found in sums]
        if self._settings.withholds_losses:
            losses = [torch.nan] * len(sums)
        return Updates.of(
            ids=tuple(ids),
            sizes=_doubles([found.weight / found.clients for found in sums]),
            losses=_doubles(losses),
            norms=_doubles([found.norm for found in sums]),
            n_parameters=self._n_parameters,
            sums=Sums(
                torch.stack(list(totals)) if totals else no_totals,
                torch.tensor(places, dtype=torch.int64),
            ),
            sketches=sketches,
            parts=parts,
            left_out=self._left_out,
            events=tuple(self._events),
        )

    def _signatures_of(self, ids: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Return the sketches that clients have sent in clear, reduced to signs of 1 and −1.

        Returns
        -------
        tuple[Tensor, Tensor | None]
            Sketches of the updates of n clients, ``[n, R]``, with R signs for each client; and
            sketches of the updates from disjoint parts of their data, ``[n, parts, R']``, or None
            if the query does not compare such updates.
        """
        clear = self._query.models.vectors.new_zeros(0, self._clear)
        if ids:
            clear = torch.stack([self._replies[client].clear for client in ids])
        signs = torch.where(clear >= 0, 1.0, -1.0).to(clear)
        end_of_parts = self._parts * self._part_dim
        parts = None
        if self._parts:
            parts = signs[:, :end_of_parts].view(len(ids), self._parts, self._part_dim)
        return signs[:, end_of_parts:], parts

    def _accepted_sums(
        self, groups: Sequence[Group]
    ) -> Mapping[int, list[tuple[Group, ClusterSum]]]:
        """Remove the masks of all groups; return the valid sums by the row of their model.

        Clients of a group without a valid sum are left out.
        """
        accepted: dict[int, list[tuple[Group, ClusterSum]]] = {}
        for group in groups:
            found = self._total_of(group)
            if found is None:
                continue
            accepted.setdefault(group.row, []).append((group, found))
            if found.clipped:
                self._note_clipped(group, found)
        sums = [found for of_row in accepted.values() for _, found in of_row]
        number = self._query.round.number
        self._settings.norms.take(number, self._norms, sums, self._query.work.split_count)
        return accepted

    def _total_of(self, group: Group) -> ClusterSum | None:
        """Remove the masks of a group and return its sum.

        If there is no valid sum, the clients of the group are left out, and the result is None.
        """
        this_round = self._query.round
        clients = tuple(group.active)
        try:
            return group.total(self._n_parameters, self._query.models.vectors.shape[1])
        except RejectedSumError as error:
            _log.warning(
                "round %d: a sum of %s is rejected: %s",
                this_round.number,
                this_round.purpose,
                error,
            )
            self._left_out |= dict.fromkeys(clients, f"{REJECTED_SUM}: {error}")
            self._events.append(SumRejected(0, this_round.purpose, clients, str(error)))
        except BadSharesError as error:
            self._settings.barred[error.client] = str(error)
            self._left_out |= dict.fromkeys(clients, str(error))
        except UpdateError as error:
            self._left_out |= dict.fromkeys(clients, str(error))
        return None

    def _note_clipped(self, group: Group, found: ClusterSum) -> None:
        """Log, and record as an event, that clients of a group have clipped their updates."""
        this_round = self._query.round
        _log.warning(
            "round %d: %d of %d clients have scaled their update down to norm %.3g "
            "(network.secure_norm)",
            this_round.number,
            found.clipped,
            found.clients,
            self._norms.parameters,
        )
        event = SumClipped(
            0,
            this_round.purpose,
            tuple(group.active),
            clipped=found.clipped,
            norm=self._norms.parameters,
        )
        self._events.append(event)


@dataclass(frozen=True)
class _DealtShares:
    """Client's reply to the second request of secure aggregation.

    It consists of encrypted shares and of hashes of the shares, by holder, and of the hash of the
    client's seed.
    """

    ciphertexts: dict[int, bytes]
    promises: dict[int, bytes]
    commitment: bytes


def _read_dealt_shares(client: int, content: Content, group: Group) -> _DealtShares:
    """Check and read the shares that a client deals, the reply to the second request of a sum.

    Raises
    ------
    UpdateError
        If the holders are not as the terms demand, or a share or hash is missing or too long.
    """
    holders = listed(content, "clients", int)
    ciphertexts = listed(content, "ciphertexts", bytes)
    promises = listed(content, "promises", bytes)
    commitment = content.get("commitment", bytes)
    others = {member for member in group.members if member != client}
    # In a complete graph a client deals to all others, and also keeps a share of its own.
    is_complete = group.graph.holders == 0
    count = group.graph.holders or len(others)
    promised_to = [*holders, client] if is_complete else holders
    if sorted(set(holders)) != holders or not set(holders) <= others or len(holders) != count:
        raise UpdateError(
            f"the client should deal shares to {count} different clients of the sum, in ascending "
            f"order, got {shown(holders)}"
        )
    if len(ciphertexts) != count or max(map(len, ciphertexts)) > LONGEST_CIPHERTEXT:
        raise UpdateError(
            f"the client has dealt {len(ciphertexts)} encrypted shares, expected {count} shares of "
            f"at most {LONGEST_CIPHERTEXT} bytes"
        )
    if len(promises) != len(promised_to) or {*map(len, promises)} != {2 * DIGEST_BYTES}:
        raise UpdateError(
            f"the client has sent hashes for {len(promises)} holders of shares, expected "
            f"{len(promised_to)}, of {2 * DIGEST_BYTES} bytes each"
        )
    if len(commitment) != DIGEST_BYTES:
        raise UpdateError(
            f"the hash of the client's seed has {len(commitment)} bytes, expected {DIGEST_BYTES}"
        )
    return _DealtShares(
        ciphertexts=dict(zip(holders, ciphertexts, strict=True)),
        promises=dict(zip(promised_to, promises, strict=True)),
        commitment=commitment,
    )


def _groups_in(group_of: GroupOf) -> list[Group]:
    """Return the groups to which some clients belong, without repetition."""
    return list(dict.fromkeys(group_of.values()))


def _doubles(values: Sequence[float]) -> Tensor:
    """Return numbers as a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)
