"""Parameter tree of a run: all clusters that ever existed, with their members, models and splits.

It is the tree T = (V, E) of CFL, section V-C. Each node is a cluster; its children are the clusters
into which it was split. The leaves are the current clusters. Models are flat vectors of S entries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core.arguments import checked
from fedclade.core.client_ids import (
    MANY_IDS,
    ArrayMapping,
    ClientIds,
    Positions,
    ascending_ids,
    concatenated_ids,
    id_array,
    numbers_of,
    without_ids,
)
from fedclade.core.errors import TreeError, shown
from fedclade.core.file_rows import copy_rows, merge_rows
from fedclade.core.plugins import Displayed
from fedclade.core.server_steps import server_step

VECTORS = ("params", "trained_from", "continued")
"""Names of the fields of a :class:`Node` that are model vectors ``[S]``."""


@dataclass(frozen=True, eq=False)
class Node:
    """Node of the parameter tree, which stands for a cluster.

    Parameters
    ----------
    id, parent
        Index of the node in the tree's list of nodes, and index of the node from which it was
        split. The root has id 0 and parent None.
    members
        Ids of the cluster's clients c_v, in ascending order: a tuple, or for 10,000 or more clients
        a :class:`~fedclade.core.client_ids.ClientIds`, which stores the ids in an array.
    params
        The cluster's model, a vector ``[S]``. For a leaf, it is the current model. For an inner
        node, it is the model θ*_v at which the clients computed the updates that led to the split,
        so that eq. 47 of CFL holds exactly for the cached updates.
    born
        Number of the round after which the node was created; 0 is the start of the run.
    split_in
        Number of the round in which the node was split; None for a leaf.
    criteria
        Values of the criteria that decided the split of the node, by name.
    cached
        Signatures of the members' updates at the parent's model before the split, Δ_e of eq. 47:
        ``[n, R]``, with a row of R numbers for each member, in the order of ``members``. A large
        matrix lies in a temporary file (:mod:`fedclade.core.file_rows`). None for the root, and for
        nodes that were not created by a split.
    trained_from
        The model ``[S]`` from which the cluster's last training began, so that ``params -
        trained_from`` is the latest update (Δw_t^(g) of FedGroup's eq. 10). In FlexCFL, it is the
        first model of the group. None if no algorithm needs it.
    continued
        A model ``[S]`` that was trained further after the node was split. Clients are evaluated
        with it in place of ``params``. None if the model was not trained further.
    """

    id: int
    parent: int | None
    members: Sequence[int]
    params: torch.Tensor
    born: int = 0
    split_in: int | None = None
    criteria: Mapping[str, float] = field(default_factory=dict[str, float])
    cached: torch.Tensor | None = None
    trained_from: torch.Tensor | None = None
    continued: torch.Tensor | None = None

    def __repr__(self) -> str:
        lifetime = f"born={self.born}" + (
            "" if self.split_in is None else f", split_in={self.split_in}"
        )
        return f"Node({self.id}, parent={self.parent}, clients={len(self.members)}, {lifetime})"

    @property
    def model(self) -> torch.Tensor:
        """The model vector ``[S]`` with which the clients of this node are evaluated."""
        return self.params if self.continued is None else self.continued


@dataclass(frozen=True, eq=False)
class Group:
    """Cluster that results from a new clustering of all clients.

    See :meth:`ParameterTree.regrouped`.
    """

    members: Sequence[int]
    leaf: int  # id of the leaf that becomes this cluster; 0 for a new leaf
    params: torch.Tensor  # the cluster's model [S]
    # signatures of its members, [n, R], in ascending order of the members
    cached: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class ParameterTree(Displayed):
    """Tree of all clusters of a run; the leaves are the current clusters.

    A tree is immutable: a method that changes the tree returns a new tree.

    Parameters
    ----------
    nodes
        All nodes in the order of their ids, parents before children.
    """

    nodes: tuple[Node, ...]

    def __repr__(self) -> str:
        return f"ParameterTree(nodes={len(self.nodes)}, clusters={len(self.leaves)}, clients={len(self.leaf_of)})"

    @classmethod
    @checked()
    def root_only(cls, members: Sequence[int], params: torch.Tensor) -> ParameterTree:
        """Return a tree with a single cluster, in which all clients share one model.

        ``members`` are the ids of the clients, and ``params [S]`` is the vector of the model.
        """
        return cls((Node(0, None, ascending_ids(members), params),))

    @classmethod
    @checked()
    def star(
        cls, clusters: Sequence[Sequence[int]], params: torch.Tensor, unassigned: Sequence[int] = ()
    ) -> ParameterTree:
        """Return a tree that consists of a root and a leaf for each of K given clusters.

        Parameters
        ----------
        clusters
            Client ids of the members of each cluster; a cluster may be empty.
        params
            Initial model ``[S]`` of all leaves, or initial model of each leaf, ``[K, S]``. The root
            has the model of the first leaf.
        unassigned
            Ids of clients that belong to no cluster; they are members of the root only.

        Raises
        ------
        TreeError
            If there are no clusters, or ``params`` has another shape.
        """
        members = concatenated_ids([*clusters, unassigned])
        if (
            not clusters
            or params.dim() not in (1, 2)
            or (params.dim() == 2 and len(params) != len(clusters))
        ):
            raise TreeError(
                f"params of a tree with {len(clusters)} clusters should have the shape [S], for "
                "one model of all clusters, or [K, S], for a model of each of K clusters with K at "
                f"least 1, got shape {list(params.shape)}"
            )
        models = params.expand(len(clusters), -1)
        root = replace(cls.root_only(members, models[0]).nodes[0], split_in=0)
        pairs = enumerate(zip(clusters, models, strict=True), start=1)
        return cls(
            (root, *(Node(i, 0, ascending_ids(cluster), model) for i, (cluster, model) in pairs))
        )

    @cached_property
    def leaves(self) -> tuple[Node, ...]:
        """Leaves of the tree, which are the current clusters, in the order of their ids."""
        parents = {node.parent for node in self.nodes}
        return tuple(node for node in self.nodes if node.id not in parents)

    @cached_property
    def leaf_of(self) -> Mapping[int, int]:
        """Id of the leaf to which each client belongs, by client id.

        For a client that belongs to no leaf, it is the id of the deepest node with this member.
        """
        if len(self.nodes[0].members) >= MANY_IDS:
            return self._leaf_of_many
        leaves = set(self.leaves)
        inner = (node for node in self.nodes if node not in leaves)
        return {client: node.id for node in (*inner, *self.leaves) for client in node.members}

    @property
    def _leaf_of_many(self) -> ArrayMapping[int]:
        """The mapping :attr:`leaf_of` in an array of 4 bytes for each client."""
        leaves = set(self.leaves)
        inner = [node for node in self.nodes if node not in leaves]
        members = [id_array(node.members) for node in self.nodes]
        everyone = self._positions_of_root
        if not all(everyone.have(ids) for ids in members[1:]):
            everyone = Positions(np.unique(np.concatenate(members)))
        found = np.zeros(len(everyone), dtype=np.int32)  # the root, unless a deeper node is found
        for node in (*inner, *self.leaves):
            if node.id > 0:
                found[everyone.of(members[node.id])] = node.id
        return ArrayMapping(everyone, found)

    @property
    def _positions_of_root(self) -> Positions:
        """Position of each member of the root, which are computed once for many members."""
        members = self.nodes[0].members
        return members.positions if isinstance(members, ClientIds) else Positions(id_array(members))

    @cached_property
    def stragglers(self) -> Mapping[int, Sequence[int]]:
        """Ids of clients that belong to no leaf, by the id of the deepest node with them.

        The ids of each node's clients are in ascending order.
        """
        leaves = set(self.leaves)
        leaf_of = self.leaf_of
        inner = (node for node in self.nodes if node not in leaves)
        waiting: list[tuple[int, Sequence[int]]] = []
        for node in inner:
            are_here = numbers_of(leaf_of, node.members) == node.id
            if are_here.any():
                waiting.append(
                    (node.id, ascending_ids(ClientIds(id_array(node.members)[are_here])))
                )
        return dict(sorted(waiting, key=lambda each: each[1][0]))

    def has_leaf(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        """Return for each of n clients whether it belongs to a leaf, as a mask ``[n]``.

        Parameters
        ----------
        ids
            Ids of the n clients, which need not be in the tree.
        """
        leaves = {leaf.id for leaf in self.leaves}
        leaf_of = self.leaf_of
        if isinstance(leaf_of, ArrayMapping) and leaf_of.positions.have(id_array(ids)):
            return np.isin(numbers_of(leaf_of, ids), list(leaves))
        return np.array([leaf_of.get(client) in leaves for client in ids], dtype=bool)

    def children(self, node: int) -> tuple[Node, ...]:
        """Return the child nodes of a node: the clusters into which it was split.

        Raises
        ------
        TreeError
            If the tree has no such node.
        """
        parent = self._known_node(node).id
        return tuple(child for child in self.nodes if child.parent == parent)

    def path(self, client: int) -> tuple[Node, ...]:
        """Return the nodes on the path from the root to a client's leaf, in this order.

        The models of the nodes are ordered from the most general to the most specific model.

        Raises
        ------
        TreeError
            If the client is not in the tree.
        """
        self._check_client(client)
        return self.above(self.leaf_of[client])

    def above(self, node: int) -> tuple[Node, ...]:
        """Return the nodes on the path from the root to a given node, which is the last entry.

        Raises
        ------
        TreeError
            If the tree has no such node.
        """
        path = [self._known_node(node)]
        while (parent := path[0].parent) is not None:
            path.insert(0, self.nodes[parent])
        return tuple(path)

    def node_for(self, client: int, level: int = -1) -> Node:
        """Return the node at a given level of the path from the root to a client's leaf.

        Parameters
        ----------
        client
            Id of the client.
        level
            Level of the node: 0 for the root, 1 for the root's child, and so on; −1 for the leaf,
            −2 for the leaf's parent, and so on.

        Raises
        ------
        TreeError
            If the client is not in the tree, or its path has no such level.
        """
        path = self.path(client)
        try:
            level = index(level)
        except TypeError:
            raise TreeError(
                f"level of a node should be a whole number, got {shown(level)}"
            ) from None
        if not -len(path) <= level < len(path):
            raise TreeError(
                f"level {level} is not on the path of client {client}, which has {len(path)} "
                f"levels: from the root, 0 to {len(path) - 1}, or from the leaf, -1 to -{len(path)}"
            )
        return path[level]

    def model_for(self, client: int, level: int = -1) -> torch.Tensor:
        """Return the model ``[S]`` of the node at a level of a client's path (CFL, section V-C).

        Higher levels have more specific models. Parameters and errors are those of
        :meth:`node_for`. In CFL, the root has the model of plain federated learning. An inner node
        has the model at which the node was split. This model was not trained further, except the
        model of a root whose training continued (:attr:`Node.continued`).
        """
        return self.node_for(client, level).model

    @checked("nodes")
    def models(
        self, nodes: Sequence[int], *, served: bool = False
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the distinct models of n nodes, and the row of each node among these models.

        The result has the form that a query needs: clients with the same node share a row.

        Parameters
        ----------
        nodes
            Ids of the n nodes, in which an id may occur several times.
        served
            Whether to return the models with which clients are evaluated (:attr:`Node.model`),
            rather than the models from which clients train.

        Returns
        -------
        tuple
            The K distinct models ``[K, S]``, and a list with the row of each of the n nodes.

        Raises
        ------
        TreeError
            If ``nodes`` is empty, or the tree has no such node.
        """
        if not isinstance(nodes, Collection) or not len(nodes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TreeError(f"nodes should be a list of at least 1 node, got {shown(nodes)}")
        try:
            distinct = set(nodes)
        except TypeError:  # an entry that cannot be hashed is not the id of a node
            raise TreeError(
                f"nodes should be a list of whole numbers, got {shown(nodes)}"
            ) from None
        for node in distinct:
            self._known_node(node)
        rows = {node: row for row, node in enumerate(dict.fromkeys(nodes))}
        models = [self.nodes[node].model if served else self.nodes[node].params for node in rows]
        return torch.stack(models), [rows[node] for node in nodes]

    @checked()
    def moved(self, node: int, delta: torch.Tensor) -> ParameterTree:
        """Return the tree with an update ``delta [S]`` added to a node's model.

        This is the server's step of CFL Algorithm 2, line 7. With a server optimizer
        (:class:`~fedclade.ServerOptimizer`), the optimizer turns the update into the step.
        """
        known = self._known_node(node, delta)
        return self.with_model(node, known.params + self._server_step(node, delta))

    def _server_step(self, node: int, delta: torch.Tensor) -> torch.Tensor:
        """Return the step of the server for a mean update, by the server optimizer if any."""
        return server_step([each.id for each in self.above(node)], delta)

    @checked()
    def with_model(self, node: int, params: torch.Tensor) -> ParameterTree:
        """Return the tree with the model of one node replaced by ``params [S]``."""
        return self._replace_node(replace(self._known_node(node, params), params=params))

    @checked()
    def trained(self, node: int, delta: torch.Tensor) -> ParameterTree:
        """Return the tree with an update ``delta [S]`` added to a node's model.

        In contrast to :meth:`moved`, the node also stores the model before the update, in
        :attr:`Node.trained_from`.
        """
        began = self._known_node(node, delta).params
        params = began + self._server_step(node, delta)
        return self._replace_node(replace(self.nodes[node], params=params, trained_from=began))

    def begun(self, node: int) -> ParameterTree:
        """Return the tree in which a node's model is also the one before its latest update.

        :attr:`Node.trained_from` is then equal to the model, so that the latest update is zero.
        """
        params = self._known_node(node).params
        return self._replace_node(replace(self.nodes[node], trained_from=params))

    def continued(self, model: torch.Tensor) -> ParameterTree:
        """Return the tree with a new model ``[S]`` in :attr:`Node.continued` of the root.

        It is the model of a root that is trained further after it was split. The root's ``params``
        remain the model at which the root was split.
        """
        return self._replace_node(replace(self.nodes[0], continued=model))

    @checked()
    def reassigned(self, leaf_of: Mapping[int, int]) -> ParameterTree:
        """Return the tree after some clients moved from one leaf to another leaf.

        Leaves remain leaves, even without members. The members of inner nodes do not change: they
        are the members at the time of the split.

        Parameters
        ----------
        leaf_of
            By client id, the id of the node to which each client moves: a leaf, or 0 (the root) if
            the client is to belong to no leaf. For a client that belongs to no leaf now, the id of
            the deepest node with the client is allowed as well: the client then does not move.

        Raises
        ------
        TreeError
            If a client moves to a node that is neither a leaf, nor the root, nor a node with
            clients that belong to no leaf.
        """
        places = {0, *(leaf.id for leaf in self.leaves), *self.stragglers}
        if lost := [leaf for leaf in leaf_of.values() if leaf not in places]:
            raise TreeError(
                f"clients can move only to one of the nodes {sorted(places)} (the root, a leaf, or "
                f"an inner node with clients that belong to no leaf), got node {lost[0]}"
            )
        came: dict[int, list[int]] = {
            node: [] for node in (0, *self.stragglers, *(leaf.id for leaf in self.leaves))
        }
        left: dict[int | None, set[int]] = {}
        for client, leaf in leaf_of.items():
            if (before := self.leaf_of.get(client)) != leaf:
                came[leaf].append(client)
                left.setdefault(before, set()).add(client)
        tree = self
        for leaf in self.leaves:
            # Drop cached signatures, since their rows are in the order of the old members.
            if came[leaf.id] or leaf.id in left:
                stayed = without_ids(leaf.members, left.get(leaf.id, ()))
                members = ascending_ids(concatenated_ids([stayed, came[leaf.id]]))
                tree = tree._replace_node(replace(leaf, members=members, cached=None))
        return tree

    def split(
        self,
        node: int,
        parts: Sequence[Sequence[int]],
        *,
        params: torch.Tensor,
        cached: Sequence[torch.Tensor],
        round_number: int,
        criteria: Mapping[str, float],
    ) -> ParameterTree:
        """Return the tree after a cluster was split (CFL Algorithm 5, line 19).

        The children start from the cluster's current model.

        Parameters
        ----------
        node, parts
            Id of the cluster, and the client ids of the members of each child.
        params
            The model ``[S]`` at which the clients computed the updates that led to the split; the
            node stores it.
        cached
            For each child, the signatures of its members' updates at that model: ``[n, R]``, with a
            row for each member, in ascending order of the members.
        round_number, criteria
            Number of the round in which the split was decided, and the values of the criteria.
        """
        parent = self.nodes[node]
        first = len(self.nodes)
        children = [
            Node(
                first + i,
                node,
                ascending_ids(members),
                parent.params,
                born=round_number,
                cached=updates,
            )
            for i, (members, updates) in enumerate(zip(parts, cached, strict=True))
        ]
        parent = replace(parent, params=params, split_in=round_number, criteria=dict(criteria))
        return ParameterTree((*self._replace_node(parent).nodes, *children))

    def regrouped(
        self,
        groups: Sequence[Group],
        *,
        round_number: int,
        params: torch.Tensor | None = None,
        criteria: Mapping[str, float] | None = None,
    ) -> ParameterTree:
        """Return a tree of a root and leaves after all clients were clustered again.

        A group either replaces an existing leaf or becomes a new leaf. Leaves that no group
        replaces remain in the tree without members. Clients that belong to no group are members of
        the root only. The new clusters are trained in the current round already.

        Parameters
        ----------
        groups
            The new clusters.
        round_number
            Number of the current round.
        params
            The model ``[S]`` at which the clients computed the updates that were clustered; the
            root stores it. None: the root does not change.
        criteria
            Values of the criteria that decided the clustering; the root stores them if ``params``
            is given.
        """
        root = self.nodes[0]
        if params is not None:
            root = replace(
                root, params=params, split_in=round_number, criteria=dict(criteria or {})
            )
        nodes = [root, *(replace(leaf, members=(), cached=None) for leaf in self.nodes[1:])]
        for group in groups:
            members = ascending_ids(group.members)
            if not group.leaf:
                nodes.append(
                    Node(
                        len(nodes),
                        0,
                        members,
                        group.params,
                        born=round_number - 1,
                        cached=group.cached,
                    )
                )
                continue
            nodes[group.leaf] = replace(
                nodes[group.leaf], members=members, params=group.params, cached=group.cached
            )
        return ParameterTree(tuple(nodes))

    def with_members(
        self, node: int, clients: Sequence[int], signatures: torch.Tensor
    ) -> ParameterTree:
        """Return the tree after m new clients joined a cluster.

        Parameters
        ----------
        node, clients
            Id of the cluster, which must have been created by a split, and ids of the m clients.
        signatures
            Signatures ``[m, R]`` of the new clients' updates at the model of the cluster's parent.
            They are added to the cached signatures of the other members.
        """
        cluster = self.nodes[node]
        members = concatenated_ids([cluster.members, clients])
        before = signatures[:0] if cluster.cached is None else cluster.cached
        order: list[int] = np.argsort(id_array(members), kind="stable").tolist()
        cached = merge_rows(before, signatures, order)
        return self._replace_node(replace(cluster, members=ascending_ids(members), cached=cached))

    @checked()
    def with_newcomers(self, clients: Sequence[int]) -> ParameterTree:
        """Return the tree with new clients as members of the root, but not of any cluster yet."""
        root = self.nodes[0]
        members = np.union1d(id_array(root.members), id_array(clients))
        return self._replace_node(replace(root, members=ascending_ids(ClientIds(members))))

    @checked()
    def without(self, clients: Sequence[int]) -> ParameterTree:
        """Return the tree after some clients left the run, without their cached signatures.

        All models remain, also the models of clusters whose members have all left.
        """
        gone = np.fromiter(clients, np.int64)
        nodes = list[Node]()
        for node in self.nodes:
            cached = node.cached
            if cached is not None:
                stay = np.flatnonzero(~np.isin(id_array(node.members), gone))
                if len(stay) < len(cached):
                    cached = copy_rows(cached, stay.tolist())
            nodes.append(replace(node, members=without_ids(node.members, clients), cached=cached))
        return ParameterTree(tuple(nodes))

    def map_vectors(
        self,
        models: Callable[[torch.Tensor], torch.Tensor],
        signatures: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> ParameterTree:
        """Return the tree with functions applied to all model vectors and signatures.

        Parameters
        ----------
        models
            Function that is applied to every model ``[S]``.
        signatures
            Function that is applied to the cached signatures ``[n, R]`` of every node. If None,
            signatures do not change.
        """

        def mapped(node: Node) -> Node:
            vectors = {
                name: models(vector)
                for name in VECTORS
                if (vector := getattr(node, name)) is not None
            }
            cached = (
                node.cached
                if signatures is None or node.cached is None
                else signatures(node.cached)
            )
            return replace(node, **vectors, cached=cached)

        return ParameterTree(tuple(map(mapped, self.nodes)))

    def _known_node(self, node: int, vector: torch.Tensor | None = None) -> Node:
        """Return the node with a given id, and check that a new vector has the shape of its model.

        Raises
        ------
        TreeError
            If the tree has no such node, or if ``vector`` is given and has another shape.
        """
        try:
            place = index(node)
        except TypeError:
            place = -1
        if 0 <= place < len(self.nodes):
            found = self.nodes[place]
            if vector is not None and vector.shape != found.params.shape:
                raise TreeError(
                    f"a vector for node {place} should have the shape of the node's model, "
                    f"{list(found.params.shape)}, got {list(vector.shape)}"
                )
            return found
        raise TreeError(
            f"node {shown(node)} is not in the parameter tree, which has the nodes 0 to "
            f"{len(self.nodes) - 1}"
        )

    def _check_client(self, client: int) -> None:
        """Raise a TreeError if a client is not in the tree."""
        clients = self.leaf_of
        try:
            if client in clients:
                return
        except TypeError:  # a value that cannot be hashed, such as a list, is not a client
            pass
        known = (
            f"{len(clients)} clients from {min(clients)} to {max(clients)}"
            if clients
            else "no clients"
        )
        raise TreeError(f"client {shown(client)} is not in the parameter tree, which has {known}")

    def _replace_node(self, node: Node) -> ParameterTree:
        """Return the tree in which a node replaces the node with the same id."""
        tree = ParameterTree((*self.nodes[: node.id], node, *self.nodes[node.id + 1 :]))
        # If the members did not change, the mappings by client remain valid. They are reused, since
        # it is slow to compute them for many clients.
        if node.members is self.nodes[node.id].members:
            known = {
                name: self.__dict__[name]
                for name in ("leaf_of", "stragglers")
                if name in self.__dict__
            }
            tree.__dict__.update(known)
        return tree
