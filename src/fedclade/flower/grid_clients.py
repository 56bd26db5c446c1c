"""The ``Clients`` protocol over a Flower grid: what an algorithm asks becomes messages, and what comes is checked."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from flwr.app import Array, MessageType, RecordDict
from torch import Tensor

from fedclade.channel import (
    ENCODINGS,
    CountSketch,
    Tally,
    encoded_bytes,
)
from fedclade.core import (
    DROPPED_OUT,
    LARGEST_NORM,
    TOO_LATE,
    Evaluation,
    EvaluationQuery,
    Layout,
    Round,
    Split,
    SubspaceQuery,
    UpdateError,
    UpdateQuery,
    Updates,
    Workers,
)
from fedclade.flower import wire
from fedclade.flower.arrivals import Arrivals
from fedclade.flower.doors import Doors, Start
from fedclade.flower.exchange import AT_ONCE, Exchange
from fedclade.flower.node_registry import NodeRegistry
from fedclade.flower.patience import Patience
from fedclade.flower.policy import FORBIDS
from fedclade.flower.wire import Content

_log = logging.getLogger(__name__)


class GridClients(Workers):
    """Clients behind a Flower grid: one message to each node, with its own cluster's model.

    Every answer is checked as it comes: it must be of the round, the query and the model that were asked about, of the
    right length, and finite. Who sends something else, or nothing in time, is left out of the round, by name and with
    the reason. Late answers are nobody's.

    Parameters
    ----------
    exchange
        Asks the nodes.
    members
        Which client is behind which node, and which nodes are there.
    layout
        Of the model.
    sketch
        What the server compares clients by, if not by the whole update.
    streams
        Whether only sums and signatures of updates are kept: an update is forgotten before the next is read.
    doors
        How much an update may weigh, and how long it may be.
    wait
        Seconds to wait for anybody, should all be gone in the middle of a round.
    """

    def __init__(
        self,
        exchange: Exchange,
        members: NodeRegistry,
        layout: Layout,
        sketch: CountSketch | None = None,
        streams: bool = False,
        doors: Doors | None = None,
        wait: float = 0.0,
    ) -> None:
        self._exchange = exchange
        self._members = members
        self.layout = layout
        self._structure = wire.layout_digest(layout)
        self._sketch = sketch
        self._streams = streams
        self._doors = doors or Doors(math.inf, math.inf)
        self._wait = wait
        self._patience = Patience()
        self._warned = False
        self._counts: dict[tuple[int, Split], int] = {}
        """Of how many examples a client gave its scores, on each split: they are always the same."""

    @property
    def engine(self) -> str:
        """How clients are trained: every one settles that for itself."""
        return "auto"

    @property
    def engine_taken(self) -> str | None:
        """Nothing that is known here."""
        return None

    @property
    def ids(self) -> Sequence[int]:
        """All clients that ever joined, in a fixed order."""
        return self._members.roster.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples that each client counts with: what it said when it joined, within the limit."""
        return self._doors.weights(self._members.roster.sizes)

    def handle_updates(self, query: UpdateQuery) -> Updates:
        """Let each client train from its model, or take the gradient at it; return the updates of those that answer."""
        if query.kind == "train" and query.round.communicates == "nothing" and not self._warned:
            self._warned = True
            _log.warning(
                "this algorithm lets clients keep models of their own: in a simulation these do not travel, over a "
                "network they are kept by the server, which sends and receives them"
            )
        return self._updates(query)

    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Let each client evaluate its models on a split of its own data, all of them in one message."""
        ids, models, assignment, split = query.ids, query.models, query.assignment, query.split
        rows: dict[int, list[int]] = {}
        for client, row in zip(ids, assignment, strict=True):
            rows.setdefault(client, []).append(row)
        arrays = _arrays(models, assignment)
        words = {"what": "evaluate", "split": split, "layout": self._structure}
        questions = {
            client: wire.record(words, {str(place): arrays[row] for place, row in enumerate(mine)})
            for client, mine in rows.items()
        }
        scores: dict[int, list[wire.Scores]] = {}
        left_out: dict[int, str] = {}
        for client, answer in self._ask(questions, MessageType.EVALUATE, f"evaluate {split}"):
            try:
                with wire.distrusting():
                    mine = wire.read_scores(_content(answer), len(rows[client]), self._count(client, split))
            except UpdateError as error:
                left_out[client] = str(error)
            else:
                self._counts[client, split] = mine[0][2]
                scores[client] = mine
        answered = [(client, scores[client].pop(0)) for client in ids if client in scores]
        columns = zip(*(score for _, score in answered), strict=True) if answered else ((), (), ())
        accuracies, losses, examples = columns
        return Evaluation(
            ids=tuple(client for client, _ in answered),
            accuracies=torch.tensor(accuracies, dtype=torch.float64),
            losses=torch.tensor(losses, dtype=torch.float64),
            examples=torch.tensor(examples, dtype=torch.int64),
            left_out=left_out,
        )

    def handle_subspaces(self, query: SubspaceQuery) -> Tensor:
        """Let each client decompose its training inputs; all zeros are those of a client that does not answer."""
        ids, n_vectors, per_label = query.ids, query.n_vectors, query.per_label
        schema = self._members.roster.schema
        shape = (schema.outputs if per_label else 1, math.prod(schema.input_shape), n_vectors)
        words = {"what": "subspaces", "vectors": n_vectors, "per_label": per_label}
        words["layout"] = self._structure
        found = torch.zeros(len(ids), *shape)
        place_of = {client: place for place, client in enumerate(ids)}
        questions, largest = {c: wire.record(words) for c in ids}, 4 * math.prod(shape)
        why: dict[int, str] = {}
        for client, answer in self._ask(questions, MessageType.QUERY, "subspaces", largest):
            try:
                with wire.distrusting():
                    _content(answer).has_only(("subspaces",))
                    data = _content(answer).vector("subspaces")
                    vectors = wire.read_vector(data, shape, torch.float32, "subspaces")
            except UpdateError as error:  # who does not answer is asked again, and told of then
                why[client] = str(error)
                continue
            if bool(torch.isfinite(vectors).all()):
                found[place_of[client]] = vectors
        self._check_allowed("subspaces", ids, why)
        return found

    def initial(self, count: int) -> Tensor:
        """Return the initial models ``[count, S]`` that clients draw from the secret that they share.

        All draw the same, so each is asked what it draws by a digest, and one of those that agree with most is asked
        for the models themselves: a client that would like others has no say.

        Raises
        ------
        UpdateError
            If none of them answers.
        """
        words = {"what": "initial", "models": count, "layout": self._structure}
        why: dict[int, str] = {}
        drawn: dict[int, str] = {}
        questions = {client: wire.record({**words, "digest": True}) for client in self.ids}
        for client, answer in self._ask(questions, MessageType.QUERY, "initial models"):
            try:
                with wire.distrusting():
                    drawn[client] = _content(answer).words.get("digest", str)
            except UpdateError as error:
                why[client] = str(error)
        votes = Counter(drawn[client] for client in sorted(drawn))
        for digest, agreeing in votes.most_common():  # of as many, that of the client with the lowest number
            for client in sorted(client for client in drawn if drawn[client] == digest):
                try:
                    models = self._drawn(client, wire.record({**words, "digest": False}), count, digest)
                except UpdateError as error:
                    why[client] = str(error)
                    continue
                if others := sorted(other for other in drawn if drawn[other] != digest):
                    _log.warning(
                        "%d of %d clients draw the same initial model, which is taken; clients %s draw another: they "
                        "run another version, or do not tell the truth",
                        *(agreeing, len(drawn), ", ".join(map(str, others))),
                    )
                return models
        told = "; ".join(f"client {client}: {reason}" for client, reason in sorted(why.items()))
        raise UpdateError(f"no client sent the initial model: {told}")

    def _drawn(self, client: int, question: RecordDict, count: int, digest: str) -> Tensor:
        """Return the initial models of a client, which must be finite, and those of a digest.

        Raises
        ------
        UpdateError
            If they are not, or do not come.
        """
        size = self.layout.size * self.layout.dtype.itemsize
        names = [str(k) for k in range(count)]
        ((_, answer),) = self._ask({client: question}, MessageType.QUERY, "initial models", count * size)
        with wire.distrusting():
            content = _content(answer)
            content.has_only(names)
            data = [content.vector(name) for name in names]
            if (sent := wire.digest(b"".join(data))) != digest:
                raise UpdateError(f"initial models of digest {sent}, said to be {digest}")
            models = torch.stack([self._model(each, f"model {name}") for name, each in zip(names, data, strict=True)])
            if not bool((models.norm(dim=1) <= LARGEST_NORM).all()):  # as NaN is not
                raise UpdateError(f"initial models that are not finite, or of norms above {LARGEST_NORM:g}")
        return models

    def _updates(self, query: UpdateQuery) -> Updates:
        what, ids, models, assignment, this_round = query.kind, query.ids, query.models, query.assignment, query.round
        pulled = query.anchors if query.anchors is not None and this_round.spec.mu else assignment
        arrays = _arrays(models, [*assignment, *pulled])
        names = {row: wire.digest(array.data) for row, array in arrays.items()}
        same = {"what": what, "round": this_round.number, "query": this_round.query, "purpose": this_round.purpose}
        words = {
            **same,
            **{"seed": this_round.seed, "spec": wire.to_json(this_round.spec)},
            **{"replicates": this_round.replicates, "dim": self._sketch.dim if self._sketch else 0},
            "layout": self._structure,
        }
        questions: dict[int, RecordDict] = {}
        for client, row, anchor in zip(ids, assignment, pulled, strict=True):
            vectors = {"model": arrays[row]} | ({"anchor": arrays[anchor]} if anchor != row else {})
            questions[client] = wire.record(words, vectors)
        expected = {client: {**same, "model": names[row]} for client, row in zip(ids, assignment, strict=True)}
        starts = {row: Start.of(names[row], models[row], self.layout.n_parameters) for row in dict.fromkeys(assignment)}
        question = (what, this_round.purpose, this_round.number)
        self._doors.ask(question, {client: starts[row] for client, row in zip(ids, assignment, strict=True)})
        left_out: dict[int, str] = {}
        length, n_parameters = self._shape(this_round)
        largest = max(encoded_bytes(length, encoding, n_parameters) for encoding in ENCODINGS)
        told = self._ask(questions, MessageType.TRAIN, str(this_round.number), largest)
        answers = self._read(told, self._shape(this_round), expected, left_out)
        if not self._streams or this_round.replicates > 1:
            updates = self._kept(answers, ids, models, this_round, left_out)
        else:
            updates = self._summed(answers, Tally(ids, models, assignment), models, this_round, left_out)
        self._check_allowed(what, ids, left_out)
        return updates

    def _check_allowed(self, what: str, ids: Sequence[int], left_out: Mapping[int, str]) -> None:
        """End a run that asks for what clients do not allow: to ask them again would change nothing.

        Most of those who are connected must have said so, or a few could end the run.
        """
        forbidding = [client for client in ids if left_out.get(client, "").startswith(FORBIDS)]
        if len(forbidding) == len(ids) and 2 * len(ids) > len(self._members.connected):
            raise UpdateError(
                f"none of {len(ids)} clients answers the question {what!r}; client {ids[0]} says: {left_out[ids[0]]}"
            )

    def _read(
        self,
        answers: Iterator[tuple[int, Content | str]],
        shape: tuple[int, int],
        expected: Mapping[int, Mapping[str, object]],
        left_out: dict[int, str],
    ) -> Iterator[tuple[int, wire.Answer]]:
        """Yield the updates among the answers, and note why the others are left out."""
        for client, answer in answers:
            try:
                with wire.distrusting():
                    size = self._members.roster.sizes[client]
                    read = wire.read_answer(_content(answer), *shape, self.layout.dtype, size, expected[client])
            except UpdateError as error:
                left_out[client] = str(error)
            else:
                yield client, read

    def _kept(
        self,
        answers: Iterator[tuple[int, wire.Answer]],
        ids: Sequence[int],
        models: Tensor,
        this_round: Round,
        left_out: Mapping[int, str],
    ) -> Updates:
        """Return all updates, in the order in which they were asked for: results must not depend on who was first."""
        place_of = {client: place for place, client in enumerate(ids)}
        arrivals = Arrivals(len(ids), self._shape(this_round)[0], models)
        for client, answer in answers:
            arrivals.put(client, answer, place_of[client])
        return self._checked(arrivals, this_round, left_out)

    def _summed(
        self,
        answers: Iterator[tuple[int, wire.Answer]],
        tally: Tally,
        models: Tensor,
        this_round: Round,
        left_out: Mapping[int, str],
    ) -> Updates:
        """Return sums and signatures, in the order in which updates come: no more than a few are there at a time."""
        arrivals = Arrivals(AT_ONCE, self.layout.size, models)
        for client, answer in answers:
            arrivals.put(client, answer)
            if arrivals.full:
                tally.add(self._checked(arrivals, this_round, {}))
                arrivals = Arrivals(AT_ONCE, self.layout.size, models)
        tally.add(self._checked(arrivals, this_round, left_out))  # be it nobody
        return tally.total()

    def _checked(self, arrivals: Arrivals, this_round: Round, left_out: Mapping[int, str]) -> Updates:
        updates = arrivals.checked(self._shape(this_round)[1], this_round.number)
        sizes = self.sizes
        weights = torch.tensor([sizes[client] for client in updates.ids], dtype=updates.sizes.dtype)
        updates = replace(updates, sizes=weights, left_out={**left_out, **updates.left_out})
        if this_round.communicates != "nothing":  # what a client keeps for itself is nobody else's
            updates = self._doors.admit(updates)
        if self._sketch is None or not self._streams or this_round.replicates > 1:
            return updates
        return replace(updates, sketches=self._sketch.apply(updates.signatures))

    def _shape(self, this_round: Round) -> tuple[int, int]:
        """Return how long an answer is, and how much of it is compared."""
        if this_round.replicates == 1:
            return self.layout.size, self.layout.n_parameters
        length = this_round.replicates * (self._sketch.dim if self._sketch else self.layout.n_parameters)
        return length, length

    def _count(self, client: int, split: Split) -> int | None:
        """Return how many examples a client is scored on, if that is known."""
        if split == "train" and self._members.roster.schema.task == "classification":
            return self._members.roster.sizes[client]
        return self._counts.get((client, split))

    def _ask(
        self, questions: Mapping[int, RecordDict], kind: str, group: str, largest: int = 0
    ) -> Iterator[tuple[int, Content | str]]:
        """Ask clients, and yield what comes; who is not connected, or was late before, is not waited for.

        Raises
        ------
        UpdateError
            If nobody at all is connected, and nobody comes back in time; scores can do without.
        """
        if not self._members.reach(self._wait) and kind != MessageType.EVALUATE:
            raise UpdateError(
                f"nobody is connected any more, and nobody came back within {self._wait:g} s; start the SuperNodes "
                "again, and then the server with the same folder"
            )
        node_of = {client: self._members.node(client) for client in questions}
        for client in (client for client, node in node_of.items() if node is None):
            self._patience.forget(client)
            yield client, DROPPED_OUT
        there = {client: node for client, node in node_of.items() if node is not None}
        spared = self._patience.spare(there, self._members.connected)
        yield from spared.items()
        client_of = {node: client for client, node in there.items() if client not in spared}
        asked = {node: questions[client] for node, client in client_of.items()}
        for node, answer in self._exchange.ask(asked, kind, group, largest):
            client = client_of[node]
            note = self._patience.late if answer == TOO_LATE else self._patience.forget
            note(client)
            if not isinstance(answer, str):
                try:
                    answer = self._members.checked(client, answer)
                except UpdateError as error:
                    answer = str(error)
            yield client, answer

    def _model(self, data: bytes, name: str) -> Tensor:
        return wire.read_vector(data, (self.layout.size,), self.layout.dtype, name)


def _arrays(models: Tensor, rows: Sequence[int]) -> dict[int, Array]:
    """Return each model that is sent to somebody, once for all who are sent it."""
    return {row: wire.raw_vector(models[row]) for row in dict.fromkeys(rows)}


def _content(answer: Content | str) -> Content:
    if isinstance(answer, str):
        raise UpdateError(answer)
    return answer
