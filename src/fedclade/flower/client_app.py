"""Flower ``ClientApp`` of a client that trains and evaluates on its own data.

:func:`client_app` builds the app that each SuperNode runs. :class:`LyingHandler` replaces the
honest client in experiments with malicious clients.
"""

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

from fedclade.channel import Adversary, Budget, ExamplePrivacy, Lying, Mechanism, Middleware
from fedclade.core import (
    ConfigError,
    DataError,
    FedcladeError,
    ModelError,
    RowQuery,
    SplitPart,
    TrainQuery,
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
from fedclade.training import choose_devices, return_freed_memory

# Malicious client in a network, for experiments on the robustness of a federation.


class _LyingToServer(Lying):
    """Middleware of a malicious client in a network, which falsifies the client's replies.

    Some attacks claim a false number of training examples. The server of a network rejects a false
    number if it knows the true one, so the client then claims the true number.
    """

    def claims(self, query: TrainQuery) -> int | None:
        """Return the number of examples that the malicious client claims; None for the true one.

        If a query requests updates from parts of the client's data that have a fixed size, the
        client claims the true number, since the server knows this size and would reject any other.
        """
        data = query.work.data
        is_equal_part = isinstance(data, SplitPart) and data.size > 0
        return None if is_equal_part else super().claims(query)


class LyingHandler(ClientHandler):
    """:class:`ClientHandler` of a malicious client, for experiments.

    The client is always malicious: the adversary's ``share``, the fraction of malicious clients, is
    ignored. A client in a network knows neither the other clients nor when its cluster is split. So
    its attack cannot depend on the updates of other clients, and cannot begin with the split. The
    factor γ by which a backdoor attack scales updates is 1 by default.

    Queries for scores, subspaces and descriptors have no round number. If the attack begins in
    round 1, all replies to these queries are false. If it begins later, they are false once the
    client has received a query with the number of that round or of a later round.

    Raises
    ------
    ConfigError
        If the attack depends on other clients.
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
        rule = "an attack that needs no other clients, since a client in a network knows none"
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
                "false in a network, where a client does not learn of splits; set "
                "adversary.from_round",
            ),
        )
        self._adversary = adversary
        self._lying = _LyingToServer(adversary, federation.ids, federation.keys)
        self._lying.begin(1)
        super().__init__(federation, model, **settings)
        self._client_side = partial(self._client_side, lying=self._lying)
        self._remembers = False  # a false reply to a repeated query may be another one
        # The constructor above has computed the statistics without the attack.
        if self._trainer.needs_all:
            self._sums = self._clients().ask(self._trainer.needs)

    def answer(
        self, content: Content, state: RecordDict | None = None, key: Key | None = None
    ) -> RecordDict:
        """Return the client's reply to a query; the reply may be false once the attack has begun.

        See :class:`ClientHandler` for the parameters.
        """
        if "round" in content.values:
            self._lying.begin(content.get("round", int))
        return super().answer(content, state, key)

    def _held(self, federation: Federation) -> Federation:
        """Return the client's data, poisoned if the attack is label flipping or a backdoor."""
        if self._adversary.kind == "label_flip":
            return poison_federation(federation, federation.ids, LabelFlip.of(federation.pool), 0)
        if self._adversary.kind == "backdoor":
            options = (self._adversary.option(name) for name in ("target", "patch", "poisoned"))
            return poison_federation(
                federation, federation.ids, Backdoor.of(federation.pool, *options), 0
            )
        return federation


# Largest number of clients that one process keeps in memory. In Flower's simulation one process may
# run many clients in turn.
MOST_READY = 256

# Bytes of a message from which a client saves memory: it takes the vectors out of the message, so
# that they can be freed before the reply, and returns the memory of Flower's buffers. The update
# would otherwise be placed into such a buffer, and take memory while the client trains.
LARGE_MESSAGE = 2**22

DataFn = Callable[[Context], Federation]  # returns the client's own data, a federation of one

MakeClient = Callable[[Context, DataSchema | None], ClientHandler | Proposer]


class NodeSettings(TypedDict):
    """Settings of a single client, read from the node config of its SuperNode.

    The fields are the client's number (None if the server chooses it), the folder for data that
    must survive a restart, the secret that clients share, the policy that limits the server's
    queries, and the number of each other client by public key. All but the policy may be None.
    """

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
    device: str | Sequence[str] = "auto",
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
    middleware: Sequence[Middleware] = (),
) -> ClientApp:
    """Make the Flower app that every SuperNode runs.

    Settings of a single client are in the node config of its SuperNode:

    - ``folder``, for data that must survive a restart;
    - ``secret-file``, a file with a secret that clients share and the server does not know; it
      determines the permutation of all models and updates in messages (CFL eqs. 45, 46);
    - ``partition-id``, the number that the client reports to the server; if unset, the server
      chooses a number;
    - ``peers-file``, a list of the other clients' public keys in the format of ``network.keys``;
    - the fields of the client's policy, which limits the server's queries
      (:class:`~fedclade.flower.policy.Policy`).

    Parameters
    ----------
    model
        A module, or a name in ``fedclade ls models``, or a function that makes a module from a
        seed. Only the structure of the model is used, and if clients share a secret also its
        initialization.
    data_fn
        Function that takes Flower's context and returns a federation of one client, such as
        ``federation.alone(number)`` or the result of :func:`fedclade.one_client`. Tables and texts
        are encoded again by the schema that all clients agree on.
    engine, device
        Engine and device of training, see :func:`fedclade.simulate`. With several numbered GPUs,
        such as ``["cuda:0", "cuda:1"]`` or ``"cuda:0,cuda:1"``, each batch of the client is split
        among them, which the engine ``loop`` alone does. The key ``device`` of a node config takes
        precedence over ``device``. Engines that batch several clients are not faster for a single
        client.
    encoding
        Encoding of updates in messages: ``float32``, ``float16``, ``int8`` or ``topk``, the last
        three with error feedback.
    privacy
        Differential privacy, see :mod:`fedclade.channel.privacy`; needs a ``folder`` and a
        ``budget``.
    budget
        Privacy budget of the client over its lifetime.
    task
        Loss and metrics, or the name of a task; must equal the server's task. By default the task
        of the data.
    freeze, personal, adapter
        Frozen and personal parts and adapters of the model; must equal the values in the server's
        :class:`~fedclade.RunSettings`.
    seed
        Seed of the run, which determines the frozen values of a model that is made from a seed.
    adversary
        Attack of a malicious client, for experiments; it must not depend on other clients. None for
        an honest client.
    queries
        Classes of queries that a method outside of fedclade needs, see :class:`fedclade.RowQuery`.
        The client replies to such a query if its policy allows the kind of query.
    middleware
        User-defined middleware, which may change each query that the client's policy has accepted,
        and each reply; see :class:`~fedclade.Middleware`. Replies pass through the middleware in
        the given order, after clipping and noise and before the masks of secure aggregation.

    Returns
    -------
    ClientApp
        App that replies to every query, or refuses the query and reports the reason.
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
        # SchemaSharing.check() checks the vocabulary of texts before it is proposed, so this check
        # treats the vocabulary as agreed.
        check_inputs_apart(privacy, federation, agreed=True)
        if agreed is not None:
            federation = sharing.encode(partial(encode_federation, federation, agreed))
        elif federation.encoding is not None:
            proposal = federation.encoding.proposal
            if not federation.encoding.is_declared:
                sharing.check(proposal, len(federation.pool.x))
            proposal = sharing.limit(proposal, len(federation.pool.x))
            return Proposer(proposal, node["number"])
        handler = ClientHandler if adversary is None else partial(LyingHandler, adversary=adversary)
        return handler(
            federation,
            model,
            engine=engine,
            device=choose_devices(str(context.node_config.get("device", "")) or device),
            encoding=encoding,
            privacy=privacy,
            budget=budget,
            task=build_task(task),
            parts=Parts(freeze=freeze, personal=personal, adapter=adapter),
            seed=seed,
            agreed=agreed,
            middleware=middleware,
            **node,
        )

    return app_for(make, private=budget is not None)


def app_for(make: MakeClient, private: bool = False) -> ClientApp:
    """Return a Flower ClientApp that makes the client of a node when the first message arrives.

    The most recently used clients stay in memory for later messages.

    Parameters
    ----------
    make
        Function that makes a client from Flower's context and the schema that all clients have
        agreed on, which is None before they have agreed.
    private
        Whether all clients of the app have differential privacy. A client with ``epsilon`` in its
        node config has differential privacy in any case. If the data or the model of a client with
        differential privacy cannot be used, the reason is written only to the client's own log,
        since the reason may quote data.
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
            if content.size >= LARGE_MESSAGE:
                content = content.taken_from(message.content)
                return_freed_memory()  # the buffers from which Flower has read the message
            client = find_client(context, content)
            key = key_of(context)
            answered = signed(client.answer(content, context.state, key), message, key)
        except (FedcladeError, OSError) as error:
            # Reasons are, for example, missing data, a full disk, or the client's policy. The
            # server can influence the message type and the reason. Without control characters
            # neither can forge a line of the log.
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
            # Flower would send the error's type and text, which may contain data, to the server.
            _log.exception("an unexpected error occurred while the client computed a reply")
            answered = unsigned(refusal(FAILED), message)
        return_freed_memory()
        return Message(answered, reply_to=message)

    app = ClientApp()
    for decorate in (app.train(), app.evaluate(), app.query()):
        decorate(answer)
    return app


def _federation(data: object) -> Federation:
    """Return the result of a user's ``data_fn``; raise a DataError if it is no federation."""
    if not isinstance(data, Federation):
        raise DataError(
            f"data_fn should return a Federation with one client, got a {type(data).__name__}"
        )
    return data


def node_settings(context: Context) -> NodeSettings:
    """Read the settings of a single client from the node config of its SuperNode.

    Raises
    ------
    ConfigError
        If a value is invalid, a file cannot be read, or the folder cannot be made.
    """
    folder, secret, peers = (
        context.node_config.get(name) for name in ("folder", "secret-file", "peers-file")
    )
    return {
        "number": _partition_of(context),
        "folder": None if folder is None else _make_folder(Path(str(folder))),
        "secret": None if secret is None else read_secret(Path(str(secret))),
        "policy": Policy.of(context.node_config),
        "peers": None if peers is None else read_keys(Path(str(peers))),
    }


def _partition_of(context: Context) -> int | None:
    """Return the client's number, ``partition-id`` in the node config; None if it is unset."""
    number = context.node_config.get("partition-id")
    if number is None:
        return None
    if type(number) is not int or number < 0:  # for isinstance, True is an int
        raise ConfigError(
            "partition-id in the node config should be a whole number of at least 0, got "
            f"{number!r}"
        )
    return number


def _make_folder(folder: Path) -> Path:
    """Make a client's folder, readable by its owner only, if it does not exist; return its path."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the client's folder {folder}: {error.strerror}; set another folder in "
            "the node config, or correct its permissions"
        ) from error
    return folder
