"""A Flower ``ClientApp`` around one client's data."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedclade.channel import Adversary, Budget, ExamplePrivacy, Lying, Mechanism
from fedclade.core import (
    ConfigError,
    DataError,
    FedcladeError,
    ModelError,
    Round,
    RowQuery,
    checked,
    require,
)
from fedclade.data import (
    Backdoor,
    DataSchema,
    Federation,
    LabelFlip,
    SchemaError,
    encode_federation,
    poison_federation,
)
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.kinds import register_query
from fedclade.flower.policy import Policy
from fedclade.flower.private_replies import FAILED
from fedclade.flower.schema_exchange import Proposer, SchemaSharing, read_agreed
from fedclade.flower.signing import Key, key_of, read_keys, read_secret, signed, unsigned
from fedclade.flower.wire import LONGEST_LOG_LINE, Content, clean, refusal
from fedclade.models import LoRA, Parts, Preset
from fedclade.runs import Maker, check_inputs_apart
from fedclade.tasks import Task, build_task
from fedclade.training import choose_device

# An adversary over a network: a client that lies, to try what a federation makes of it.


class _LyingToServer(Lying):
    def claims(self, this_round: Round) -> int | None:
        """Return what it says; of equal parts the truth, as a server knows how many examples it has asked for."""
        return None if this_round.part_size else super().claims(this_round)


class LyingHandler(ClientHandler):
    """A :class:`ClientHandler` that is an adversary, whatever its ``share``.

    It knows no other client, so it can neither go by their updates, nor see when its cluster has
    gone apart; and γ of its backdoor is 1 by default. A ConfigError says so. Queries for scores,
    subspaces and descriptors name no round: its answers to them are false once it has trained in
    the round that it begins in, or from the start if that is the first.
    """

    def __init__(
        self,
        federation: Federation,
        model: nn.Module | str | Maker,
        *,
        adversary: Adversary,
        **settings: Any,
    ) -> None:
        kind = adversary.kind
        rule = "one that needs no other clients, where each is alone"
        is_adversary = bool(kind or adversary.lies)
        require(
            (
                "adversary.kind",
                kind,
                is_adversary and not adversary.knowing and adversary.cluster is None,
                rule,
            ),
            (
                "adversary.sleeper",
                adversary.sleeper,
                not adversary.sleeper,
                "false over a network; set from_round",
            ),
        )
        self._adversary = adversary
        self._lying = _LyingToServer(adversary, federation.ids, federation.keys)
        self._lying.begin(1)
        super().__init__(federation, model, **settings)
        self._client_side = partial(self._client_side, lying=self._lying)
        if self._trainer.needs_all:  # its sums were those of an honest client until now
            self._sums = self._clients().ask(self._trainer.needs)

    def answer(
        self, content: Content, state: RecordDict | None = None, key: Key | None = None
    ) -> RecordDict:
        """Return the answer to a query, which may be a lie from some round on; see :class:`ClientHandler`."""
        if "round" in content.values:
            self._lying.begin(content.get("round", int))
        return super().answer(content, state, key)

    def _held(self, federation: Federation) -> Federation:
        """Return its data, with what it holds poisoned."""
        if self._adversary.kind == "label_flip":
            return poison_federation(federation, federation.ids, LabelFlip.of(federation.pool), 0)
        if self._adversary.kind == "backdoor":
            options = (self._adversary.option(name) for name in ("target", "patch", "poisoned"))
            return poison_federation(
                federation, federation.ids, Backdoor.of(federation.pool, *options), 0
            )
        return federation


MOST_READY = 256  # clients that one process keeps ready; in a simulation it may be many in turn

DataFn = Callable[[Context], Federation]  # returns a federation of one: the client's own data

MakeClient = Callable[[Context, DataSchema | None], ClientHandler | Proposer]


class NodeSettings(TypedDict):
    """What belongs to one client alone, from its node's config."""

    number: int | None
    folder: Path | None
    secret: str | None
    policy: Policy
    peers: dict[str, int] | None


_log = logging.getLogger(__name__)


@checked()
def client_app(
    model: nn.Module | str | Maker,
    data_fn: DataFn,
    *,
    engine: str = "loop",
    device: str = "auto",
    encoding: str = "float32",
    privacy: Mechanism | None = None,
    budget: Budget | None = None,
    task: Task | str | None = None,
    freeze: tuple[str, ...] = (),
    personal: tuple[str, ...] | Preset = (),
    adapter: LoRA | None = None,
    seed: int = 0,
    adversary: Adversary | None = None,
    queries: Sequence[type[RowQuery]] = (),
) -> ClientApp:
    """Make the app that every SuperNode runs.

    What belongs to one client alone is in its node config: ``folder``, where it keeps what must
    last; ``secret-file``, the secret that clients share and the server does not know, by which all
    that travels is permuted (CFL eqs. 45, 46); ``partition-id``, the number by which the server
    should know it, where it has one; ``peers-file``, a list of the other clients' keys, as
    ``network.keys`` is; and its policy, what it allows the server to query
    (:class:`~fedclade.flower.policy.Policy`).

    Parameters
    ----------
    model
        A module, or a name of ``fedclade ls models``, or a function that makes a module from a
        seed. Only its structure counts; with a secret also how it is drawn.
    data_fn
        Takes Flower's context and returns a federation of one client, such as
        ``federation.alone(number)`` or :func:`fedclade.one_client`. Tables and texts are encoded
        again by the schema that all clients agree on.
    engine, device
        How it trains, see :func:`fedclade.simulate`; engines that train clients together gain
        nothing with one.
    encoding
        How updates travel: ``float32``, ``float16`` or ``int8``, the last two with error feedback.
    privacy
        Differential privacy, see :mod:`fedclade.channel.privacy`; needs a ``folder`` and a
        ``budget``.
    budget
        What a client may spend in its life.
    task
        The loss and the metrics, or a task's name, the same as the server's; by default the data's
        own.
    freeze, personal, adapter
        Which parts the model has, as the server's :class:`~fedclade.RunSettings` say.
    seed
        The run's: it draws what is frozen of a model that is made from a seed.
    adversary
        How it lies, to try what a federation makes of it; of the kinds that need no other clients.
        It does not, if left out.
    queries
        Classes of queries that a method outside of fedclade brings, see :class:`fedclade.RowQuery`.
        A client answers one if its policy allows its kind.

    Returns
    -------
    ClientApp
        It answers every query; what it cannot answer it refuses, with the reason.
    """
    for query in queries:
        register_query(query)

    def make(context: Context, agreed: DataSchema | None) -> ClientHandler | Proposer:
        node = node_settings(context)
        by_example = isinstance(privacy, ExamplePrivacy)
        sharing = SchemaSharing(
            node["policy"], privacy is not None or budget is not None, by_example
        )
        federation = _federation(sharing.encode(partial(data_fn, context)))
        # its words are checked when it proposes them
        check_inputs_apart(privacy, federation, agreed=True)
        if agreed is not None:
            federation = sharing.encode(partial(encode_federation, federation, agreed))
        elif federation.encoding is not None:
            proposal = federation.encoding.proposal
            if not federation.encoding.is_declared:
                sharing.check(proposal, len(federation.pool.x))
            return Proposer(proposal, node["number"])
        handler = ClientHandler if adversary is None else partial(LyingHandler, adversary=adversary)
        return handler(
            federation,
            model,
            engine=engine,
            device=choose_device(device),
            encoding=encoding,
            privacy=privacy,
            budget=budget,
            task=build_task(task),
            parts=Parts(freeze=freeze, personal=personal, adapter=adapter),
            seed=seed,
            agreed=agreed,
            **node,
        )

    return app_for(make, private=budget is not None)


def app_for(make: MakeClient, private: bool = False) -> ClientApp:
    """Return a ClientApp around a function that makes a client of a context and of the schema that all agreed on.

    The client of a node with ``epsilon`` in its config, or any client if ``private``, has
    differential privacy: why its data or its model cannot be used goes to its own log only.

    The latest clients are kept ready.
    """
    ready: OrderedDict[object, ClientHandler | Proposer] = OrderedDict()

    def find_client(context: Context, content: Content) -> ClientHandler | Proposer:
        agreed = read_agreed(content)
        digest = None if agreed is None else agreed.digest
        key = (
            context.node_id,
            digest,
            *sorted({**context.run_config, **context.node_config}.items()),
        )
        if key not in ready:
            ready[key] = make(context, agreed)
        ready.move_to_end(key)
        while len(ready) > MOST_READY:
            ready.popitem(last=False)
        return ready[key]

    def answer(message: Message, context: Context) -> Message:
        try:
            content = Content.of(message.content)
            client = find_client(context, content)
            key = key_of(context)
            answered = signed(client.answer(content, context.state, key), message, key)
        except (FedcladeError, OSError) as error:
            # such as missing data, a full disk, or the client's policy The server chose a part of
            # both texts: without control characters they cannot forge lines of the log.
            _log.warning(
                "refused %s: %s",
                clean(message.metadata.message_type),
                clean(str(error), LONGEST_LOG_LINE),
            )
            reason = str(error)
            has_budget = private or "epsilon" in context.node_config
            quotes_data = isinstance(error, DataError | ModelError | OSError) and not isinstance(
                error, SchemaError
            )
            if has_budget and quotes_data:
                reason = FAILED
            answered = unsigned(refusal(reason), message)
        except Exception:
            # Flower would send its type and text to the server, which may contain data
            _log.exception("an error that fedclade did not expect")
            answered = unsigned(refusal(FAILED), message)
        return Message(answered, reply_to=message)

    app = ClientApp()
    for decorate in (app.train(), app.evaluate(), app.query()):
        decorate(answer)
    return app


def _federation(data: object) -> Federation:
    """Check what a user's ``data_fn`` returned."""
    if not isinstance(data, Federation):
        raise DataError(
            f"data_fn should return a federation of one client, got a {type(data).__name__}"
        )
    return data


def node_settings(context: Context) -> NodeSettings:
    """Return what belongs to one client alone; a ConfigError if a value in its node's config cannot be used."""
    folder, secret, peers = (
        context.node_config.get(name) for name in ("folder", "secret-file", "peers-file")
    )
    return {
        "number": _partition_of(context),
        "folder": None if folder is None else _made(Path(str(folder))),
        "secret": None if secret is None else read_secret(Path(str(secret))),
        "policy": Policy.of(context.node_config),
        "peers": None if peers is None else read_keys(Path(str(peers))),
    }


def _partition_of(context: Context) -> int | None:
    number = context.node_config.get("partition-id")
    if number is None:
        return None
    if type(number) is not int or number < 0:  # True is an int, to isinstance
        raise ConfigError(
            f"partition-id in the node config should be a number of at least 0, got {number!r}"
        )
    return number


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the client's folder {folder}: {error.strerror}") from error
    return folder
