"""Parameter tree T = (V, E) of CFL, section V-C: all clusters of a run, their models and splits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index

import torch
from torch import Tensor

from fedclade.core.arguments import checked
from fedclade.core.errors import TreeError, shown
from fedclade.core.plugins import Displayed

VECTORS = ("params", "trained_from", "continued")
"""Fields of a node that are models ``[S]``."""


@dataclass(frozen=True, eq=False)
class Node:
    """One cluster: a node of the parameter tree.

    Parameters
    ----------
    id, parent
        Its index in the tree's list of nodes, and the index of the node it was split from. The root
        has id 0 and parent None.
    members
        Its clients c_v, in ascending order.
    params
        Its model ``[S]``. For a leaf this is the current model; for an inner node it is the model
        θ*_v at which the updates before the split were made, so that eq. 47 holds exactly for the
        cached updates.
    born
        Round after which it was created; 0 is the start of the run.
    split_in
        Round in which it was split; None for a leaf.
    criteria
        Values of the criteria that decided its split.
    cached
        Signatures of the members' updates at the parent's model before the split, Δ_e of eq. 47:
        ``[n, R]`` in the order of members. None for the root, and for nodes that were not created
        by a split.
    trained_from
        The model ``[S]`` from which its own last training began, so that ``params - trained_from``
        is its latest update (Δw_t^(g) of FedGroup's eq. 10); in FlexCFL the first model of the
        group. None if no algorithm needs it.
    continued
        A model ``[S]`` that continued to be trained after the node was split. Clients are evaluated
        with it in place of ``params``. None if there is none.
    """

    id: int
    parent: int | None
    members: tuple[int, ...]
    params: Tensor
    born: int = 0
    split_in: int | None = None
    criteria: Mapping[str, float] = field(default_factory=dict[str, float])
    cached: Tensor | None = None
    trained_from: Tensor | None = None
    continued: Tensor | None = None

    def __repr__(self) -> str:
        lifetime = f"born={self.born}" + (
            "" if self.split_in is None else f", split_in={self.split_in}"
        )
        return f"Node({self.id}, parent={self.parent}, clients={len(self.members)}, {lifetime})"

    @property
    def model(self) -> Tensor:
        """The model ``[S]`` with which clients at this node are evaluated."""
        return self.params if self.continued is None else self.continued


@dataclass(frozen=True, eq=False)
class Group:
    """A cluster that results from clustering clients again."""

    members: tuple[int, ...]
    leaf: int  # the leaf that it continues; 0 for a new one
    params: Tensor  # its model [S]
    # signatures of its members, [n, R], in ascending order of the members
    cached: Tensor | None


@dataclass(frozen=True, eq=False)
class ParameterTree(Displayed):
    """All clusters of a run; the leaves are the current clusters.

    A tree is immutable: every change returns a new tree.

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
    def root_only(cls, members: Sequence[int], params: Tensor) -> ParameterTree:
        """Return a tree of one cluster: all clients share one model ``[S]``."""
        return cls((Node(0, None, tuple(sorted(members)), params),))

    @classmethod
    @checked()
    def star(
        cls, clusters: Sequence[Sequence[int]], params: Tensor, unassigned: Sequence[int] = ()
    ) -> ParameterTree:
        """Return a root with one leaf for each cluster; clusters may be empty.

        Parameters
        ----------
        clusters
            Members of each cluster.
        params
            One first model ``[S]`` for all leaves, or one for each leaf, ``[K, S]``. The root has
            the first.
        unassigned
            Clients in no cluster; they are members of the root only.

        Raises
        ------
        TreeError
            If there are no clusters, or ``params`` has another shape.
        """
        members = [*(client for cluster in clusters for client in cluster), *unassigned]
        if (
            not clusters
            or params.dim() not in (1, 2)
            or (params.dim() == 2 and len(params) != len(clusters))
        ):
            raise TreeError(
                f"a star of {len(clusters)} clusters starts from a model [S], or one for each of "
                f"at least 1 cluster, [K, S], got shape {list(params.shape)}"
            )
        models = params.expand(len(clusters), -1)
        root = replace(cls.root_only(members, models[0]).nodes[0], split_in=0)
        pairs = enumerate(zip(clusters, models, strict=True), start=1)
        return cls(
            (root, *(Node(i, 0, tuple(sorted(cluster)), model) for i, (cluster, model) in pairs))
        )

    @cached_property
    def leaves(self) -> tuple[Node, ...]:
        """Current clusters, in the order of their ids."""
        parents = {node.parent for node in self.nodes}
        return tuple(node for node in self.nodes if node.id not in parents)

    @cached_property
    def leaf_of(self) -> Mapping[int, int]:
        """Leaf of each client; for a client in no leaf, the deepest node that contains it."""
        leaves = set(self.leaves)
        inner = (node for node in self.nodes if node not in leaves)
        return {client: node.id for node in (*inner, *self.leaves) for client in node.members}

    @cached_property
    def stragglers(self) -> Mapping[int, tuple[int, ...]]:
        """Clients in no leaf, in ascending order, by the deepest node of which they are members."""
        leaves = set(self.leaves)
        leaf_of = self.leaf_of
        inner = (node for node in self.nodes if node not in leaves)
        waiting = (
            (node.id, tuple(c for c in node.members if leaf_of[c] == node.id)) for node in inner
        )
        return dict(
            sorted(((node, ids) for node, ids in waiting if ids), key=lambda each: each[1][0])
        )

    def children(self, node: int) -> tuple[Node, ...]:
        """Return the clusters into which a node was split.

        Raises
        ------
        TreeError
            If the tree has no such node.
        """
        parent = self._known_node(node).id
        return tuple(child for child in self.nodes if child.parent == parent)

    def path(self, client: int) -> tuple[Node, ...]:
        """Return the nodes from the root to a client's leaf.

        Their models go from the most general to the most specific one.

        Raises
        ------
        TreeError
            If the client is not in the tree.
        """
        self._check_client(client)
        return self.above(self.leaf_of[client])

    def above(self, node: int) -> tuple[Node, ...]:
        """Return the nodes from the root to a node, which is the last of them.

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
        """Return the node at a level of a client's path.

        Parameters
        ----------
        client
            The client.
        level
            0 is the root, 1 its child, and so on; −1 is the leaf, −2 its parent, and so on.

        Raises
        ------
        TreeError
            If the client is not in the tree, or its path has no such level.
        """
        path = self.path(client)
        try:
            level = index(level)
        except TypeError:
            raise TreeError(f"level should be a whole number, got {shown(level)}") from None
        if not -len(path) <= level < len(path):
            raise TreeError(
                f"level {level} is not on the path of client {client}, which has {len(path)} "
                f"levels: from the root, 0 to {len(path) - 1}, or from the leaf, -1 to -{len(path)}"
            )
        return path[level]

    def model_for(self, client: int, level: int = -1) -> Tensor:
        """Return the model ``[S]`` at a level of a client's path (CFL, section V-C).

        Higher levels have more specific models; levels and errors are those of :meth:`node_for`. In
        CFL, the root has the model of plain federated learning. An inner node has the model at
        which it was split, which was not trained further, except for a root that continued to be
        trained (:attr:`Node.continued`).
        """
        return self.node_for(client, level).model

    @checked("nodes")
    def models(self, nodes: Sequence[int], *, served: bool = False) -> tuple[Tensor, list[int]]:
        """Return the distinct models of some nodes, and the row of each node.

        Parameters
        ----------
        nodes
            Ids of n nodes.
        served
            Whether to return the models with which clients are evaluated (:attr:`Node.model`),
            rather than those from which they train.

        Returns
        -------
        tuple
            The models ``[K, S]``, and a list of the n rows.

        Raises
        ------
        TreeError
            If no node is named, or the tree has no such node.
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
    def moved(self, node: int, delta: Tensor) -> ParameterTree:
        """Return the tree with ``delta [S]`` added to a node's model (CFL Algorithm 2, line 7)."""
        return self.with_model(node, self._known_node(node, delta).params + delta)

    @checked()
    def with_model(self, node: int, params: Tensor) -> ParameterTree:
        """Return the tree with another model ``[S]`` for one node."""
        return self._with(replace(self._known_node(node, params), params=params))

    @checked()
    def trained(self, node: int, delta: Tensor) -> ParameterTree:
        """Return the tree after a node's own training added ``delta [S]`` to its model.

        The model before the step is stored in :attr:`Node.trained_from`.
        """
        began = self._known_node(node, delta).params
        return self._with(replace(self.nodes[node], params=began + delta, trained_from=began))

    def continued(self, model: Tensor) -> ParameterTree:
        """Return the tree with the model ``[S]`` that the root's continued training has reached.

        The root's ``params`` remain the model at which it was split.
        """
        return self._with(replace(self.nodes[0], continued=model))

    @checked()
    def reassigned(self, leaf_of: Mapping[int, int]) -> ParameterTree:
        """Return the tree after some clients changed their leaf.

        Leaves remain leaves, even without members, and the nodes above them keep the members that
        they were split with.

        Parameters
        ----------
        leaf_of
            The new leaf of each client that changes it, or the root if the client is then in no
            leaf.

        Raises
        ------
        TreeError
            If a new place is neither a leaf nor the root.
        """
        places = {0, *(leaf.id for leaf in self.leaves), *self.stragglers}
        if lost := [leaf for leaf in leaf_of.values() if leaf not in places]:
            raise TreeError(
                f"clients can move to the leaves {sorted(places - {0})} or to the root 0, got "
                f"{lost[0]}"
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
            # drop cached updates, which are in the order of the old members
            if came[leaf.id] or leaf.id in left:
                gone = left.get(leaf.id, ())
                stayed = (client for client in leaf.members if client not in gone)
                members = tuple(sorted((*stayed, *came[leaf.id])))
                tree = tree._with(replace(leaf, members=members, cached=None))
        return tree

    def split(
        self,
        node: int,
        parts: Sequence[Sequence[int]],
        *,
        params: Tensor,
        cached: Sequence[Tensor],
        round_number: int,
        criteria: Mapping[str, float],
    ) -> ParameterTree:
        """Return the tree after a cluster was split (CFL Algorithm 5, line 19).

        The children start from the cluster's current model.

        Parameters
        ----------
        node, parts
            The cluster, and the members of each child.
        params
            The model ``[S]`` that the node stores: the one at which the updates before the split
            were made.
        cached
            The signatures of these updates for each child, ``[n, R]`` in ascending order of its
            members.
        round_number, criteria
            The round of the decision, and the values of its criteria.
        """
        parent = self.nodes[node]
        first = len(self.nodes)
        children = [
            Node(
                first + i,
                node,
                tuple(sorted(members)),
                parent.params,
                born=round_number,
                cached=updates,
            )
            for i, (members, updates) in enumerate(zip(parts, cached, strict=True))
        ]
        parent = replace(parent, params=params, split_in=round_number, criteria=dict(criteria))
        return ParameterTree((*self._with(parent).nodes, *children))

    def regrouped(
        self,
        groups: Sequence[Group],
        *,
        round_number: int,
        params: Tensor | None = None,
        criteria: Mapping[str, float] | None = None,
    ) -> ParameterTree:
        """Return a star after its clients were clustered again.

        Leaves that no group continues stay in the tree without members. Clients in no group are
        members of the root only. The groups train in this round already.

        Parameters
        ----------
        groups
            The new clusters.
        round_number
            The current round.
        params
            The model ``[S]`` at which the updates were made that the groups result from; the root
            stores it. None: the root does not change.
        criteria
            Values of the criteria that decided the clustering; the root stores them with
            ``params``.
        """
        root = self.nodes[0]
        if params is not None:
            root = replace(
                root, params=params, split_in=round_number, criteria=dict(criteria or {})
            )
        nodes = [root, *(replace(leaf, members=(), cached=None) for leaf in self.nodes[1:])]
        for group in groups:
            members = tuple(sorted(group.members))
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

    def with_members(self, node: int, clients: Sequence[int], signatures: Tensor) -> ParameterTree:
        """Return the tree after m new clients joined a cluster.

        Parameters
        ----------
        node, clients
            The cluster, which a split must have created, and the m clients.
        signatures
            Signatures ``[m, R]`` of their updates at the model of the cluster's parent. They are
            added to the cached ones.
        """
        cluster = self.nodes[node]
        members = [*cluster.members, *clients]
        cached = signatures if cluster.cached is None else torch.cat([cluster.cached, signatures])
        order = sorted(range(len(members)), key=members.__getitem__)
        return self._with(
            replace(cluster, members=tuple(members[i] for i in order), cached=cached[order])
        )

    @checked()
    def with_newcomers(self, clients: Sequence[int]) -> ParameterTree:
        """Return the tree with new clients that are in no cluster yet: members of the root only."""
        root = self.nodes[0]
        return self._with(replace(root, members=tuple(sorted({*root.members, *clients}))))

    @checked()
    def without(self, clients: Sequence[int]) -> ParameterTree:
        """Return the tree without clients that left, and without their cached updates.

        All models remain, also those of clusters without any member left.
        """
        gone = set(clients)
        nodes = list[Node]()
        for node in self.nodes:
            kept = [i for i, member in enumerate(node.members) if member not in gone]
            members = tuple(node.members[i] for i in kept)
            nodes.append(
                replace(
                    node, members=members, cached=None if node.cached is None else node.cached[kept]
                )
            )
        return ParameterTree(tuple(nodes))

    def map_vectors(
        self,
        models: Callable[[Tensor], Tensor],
        signatures: Callable[[Tensor], Tensor] | None = None,
    ) -> ParameterTree:
        """Return the tree with a function applied to all vectors.

        Parameters
        ----------
        models
            Applied to every model ``[S]``.
        signatures
            Applied to the cached signatures ``[n, R]`` of every node; None leaves them unchanged.
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

    def _known_node(self, node: int, vector: Tensor | None = None) -> Node:
        """Return a node by its id; the model's shape must be that of ``vector``, if given."""
        try:
            place = index(node)
        except TypeError:
            place = -1
        if 0 <= place < len(self.nodes):
            found = self.nodes[place]
            if vector is not None and vector.shape != found.params.shape:
                raise TreeError(
                    f"the model of node {place} has shape {list(found.params.shape)}, got "
                    f"{list(vector.shape)}"
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
        raise TreeError(f"client {shown(client)} is not in the parameter tree, which holds {known}")

    def _with(self, node: Node) -> ParameterTree:
        tree = ParameterTree((*self.nodes[: node.id], node, *self.nodes[node.id + 1 :]))
        # members did not change, so reuse the mappings of clients: with many clients they are slow
        if node.members is self.nodes[node.id].members:
            known = {
                name: self.__dict__[name]
                for name in ("leaf_of", "stragglers")
                if name in self.__dict__
            }
            tree.__dict__.update(known)
        return tree
