"""One client over a network: it answers the server's queries from its own data, and sends only what is queried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from fedclade.channel import (
    Budget,
    Channel,
    ExamplePrivacy,
    Mechanism,
    Permutation,
    Signature,
    Sketch,
    check_encoding,
    client_side,
)
from fedclade.core import OWN, DataError, EvaluationQuery, Round, Split, UpdateError, importing_only
from fedclade.data import Federation
from fedclade.flower import descriptors, wire
from fedclade.flower.asked import maker_of
from fedclade.flower.booking import privatizing_of
from fedclade.flower.local_training import read_rule, read_spec
from fedclade.flower.models_sent import read_mixture
from fedclade.flower.node_store import NodeStore, uses_kept
from fedclade.flower.policy import Policy
from fedclade.flower.residuals import Residuals
from fedclade.flower.secret import secret_digest, secret_model, seed_of
from fedclade.flower.shifts import read_query
from fedclade.flower.statistics import as_values
from fedclade.flower.trainer import Trainer
from fedclade.flower.usage import Usage, UsageLog, cost_of
from fedclade.flower.wire import Content, shown
from fedclade.models import Parts
from fedclade.runs import Maker
from fedclade.tasks import FittedTask, Task
from fedclade.training import PrivateSteps, SimulatedClients

LARGEST_SKETCH = 2**20  # entries that a signature may be asked to have: memory is allocated for them


class ClientHandler:
    """One client, with its data; :func:`fedclade.flower.client_app` says what its settings are.

    A ConfigError says which setting is not possible, a DataError that the data is not of one client, and a ModelError
    that the model does not fit it.
    """

    def __init__(
        self,
        federation: Federation,
        model: nn.Module | str | Maker,
        *,
        number: int | None = None,
        engine: str = "loop",
        device: str = "cpu",
        encoding: str = "float32",
        privacy: Mechanism | None = None,
        budget: Budget | None = None,
        folder: Path | None = None,
        secret: str | None = None,
        policy: Policy | None = None,
        task: Task | None = None,
        parts: Parts | None = None,
        seed: int = 0,
    ) -> None:
        if len(federation) != 1:
            raise DataError(f"data_fn should return a federation of one client, got {len(federation)}; see alone()")
        if federation.stages:
            raise DataError(
                f"{federation} changes during a run, which a network does not know of; leave data.drift out"
            )
        check_encoding(encoding)
        self._federation, self._data = federation, federation.clients[0]
        self._make = maker_of(model, federation, parts or Parts())
        self._number, self._folder, self._secret = number, folder, secret
        self._policy, self._usage_log = policy or Policy(), UsageLog(folder)
        self._imports = {*self._policy.imports, *([model] if isinstance(model, str) else [])}
        module, parts = self._make(seed), parts or Parts()
        personal = parts.personal_names(module)

        def workers(federation: Federation, task: FittedTask) -> SimulatedClients:
            private = PrivateSteps.of(privacy, secret=True) if isinstance(privacy, ExamplePrivacy) else None
            held = self._held(federation)
            return SimulatedClients(held, module, device, engine, task=task, personal=personal, private=private)

        self._trainer = Trainer(federation, task or Task(), workers)
        self._layout, self._permutation = self._trainer.workers.layout, None
        if secret is not None:
            self._permutation = Permutation(seed_of(secret), self._layout.size, self._layout.n_parameters)
        private = privatizing_of(privacy, budget, folder, {self._data.id: len(self._data.train)})
        self._client_side = partial(client_side, private, self._permutation)
        self._residuals, self._exact = (Residuals(folder, each, self._layout) for each in (encoding, "float32"))
        self._sums = self._clients().ask(self._trainer.needs) if self._trainer.needs_all else None
        self._kept = NodeStore(folder)

    def answer(self, content: Content, state: RecordDict | None = None) -> RecordDict:
        """Return the answer to a query, which is counted before it leaves.

        ``state`` is what Flower keeps of this client between two messages. A FedcladeError says why there is no answer,
        such as what the client's policy forbids.
        """
        answers: Mapping[str, Callable[[Content], RecordDict]] = {
            "hello": self._register,
            "initial": self._initial,
            "train": self._train,
            "gradients": self._train,
            "evaluate": self._evaluate,
            "subspaces": self._subspaces,
            "statistics": self._statistics,
            "shifts": self._shifts,
            "descriptors": self._descriptors,
        }
        kind = content.get("what", str)
        if kind not in answers:
            raise UpdateError(f"asked for {shown(kind)}, which is none of {', '.join(answers)}")
        mine = wire.layout_digest(self._layout)
        if kind != "hello" and (theirs := content.get("layout", str)) != mine:
            raise UpdateError(f"asked about a model of structure {theirs}, and has one of structure {mine}")
        self._policy.check_kind(kind)
        if self._trainer.needs_all and kind in ("train", "gradients", "evaluate", "subspaces", "descriptors"):
            self._trainer.take(content.values)
        cost = cost_of(kind, content)
        self._policy.check_usage(self._usage_log.usage(state) + cost, len(self._data.train))
        if keeps := uses_kept(kind, content, bool(self._layout.personal)):
            self._kept.open(self._trainer.workers.store, content.get("run", str), state)
        with importing_only(self._imports):  # a server's message names nothing else that is imported here
            answer = answers[kind](content)
        if keeps and kind in ("train", "shifts"):
            self._kept.close(state)
        if cost != Usage():
            self._usage_log.write(self._usage_log.usage(state) + cost, state)
        return answer

    def _held(self, federation: Federation) -> Federation:
        """Return the data that it trains and evaluates on."""
        return federation

    def _register(self, content: Content) -> RecordDict:
        truth = self._federation.true_clusters
        return wire.record(
            {
                "number": -1 if self._number is None else self._number,
                "name": self._data.name,
                "size": self._clients().sizes[self._data.id],
                "schema": wire.to_json(self._federation.pool.schema),
                "description": str(self._federation),
                "layout": wire.layout_digest(self._layout),
                "task": self._trainer.task.described,
                "scaled": self._trainer.needs.inputs,
                "true_cluster": -1 if truth is None else truth[self._data.id],
                "secret": "" if self._secret is None else secret_digest(self._secret),
            }
        )

    def _initial(self, content: Content) -> RecordDict:
        """Draw initial models from the clients' secret: the server, which knows its own seeds, must not know them."""
        if self._secret is None or self._permutation is None:
            raise UpdateError("asked for initial models, which only clients with a secret draw")
        seed, count = seed_of(self._secret), content.get("models", int)
        self._policy.check_models(count)
        models = [self._permutation.apply(secret_model(self._make, self._layout, seed, k)) for k in range(count)]
        vectors = {str(k): wire.raw_vector(model) for k, model in enumerate(models)}
        digest = wire.digest(b"".join(vector.data for vector in vectors.values()))
        return wire.record({"digest": digest}, {} if content.get("digest", bool) else vectors)

    def _statistics(self, content: Content) -> RecordDict:
        """Tell what its own examples come to, where it needs to know the same of all."""
        if self._sums is None:
            raise UpdateError("asked for sums of its examples, and neither its inputs nor its task need those of all")
        self._policy.check_sum(len(self._data.train))
        return wire.record(as_values(self._sums))

    def _train(self, content: Content) -> RecordDict:
        kind, dim, examples = content.get("what", str), content.get("dim", int), len(self._data.train)
        replicates, part_size = content.get("replicates", int), content.get("part_size", int)
        if not (1 <= replicates <= examples and 0 <= replicates * part_size <= examples and 0 <= dim <= LARGEST_SKETCH):
            parts = f"{replicates} parts" + (f" of {part_size}" if part_size else "")
            raise UpdateError(f"asked for {parts} of {examples} training examples, compared by {dim} numbers each")
        spec, rule = read_spec(content), read_rule(content) if kind == "train" else None
        own, personal_epochs = content.get("own", bool), max(0, content.get("personal_epochs", int))
        shares = own and content.get("shares", bool)
        names, mixture = read_mixture(content, self._federation.pool.schema.labels)
        if mixture is not None and (replicates > 1 or own or rule is not None or kind != "train"):
            raise UpdateError("asked for something else of a mixture than one update of each of its models")
        self._policy.check_models(len(names))
        times = (1 if rule is None else rule.gradients) * max(1, len(names))
        self._policy.check_training(spec, replicates, replicates * part_size or examples, personal_epochs, times)
        this_round = Round(
            number=content.get("round", int),
            spec=spec,
            seed=content.get("seed", int),
            purpose=content.get("purpose", str),
            query=content.get("query", int),
            replicates=replicates,
            part_size=part_size,
            compares_parts=content.get("compares_parts", bool),
            personal_epochs=personal_epochs,
            rule=rule,
            communicates="nothing" if own and not shares else "all",
        )
        goes_on = own and kind == "train" and "model" not in content.vectors
        sent = names or [*([] if goes_on else ["model"]), *(["anchor"] if "anchor" in content.vectors else [])]
        models = self._models(content, sent)
        ids, rows = [self._data.id], [OWN if goes_on else 0]
        if kind == "train":
            sketch = self._sketch(content, this_round.seed) if replicates > 1 else None
            anchors = [len(sent) - 1] if sent and mixture is None else None
            updates = self._clients(sketch).train(
                ids, models, rows, this_round, anchors, own=own, shares=shares, mixture=mixture
            )
        else:
            updates = self._clients().gradients(ids, models, [0], this_round)
        if updates.left_out:
            raise UpdateError(updates.left_out[self._data.id])
        loss = float(updates.losses[0])
        residuals = self._residuals if replicates == 1 else self._exact  # with signatures behind it
        sizes = updates.required_deltas.shape[1], updates.n_parameters
        trained = b"".join(content.vectors.get(name, b"") for name in names or ["model"])
        what = f"{kind} {this_round.purpose}"
        return wire.record(
            {
                **{name: content.values[name] for name in ("what", "round", "query", "purpose")},
                "model": wire.digest(trained),
                "size": int(updates.sizes[0]),
                "encoding": residuals.encoding,
                **({} if loss != loss else {"loss": loss}),  # NaN: it is withheld from the server
                **({} if updates.components is None else {"component": int(updates.components[0])}),
            },
            {}
            if own and not shares
            else {"update": residuals.encoded(updates.required_deltas[0], what, sizes if mixture else None)},
        )

    def _evaluate(self, content: Content) -> RecordDict:
        split = content.get("split", str)
        if split not in get_args(Split):
            raise UpdateError(f"asked for the scores on {split!r} data, which is none of {', '.join(get_args(Split))}")
        names, mixture = read_mixture(content, self._federation.pool.schema.labels)
        rows = [OWN] if content.get("own", bool) else list(range(len(names or content.vectors)))
        if not rows:
            raise UpdateError("asked for the scores of no model")
        self._policy.check_models(len(rows))
        models = self._models(content, [str(row) for row in rows if row != OWN])
        rows = rows if mixture is None else [0]
        ids, compares = [self._data.id] * len(rows), content.get("compares", bool)
        query = EvaluationQuery(ids, models, rows, split, compares, mixture)  # pyright: ignore[reportArgumentType]  (checked)
        scores = self._clients().ask(query)
        lists = {"scores": scores.scores.flatten(), "losses": scores.losses, "examples": scores.examples}
        lists |= {} if scores.wins is None else {"wins": scores.wins}
        return wire.record({name: values.tolist() for name, values in lists.items()})

    def _subspaces(self, content: Content) -> RecordDict:
        vectors, per_label = content.get("vectors", int), content.get("per_label", bool)
        self._policy.check_vectors(vectors)
        found = self._clients().subspaces([self._data.id], vectors, per_label)
        return wire.record({}, {"subspaces": wire.raw_vector(found.flatten())})

    def _shifts(self, content: Content) -> RecordDict:
        shifted = self._clients().ask(read_query(self._data.id, content))
        return wire.record({"round": content.get("round", int), "shifted": bool(shifted[0])})

    def _descriptors(self, content: Content) -> RecordDict:
        query = descriptors.read_query(self._data.id, self._models(content, ["model"])[0], content)
        self._policy.check_descriptor(len(self._data.train), query.shape(self._federation.pool.schema)[1])
        return wire.record({}, {"descriptor": wire.raw_vector(self._clients().ask(query).flatten())})

    def _sketch(self, content: Content, seed: int) -> Sketch | None:
        """Return what is compared of each of several updates, as the server asks for it."""
        dim, of = content.get("dim", int), content.values.get("of", [])
        if not isinstance(of, list) or not all(isinstance(pattern, str) for pattern in of):
            raise UpdateError(f"'of' should be a list of patterns, got {shown(of)}")
        if of and self._permutation is not None:
            raise UpdateError("asked for the updates of single parameters, which its permutation is there to hide")
        kind = "projected" if dim else "full"
        return Signature(kind=kind, dim=max(dim, 1), of=tuple(of)).sketch(seed, self._layout)

    def _clients(self, sketch: Sketch | None = None) -> Channel:
        return Channel(self._trainer.workers, *self._client_side(sketch))

    def _models(self, content: Content, names: Sequence[str]) -> Tensor:
        size, dtype = self._layout.size, self._layout.dtype
        models = [wire.read_vector(content.vector(name), (size,), dtype, f"model {name!r}") for name in names]
        return torch.stack(models) if models else torch.empty(0, size, dtype=dtype)
