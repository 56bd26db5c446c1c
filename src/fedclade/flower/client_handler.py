"""A client that answers: what the server asks is done with its own data, and only what is asked for leaves."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from fedclade.channel import (
    Budget,
    Channel,
    CountSketch,
    DifferentialPrivacy,
    ErrorFeedback,
    Ledger,
    Permutation,
    booked,
    check_encoding,
    client_side,
    encode,
)
from fedclade.core import (
    ConfigError,
    DataError,
    Layout,
    LocalSpec,
    Round,
    Split,
    UpdateError,
    check_arguments,
    rng,
)
from fedclade.data import Federation
from fedclade.flower import wire
from fedclade.flower.policy import Account, Policy, Spent
from fedclade.flower.wire import Content, shown
from fedclade.runs import (
    Maker,
    module_for,
)
from fedclade.training import SimulatedClients

LARGEST_SKETCH = 2**20
"""Numbers that a signature may be asked to have: memory is made for them."""

LEAST_SECRET = 32
"""Characters of a secret: as many hexadecimal digits are 128 bits."""


MOST_RESIDUALS = 16
"""Kinds of answers of which a client keeps what encoding lost; no algorithm asks for as many."""


class ClientHandler:
    """One client, with its data.

    Parameters
    ----------
    federation
        Of this client alone.
    model
        As :func:`fedclade.flower.client_app` takes it.
    number
        By which the server should know it; None leaves that to the server.
    engine, device
        How it trains, see :func:`fedclade.simulate`.
    encoding
        Of its updates.
    privacy
        Clips its updates and puts noise on them.
    budget
        What it may spend in its life. With ``privacy`` it must be said: an ε of infinity is no bound.
    folder
        Where it keeps what must last: its ledger, the count of its answers, and what encodings lost.
    secret
        What it shares with the other clients, and not with the server: all models and updates travel permuted by it.
    policy
        What it allows the server to ask.

    Raises
    ------
    ConfigError
        If a setting is not possible.
    DataError
        If there is not exactly one client.
    ModelError
        If the model does not fit its data.
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
        privacy: DifferentialPrivacy | None = None,
        budget: Budget | None = None,
        folder: Path | None = None,
        secret: str | None = None,
        policy: Policy | None = None,
    ) -> None:
        if len(federation) != 1:
            raise DataError(f"data_fn should return a federation of one client, got {len(federation)}; see alone()")
        check_encoding(encoding)
        self._federation, self._data = federation, federation.clients[0]
        self._make = maker(model, federation)
        self._number, self._encoding, self._folder, self._secret = number, encoding, folder, secret
        self._policy, self._account = policy or Policy(), Account(folder)
        module = self._make(0)
        self._workers = SimulatedClients(federation, module, device, engine)
        self._layout: Layout = self._workers.layout
        privatizing = permutation = None
        if budget is not None and privacy is None:  # or whoever writes the run's config could turn the noise off
            raise ConfigError(
                f"this client may spend ε = {budget.epsilon:g}, and an update without noise has no bound; set "
                "privacy.clip_norm and privacy.noise_multiplier"
            )
        if privacy is not None:
            if folder is None:
                raise ConfigError("a private client needs a folder for its ledger; set folder in its node config")
            if budget is None:  # the noise is the run's to set: without a limit of its own nothing is promised
                raise ConfigError(
                    "privacy.clip_norm is set, and this client does not say what it may spend; set epsilon in its node "
                    "config, or epsilon=inf for no bound"
                )
            privatizing = booked(privacy, Ledger(folder / "privacy.json", budget), "network")
        if secret is not None:
            seed = seed_of(secret)
            permutation = Permutation(seed, self._layout.size, self._layout.n_parameters)
        self._sending = partial(client_side, privatizing, permutation)
        self._residuals: dict[str, ErrorFeedback] = {}

    def answer(self, content: Content, state: RecordDict | None = None) -> RecordDict:
        """Return the answer to a question, which is counted before it leaves.

        Parameters
        ----------
        content
            The question.
        state
            What Flower keeps of this client between two messages.

        Raises
        ------
        FedcladeError
            If it cannot be answered, or the client's policy forbids it; says why.
        """
        answers: Mapping[str, Callable[[Content], RecordDict]] = {
            "hello": self._hello,
            "initial": self._initial,
            "train": self._train,
            "gradients": self._train,
            "evaluate": self._evaluate,
            "subspaces": self._subspaces,
        }
        what = content.words.get("what", str)
        if what not in answers:
            raise UpdateError(f"asked for {shown(what)}, which is none of {', '.join(answers)}")
        mine = wire.layout_digest(self._layout)
        if what != "hello" and (theirs := content.words.get("layout", str)) != mine:
            raise UpdateError(f"asked about a model of structure {theirs}, and has one of structure {mine}")
        self._policy.check_kind(what)
        cost = _cost(what, content)
        before = self._account.spent(state)
        self._policy.check_spent(before + cost, len(self._data.train))
        answer = answers[what](content)
        if cost != Spent():
            self._account.book(self._account.spent(state) + cost, state)
        return answer

    def _hello(self, content: Content) -> RecordDict:
        truth = self._federation.true_clusters
        return wire.record(
            {
                "number": -1 if self._number is None else self._number,
                "name": self._data.name,
                "size": len(self._data.train),
                "schema": json.dumps(asdict(self._federation.pool.schema)),
                "description": str(self._federation),
                "layout": wire.layout_digest(self._layout),
                "true_cluster": -1 if truth is None else truth[self._data.id],
                "secret": "" if self._secret is None else _told_of(self._secret),
            }
        )

    def _initial(self, content: Content) -> RecordDict:
        """Draw initial models from the clients' secret: the server, who knows its own seeds, must not know them."""
        if self._secret is None:
            raise UpdateError("asked for initial models, which only clients with a secret draw")
        seed, count = seed_of(self._secret), content.words.get("models", int)
        self._policy.check_models(count)
        permutation = Permutation(seed, self._layout.size, self._layout.n_parameters)
        models = [permutation.apply(secret_model(self._make, self._layout, seed, k)) for k in range(count)]
        vectors = {str(k): wire.raw_vector(model) for k, model in enumerate(models)}
        digest = wire.digest(b"".join(vector.data for vector in vectors.values()))
        return wire.record({"digest": digest}, {} if content.words.get("digest", bool) else vectors)

    def _train(self, content: Content) -> RecordDict:
        words, what = content.words, content.words.get("what", str)
        replicates, dim = words.get("replicates", int), words.get("dim", int)
        examples = len(self._data.train)
        if not (1 <= replicates <= examples and 0 <= dim <= LARGEST_SKETCH):
            raise UpdateError(f"asked for {replicates} replicates of length {dim} from {examples} training examples")
        spec = _spec(words.json("spec"))
        self._policy.check_training(spec, replicates, examples)
        this_round = Round(
            number=words.get("round", int),
            spec=spec,
            seed=words.get("seed", int),
            purpose=words.get("purpose", str),
            query=words.get("query", int),
            replicates=replicates,
        )
        sent = [name for name in ("model", "anchor") if name in content.vectors]
        models = torch.stack([self._model(content, name) for name in sent or ["model"]])
        me = [self._data.id]
        if what == "train":
            sketch = CountSketch(this_round.seed, self._layout.n_parameters, dim) if dim and replicates > 1 else None
            updates = self._clients(sketch).train(me, models, [0], this_round, [len(sent) - 1])
        else:
            updates = self._clients().gradients(me, models, [0], this_round)
        if updates.left_out:
            raise UpdateError(updates.left_out[self._data.id])
        loss = float(updates.losses[0])
        encoding = self._encoding if replicates == 1 else "float32"  # signatures are short already
        return wire.record(
            {
                **{name: words.values[name] for name in ("what", "round", "query", "purpose")},
                "model": wire.digest(content.vector("model")),
                "size": int(updates.sizes[0]),
                "encoding": encoding,
                **({} if loss != loss else {"loss": loss}),  # NaN: it is kept from the server
            },
            # The server words the purpose, and a file is named by the kind: so by its digest.
            {
                "update": self._encoded(
                    updates.required_deltas[0], encoding, wire.digest(f"{what} {this_round.purpose}".encode())
                )
            },
        )

    def _evaluate(self, content: Content) -> RecordDict:
        split = content.words.get("split", str)
        if split not in get_args(Split):
            raise UpdateError(f"asked for the scores on {split!r} data, which is none of {', '.join(get_args(Split))}")
        if (count := len(content.vectors)) == 0:
            raise UpdateError("asked for the scores of no model")
        self._policy.check_models(count)
        models = torch.stack([self._model(content, str(k)) for k in range(count)])
        scores = self._clients().evaluate([self._data.id] * count, models, list(range(count)), split)  # pyright: ignore[reportArgumentType]  (checked)
        lists = {"accuracies": scores.accuracies, "losses": scores.losses, "examples": scores.examples}
        return wire.record({name: values.tolist() for name, values in lists.items()})

    def _subspaces(self, content: Content) -> RecordDict:
        words = content.words
        vectors, per_label = words.get("vectors", int), words.get("per_label", bool)
        self._policy.check_vectors(vectors)
        found = self._clients().subspaces([self._data.id], vectors, per_label)
        return wire.record({}, {"subspaces": wire.raw_vector(found.flatten())})

    def _clients(self, sketch: CountSketch | None = None) -> Channel:
        return Channel(self._workers, *self._sending(sketch))

    def _encoded(self, update: Tensor, encoding: str, kind: str) -> Any:
        exact = encoding == "float32"
        data = encode(update, encoding, len(update)) if exact else self._with_feedback(update, kind)
        return wire.raw(data, encoding, len(update))

    def _with_feedback(self, update: Tensor, kind: str) -> bytes:
        """Encode an update with what earlier ones of its kind lost, which lasts if the client has a folder."""
        size, n_parameters = self._layout.size, self._layout.n_parameters
        path = None if self._folder is None else self._folder / f"residual-{kind}.safetensors"
        kept = self._residuals if self._folder is None else list(self._folder.glob("residual-*.safetensors"))
        new = kind not in self._residuals if path is None else not path.exists()
        if new and len(kept) >= MOST_RESIDUALS:
            return encode(update, self._encoding, n_parameters)
        if path is not None:
            feedback = ErrorFeedback.load(path, self._encoding, size, n_parameters)
        else:
            feedback = self._residuals.setdefault(kind, ErrorFeedback(self._encoding, size, n_parameters))
        data = feedback.encode(update)
        if path is not None:
            feedback.save(path)
        return data

    def _model(self, content: Content, name: str) -> Tensor:
        return wire.read_vector(content.vector(name), (self._layout.size,), self._layout.dtype, f"model {name!r}")


def _cost(what: str, content: Content) -> Spent:
    """Return what the answer to a question adds to what the client has answered."""
    if what in ("train", "gradients"):
        replicates = content.words.get("replicates", int)
        return Spent(releases=replicates, partings=int(replicates > 1))
    return Spent(releases=int(what == "subspaces"), evaluations=len(content.vectors) if what == "evaluate" else 0)


def _spec(kept: Mapping[str, Any]) -> LocalSpec:
    try:
        return LocalSpec(**check_arguments("its local training", LocalSpec, kept))
    except (ConfigError, OverflowError) as error:  # a key that another version has, or a value of another type
        raise UpdateError(f"asked for local training that is not known here: {error}") from error


def maker(model: nn.Module | str | Maker, federation: Federation) -> Maker:
    """Return what makes a model from a seed; of a module there is but the one."""
    if isinstance(model, str):
        return lambda seed: module_for(model, federation.pool.schema, seed)
    return (lambda seed: model) if isinstance(model, nn.Module) else model


def secret_model(make: Maker, layout: Layout, seed: int, number: int = 0) -> Tensor:
    """Return an initial model ``[S]`` that only those can draw who share a secret.

    The entries of each parameter are shuffled: torch draws a model from 32 bits, few enough for a server to try them
    all, and whoever knows every entry of a model sees from P·θ where P put it.

    Parameters
    ----------
    make, layout
        The model, and its structure.
    seed
        The secret.
    number
        Of the initial model, for algorithms that start from several.
    """
    vector = layout.flatten(make(rng.torch_seed(seed, "initial model", number)))
    draw = rng.generator(seed, "initial model's order", number)
    for slot in layout.parameters:
        part = vector[slot.start : slot.stop]
        part.copy_(part[torch.from_numpy(draw.permutation(len(part)))])
    return vector


def read_secret(path: Path) -> str:
    """Return the secret that a file holds.

    Raises
    ------
    ConfigError
        If it cannot be read, or is too short to keep anybody from trying them all.
    """
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the clients' secret {path}: {error}") from error
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"the clients' secret {path} has {len(secret)} characters, expected at least {LEAST_SECRET}; make one "
            "with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return secret


def seed_of(secret: str) -> int:
    """Return a secret as a number of 256 bits."""
    return int.from_bytes(hashlib.sha256(secret.encode()).digest(), "big")


def _told_of(secret: str) -> str:
    """Return what may be told of a secret: two clients that have the same tell the same, and nobody can go back."""
    return hmac.new(secret.encode(), b"fedclade: do we share this?", hashlib.sha256).hexdigest()
