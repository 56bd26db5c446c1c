"""Flower ``ClientApp`` for one client's data."""

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

# An adversary over a network, for experiments on a federation's robustness.


class _LyingToServer(Lying):
    def claims(self, this_round: Round) -> int | None:
        """Return the number of examples that an adversary claims; None for the truth.

        For equal splits it is the truth: the server knows the number of examples in its request.
        """
        return None if this_round.part_size else super().claims(this_round)


class LyingHandler(ClientHandler):
    """:class:`ClientHandler` of an adversary, regardless of the adversary's ``share``.

    It knows no other client. So its attack can neither depend on other updates, nor begin when its
    cluster is split, and γ of its backdoor is 1 by default. Queries for scores, subspaces and
    descriptors have no round number: its replies to them are false once it has trained in its first
    round as an adversary, or from the start if that is round 1.

    Raises
    ------
    ConfigError
        If the adversary needs other clients.
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
        if self._trainer.needs_all:  # until here its statistics were those of an honest client
            self._sums = self._clients().ask(self._trainer.needs)

    def answer(
        self, content: Content, state: RecordDict | None = None, key: Key | None = None
    ) -> RecordDict:
        """Return the reply to a query; from some round on it may be false.

        See :class:`ClientHandler` for the parameters.
        """
        if "round" in content.values:
            self._lying.begin(content.get("round", int))
        return super().answer(content, state, key)

    def _held(self, federation: Federation) -> Federation:
        """Return the client's data, poisoned if its attack poisons data."""
        if self._adversary.kind == "label_flip":
            return poison_federation(federation, federation.ids, LabelFlip.of(federation.pool), 0)
        if self._adversary.kind == "backdoor":
            options = (self._adversary.option(name) for name in ("target", "patch", "poisoned"))
            return poison_federation(
                federation, federation.ids, Backdoor.of(federation.pool, *options), 0
            )
        return federation


# Clients that one process has ready; in Flower's simulation a process may be many clients in turn.
MOST_READY = 256

DataFn = Callable[[Context], Federation]  # returns the client's own data, a federation of one

MakeClient = Callable[[Context, DataSchema | None], ClientHandler | Proposer]


class NodeSettings(TypedDict):
    """Settings of one client alone, from its node's config."""

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

    The settings of one client alone are in its node config:

    - ``folder``, for data that must survive a restart;
    - ``secret-file``, the secret that clients share and the server does not know, by which all
      models and updates in messages are permuted (CFL eqs. 45, 46);
    - ``partition-id``, the client's number for the server, if it has one;
    - ``peers-file``, a list of the other clients' keys in the format of ``network.keys``;
    - the fields of the client's policy, which limits the server's queries
      (:class:`~fedclade.flower.policy.Policy`).

    Parameters
    ----------
    model
        A module, or a name in ``fedclade ls models``, or a function that makes a module from a
        seed. Only its structure is used; if clients share a secret, its initialization, too.
    data_fn
        Function that takes Flower's context and returns a federation of one client, such as
        ``federation.alone(number)`` or :func:`fedclade.one_client`. Tables and texts are encoded
        again by the schema that all clients agree on.
    engine, device
        Engine and device of training, see :func:`fedclade.simulate`; engines that train clients
        together are not faster for one client.
    encoding
        Encoding of updates in messages: ``float32``, ``float16`` or ``int8``, the last two with
        error feedback.
    privacy
        Differential privacy, see :mod:`fedclade.channel.privacy`; needs a ``folder`` and a
        ``budget``.
    budget
        Privacy budget of a client for its lifetime.
    task
        Loss and metrics, or the name of a task, the same as the server's; by default the task of
        the data.
    freeze, personal, adapter
        Parts of the model, the same as in the server's :class:`~fedclade.RunSettings`.
    seed
        Seed of the run, which draws the frozen values of a model that is made from a seed.
    adversary
        Attack of the client, of a kind that needs no other clients, for experiments; None for an
        honest client.
    queries
        Classes of queries that a method outside of fedclade needs, see :class:`fedclade.RowQuery`.
        A client replies to such a query if its policy allows its kind.

    Returns
    -------
    ClientApp
        App that replies to every query. It refuses a query that it cannot reply to, with the
        reason.
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
        # The vocabulary of texts is checked when the client proposes it: here it counts as agreed.
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
    """Return a ClientApp around a function that makes a client.

    The function's arguments are Flower's context and the schema that all clients have agreed on.
    The latest clients stay ready in memory.

    The client of a node with ``epsilon`` in its config, or any client if ``private``, has
    differential privacy: the reason why its data or its model cannot be used is written only to
    its own log, since the reason may quote data.
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
            # Reasons are, for example, missing data, a full disk, or the client's policy. The
            # server chooses a part of both texts: without control characters they cannot forge
            # lines of the log.
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
            _log.exception("an error that fedclade did not expect")
            answered = unsigned(refusal(FAILED), message)
        return Message(answered, reply_to=message)

    app = ClientApp()
    for decorate in (app.train(), app.evaluate(), app.query()):
        decorate(answer)
    return app


def _federation(data: object) -> Federation:
    """Check the return value of a user's ``data_fn``."""
    if not isinstance(data, Federation):
        raise DataError(
            f"data_fn should return a federation of one client, got a {type(data).__name__}"
        )
    return data


def node_settings(context: Context) -> NodeSettings:
    """Return the settings of one client alone, from its node's config.

    Raises
    ------
    ConfigError
        If a value cannot be used.
    """
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
    if type(number) is not int or number < 0:  # for isinstance, True is an int
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
