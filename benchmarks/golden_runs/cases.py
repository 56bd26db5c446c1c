"""Settings of the golden runs.

Each case is small: usually eight clients with 40 examples each, and a few rounds. The settings are
keys of a config, with the keys of a section written as ``section.key``. Keys that a case does not
set have the values in :data:`BASE`. ``tests/test_golden.py`` checks that every method, every rule
of aggregation, every kind of privacy and every kind of adversary has a case, so a new one must be
added here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Settings = Mapping[str, Any]

Kind = Literal["simulation", "network", "ray"]


@dataclass(frozen=True)
class Case:
    """One golden run.

    Parameters
    ----------
    name
        Name, which is unique among all cases.
    settings
        Settings in which the run differs from :data:`BASE`.
    kind
        Place of the clients: in this process, in this process but over Flower's messages, or in two
        Ray actors.
    node
        Config of every node of a network, such as the queries that its policy allows. Unused by
        other kinds.
    assigns
        Whether newcomers are assigned to clusters after the run, with ``fedclade.assign``.
    """

    name: str
    settings: Settings
    kind: Kind = "simulation"
    node: Mapping[str, Any] = field(default_factory=dict)
    assigns: bool = False


BASE: Settings = {
    "rounds": 6,
    "seed": 1,
    "engine": "loop",
    "data.name": "digits",
    "data.clients": 8,
    "data.samples_per_client": 40,
    "data.test_samples": 40,
    "data.shift": "label_swap",
    "data.clusters": 2,
    "model.name": "mclr",
    "local.batch_size": 10,
    "local.lr": 0.1,
}
"""Eight clients in two clusters, on scikit-learn's digits."""

MLP: Settings = {"model.name": "mlp", "model.hidden": 16, "local.lr": 0.5}
MOMENTUM: Settings = {"local.momentum": 0.9, "local.keep_state": True, "local.lr": 0.1}
SKETCHES: Settings = {"signature.kind": "projected", "signature.dim": 64}
NORMALISED: Settings = {"model.name": "golden_runs.models:normalised"}
LORA: Settings = {"model.adapter": {"targets": ["1"], "rank": 2, "train": ["3.*"]}, "local.lr": 0.1}
DRIFT: Settings = {"data.drift": {"rounds": [4], "share": 0.5}}
SCALED: Settings = {"adversary.kind": "scaled", "adversary.share": 0.25}

CFL: Settings = {
    "algorithm.name": "cfl",
    "algorithm.eps1": 0.4,
    "algorithm.eps2": 0.1,
    "algorithm.min_cluster_size": 3,
}
CFL_MLP: Settings = {**CFL, **MLP, "algorithm.eps1": 2.0}
RCFL: Settings = {"algorithm.name": "rcfl", "data.clients": 12, "rounds": 9}
AUTO: Settings = {
    **RCFL,
    "algorithm.name": "auto",
    "algorithm.budget": 3.0,
    "data.validation_fraction": 0.2,
}
FL_HC: Settings = {
    "algorithm.name": "fl_hc",
    "algorithm.rounds_before": 2,
    "algorithm.n_clusters": 2,
}
FEDGROUP: Settings = {
    "algorithm.name": "fedgroup",
    "algorithm.groups": 2,
    "algorithm.pretrain_scale": 2,
}
FLEXCFL: Settings = {
    "algorithm.name": "flexcfl",
    "algorithm.groups": 2,
    "algorithm.pretrain_scale": 2,
    "algorithm.eta_g": 0.1,
}
IFCA: Settings = {"algorithm.name": "ifca", "algorithm.clusters": 2}
FEDSOFT: Settings = {"algorithm.name": "fedsoft", "algorithm.clusters": 2, "algorithm.selection": 4}
FEDDRIFT: Settings = {
    "algorithm.name": "feddrift",
    "algorithm.start": "together",
    "algorithm.step_rounds": 2,
    "algorithm.delta": 0.1,
    **DRIFT,
}
FEDBUFF: Settings = {
    "algorithm.name": "fedbuff",
    "algorithm.buffer_size": 3,
    "algorithm.concurrency": 5,
}
STOCFL: Settings = {
    "algorithm.name": "stocfl",
    "algorithm.tau": 0.67,
    "algorithm.anchor_epochs": 1,
    "client_fraction": 0.5,
}
OCFL: Settings = {"algorithm.name": "ocfl", "data.clients": 12}
PFEDME: Settings = {"algorithm.name": "pfedme", "algorithm.steps": 2}
CENTRAL: Settings = {
    "privacy.model": "central",
    "privacy.clip_norm": 0.5,
    "privacy.noise_multiplier": 1.0,
}
PRIVATE_CHOICE: Settings = {
    "algorithm.name": "private_choice",
    "algorithm.rounds_before": 2,
    "algorithm.sketch": 32,
    **CENTRAL,
    "privacy.signature_noise": 1.0,
    "privacy.signature_epsilon": 3.0,
}
CLIENT_PRIVACY: Settings = {"privacy.clip_norm": 1.0, "privacy.noise_multiplier": 0.02}
EXAMPLE_PRIVACY: Settings = {"privacy.level": "example", **CLIENT_PRIVACY, "rounds": 2}

METHODS: Mapping[str, Settings] = {
    "fedavg": {"algorithm.name": "fedavg"},
    "local": {"algorithm.name": "local"},
    "oracle": {"algorithm.name": "oracle"},
    "cfl": CFL,
    "rcfl": RCFL,
    "auto": AUTO,
    "fl_hc": FL_HC,
    "fedgroup": FEDGROUP,
    "flexcfl": {**FLEXCFL, **DRIFT},
    "ifca": {**IFCA, "algorithm.restarts": 2},
    "clove": {"algorithm.name": "clove", "algorithm.clusters": 2},
    "fesem": {"algorithm.name": "fesem", "algorithm.clusters": 2},
    "fedsoft": FEDSOFT,
    "feddrift": FEDDRIFT,
    "fedem": {"algorithm.name": "fedem", "algorithm.clusters": 2},
    "fedrc": {"algorithm.name": "fedrc", "algorithm.clusters": 2},
    "pacfl": {"algorithm.name": "pacfl", "algorithm.n_clusters": 2},
    "flux": {"algorithm.name": "flux", "algorithm.earliest": 2, "algorithm.latest": 3, **MLP},
    "private_choice": PRIVATE_CHOICE,
    "stocfl": STOCFL,
    "ocfl": OCFL,
    "ditto": {"algorithm.name": "ditto"},
    "apfl": {"algorithm.name": "apfl", "algorithm.adaptive": True},
    "pfedme": PFEDME,
    "per_fedavg": {"algorithm.name": "per_fedavg"},
    "scaffold": {"algorithm.name": "scaffold", "client_fraction": 0.5},
    "fedper": {"algorithm.name": "fedper", **MLP},
    "fedrep": {"algorithm.name": "fedrep", "algorithm.head_epochs": 2, **MLP},
    "lg_fedavg": {"algorithm.name": "lg_fedavg", **MLP},
    "fedbn": {"algorithm.name": "fedbn", **NORMALISED},
    "fedbuff": FEDBUFF,
    "finetune": {"algorithm.name": "finetune"},
}
"""Settings of every registered method, by its name."""

VARIANTS: Mapping[str, Settings] = {
    "fedprox": {"algorithm.name": "fedavg", "local.mu": 0.1},
    "cfl at dates": {**CFL, "algorithm.split_rounds": [2, 4], "algorithm.min_cluster_size": 1},
    "cfl by gradients": {**CFL, "algorithm.similarity": "gradients"},
    "cfl with a fall-back": {**CFL, "algorithm.fallback": True, "data.validation_fraction": 0.2},
    "rcfl with a personal head": {**RCFL, **MLP, "model.personal": "head"},
    "rcfl with a fall-back": {**RCFL, "algorithm.fallback": True, "data.validation_fraction": 0.2},
    "rcfl that fine-tunes": {
        **RCFL,
        "algorithm.personalize": True,
        "data.validation_fraction": 0.2,
        "local.keep_state": True,
    },
    "fl_hc by cosine": {
        **{**FL_HC, "algorithm.metric": "cosine", "algorithm.linkage": "average"},
        **{"client_fraction": 0.5, "algorithm.cohort": "of_cluster"},
    },
    "fl_hc with α of all clients": {**FL_HC, "client_fraction": 0.3},
    "fedgrouprox": {
        **FEDGROUP,
        "algorithm.mu": 0.1,
        "algorithm.cold_start": "sampled",
        "client_fraction": 0.5,
    },
    "ifca by gradients": {**IFCA, "algorithm.average": "gradients"},
    "per_fedavg with Hessians": {
        "algorithm.name": "per_fedavg",
        "algorithm.variant": "HF",
        "rounds": 3,
    },
    "feddrift, eager": {**FEDDRIFT, "algorithm.eager": True},
    "ditto, sampled, with lasting momentum": {
        "algorithm.name": "ditto",
        "client_fraction": 0.5,
        **MOMENTUM,
    },
    "finetune, with a personal head and lasting momentum": {
        "algorithm.name": "finetune",
        **MLP,
        "model.personal": "head",
        **MOMENTUM,
    },
    "fedrep with lasting momentum": {
        "algorithm.name": "fedrep",
        "algorithm.head_epochs": 2,
        **MLP,
        **MOMENTUM,
    },
}
"""Methods with other settings."""

ENGINES: Mapping[str, Settings] = {
    "loop": {**CFL_MLP},
    "vmap": {**CFL_MLP, "engine": "vmap"},
    "stacked": {**CFL_MLP, "engine": "stacked"},
    "workers": {**CFL_MLP, "engine": "workers"},
    "stacked with momentum": {
        **MLP,
        "algorithm.name": "fedavg",
        "engine": "stacked",
        "local.momentum": 0.9,
        "local.clip_norm": 1.0,
    },
    "stacked, ditto": {"algorithm.name": "ditto", "engine": "stacked", **MOMENTUM},
    "stacked, fedem": {"algorithm.name": "fedem", "algorithm.clusters": 2, "engine": "stacked"},
    "stacked, rcfl": {**RCFL, "engine": "stacked"},
    "stacked, fedrep": {
        "algorithm.name": "fedrep",
        "algorithm.head_epochs": 2,
        **MLP,
        "engine": "stacked",
    },
    "vmap, scaffold": {"algorithm.name": "scaffold", "engine": "vmap"},
    "workers, fedsoft": {**FEDSOFT, "engine": "workers"},
}
"""Ways to train clients; the method is CFL, unless the name contains another."""

MODELS: Mapping[str, Settings] = {
    "personal head": {**CFL_MLP, "model.personal": "head"},
    "common body": {**CFL_MLP, "model.common": "body"},
    "frozen layer": {**CFL_MLP, "model.freeze": ["1.*"]},
    "LoRA": {**CFL, **MLP, **LORA},
    "LoRA and a personal head": {
        "algorithm.name": "fedavg",
        **MLP,
        **LORA,
        "model.personal": "head",
    },
    "BatchNorm": {**CFL, **NORMALISED},
}
"""Parts of models."""

DATA: Mapping[str, Settings] = {
    "label permutation": {**CFL, "data.shift": "label_permutation"},
    "rotation": {**CFL, "data.shift": "rotation"},
    "dirichlet": {"algorithm.name": "fedavg", "data.partition": "dirichlet"},
    "shards": {"algorithm.name": "fedavg", "data.partition": "shards"},
    "pathological": {"algorithm.name": "fedavg", "data.partition": "pathological"},
    "quantity skew": {"algorithm.name": "fedavg", "data.partition": "quantity_skew"},
    "balanced class weights": {"algorithm.name": "fedavg", "task.class_weights": "balanced"},
    "drift": {**CFL, **DRIFT},
    "drift that accumulates": {
        **IFCA,
        "data.drift": {"rounds": [3, 5], "share": 0.5, "kind": "accumulate"},
    },
    "drift, tested on the next stage": {
        "algorithm.name": "fedavg",
        "data.drift": {"rounds": [3, 5], "share": "anew", "test": "next"},
    },
}
"""Kinds of data: shifts, partitions, and data that changes during a run."""

SIGNATURES: Mapping[str, Settings] = {
    "projected": {**CFL, **SKETCHES},
    "signs": {**CFL, "signature.kind": "signs", "signature.dim": 300},
    "streamed": {**CFL, **SKETCHES, "stream": True},
    "of rcfl": {**RCFL, **SKETCHES},
    "of rcfl, streamed": {**RCFL, **SKETCHES, "stream": True},
}
"""Signatures by which clients are compared, and runs that stream updates."""

RULES = (
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "bulyan",
    "geometric_median",
    "centred_clipping",
)
"""Robust rules of aggregation; all other cases have the rule ``mean``."""

PRIVACY: Mapping[str, Settings] = {
    "permuted": {**CFL, "privacy.permute": True},
    "client": {"algorithm.name": "fedavg", **CLIENT_PRIVACY},
    "client, cfl": {**CFL, **CLIENT_PRIVACY},
    "client, rcfl": {**RCFL, **CLIENT_PRIVACY},
    "example": {"algorithm.name": "fedavg", **EXAMPLE_PRIVACY},
    "example, ditto": {"algorithm.name": "ditto", **EXAMPLE_PRIVACY},
    "example, fedrep": {
        "algorithm.name": "fedrep",
        "algorithm.head_epochs": 2,
        **MLP,
        **EXAMPLE_PRIVACY,
    },
    "central": {"algorithm.name": "fedavg", "client_fraction": 0.5, **CENTRAL},
    "central, oracle": {"algorithm.name": "oracle", **CENTRAL},
    "small clusters": {**CFL, **CLIENT_PRIVACY, "privacy.min_cluster_size": 3},
}
"""Kinds of privacy: of clients, of examples, and central; and related settings."""

ADVERSARIES = (
    "label_flip",
    "sign_flip",
    "scaled",
    "gaussian",
    "alie",
    "ipm",
    "minmax",
    "minsum",
    "backdoor",
    "false_size",
    "copy",
    "sybil",
)
"""Kinds of adversaries."""

LIES: Mapping[str, Settings] = {
    "losses": IFCA,
    "scores": {**CFL, "algorithm.fallback": True, "data.validation_fraction": 0.2},
    "subspaces": METHODS["pacfl"],
    "descriptors": METHODS["flux"],
    "shifts": METHODS["flexcfl"],
    "statistics": DATA["balanced class weights"],
    "signatures": {**RCFL, "adversary.kind": "scaled"},
}
"""For each false statement, a method that requests it."""

CLIENTS: Mapping[str, Settings] = {
    "sampled": {**CFL, "client_fraction": 0.5, "evaluate_every": 2},
    "few evaluated": {**CFL, "evaluate_clients": 3},
    "faults": {**CFL, "faults.dropout": 0.2, "faults.slow": 0.1, "faults.corrupt": 0.1},
    "faults of ditto": {"algorithm.name": "ditto", "faults.dropout": 0.3},
    "faults of rcfl": {**RCFL, "faults.dropout": 0.2, "faults.corrupt": 0.1},
    "limits": {**CFL, **SCALED, "aggregate.largest_weight": 1.5, "aggregate.clip_above": 1.2},
    "limits and faults": {
        **CFL,
        **SCALED,
        "data.partition": "quantity_skew",
        "aggregate.largest_weight": 1.1,
        "faults.dropout": 0.2,
        "faults.corrupt": 0.1,
    },
    "opposed updates": {
        **IFCA,
        "adversary.kind": "sign_flip",
        "adversary.share": 0.25,
        "aggregate.leave_out_opposed": True,
    },
    "sleepers": {
        **CFL,
        "adversary.kind": "sign_flip",
        "adversary.share": 0.25,
        "adversary.sleeper": True,
    },
    "availability": {**CFL, "presence.trace": "daily", "presence.round_seconds": 14400.0},
    "availability of ifca": {
        **IFCA,
        "presence.trace": "daily",
        "presence.round_seconds": 14400.0,
        "client_fraction": 0.5,
    },
    "newcomers": {**CFL, "newcomers.clients": 2, "newcomers.join_round": 3},
    "newcomers, and clients that leave": {
        "algorithm.name": "fedavg",
        "newcomers.clients": 2,
        "newcomers.join_round": 2,
        "newcomers.leave_round": 5,
    },
    "newcomers of ditto": {
        "algorithm.name": "ditto",
        "newcomers.clients": 2,
        "newcomers.join_round": 3,
    },
    "newcomers of fedgroup": {**FEDGROUP, "newcomers.clients": 2, "newcomers.join_round": 3},
    "best round": {**CFL, "keep_best": True, "stop.patience": 2, "data.validation_fraction": 0.2},
}
"""Availability and newcomers of clients, and limits and faults of their replies."""

ASSIGNED: Mapping[str, Settings] = {
    "cfl": {**CFL, "newcomers.clients": 2},
    "fedrep": {**METHODS["fedrep"], "newcomers.clients": 2},
    "fedem": {**METHODS["fedem"], "newcomers.clients": 2},
}
"""Runs after which newcomers are assigned to clusters."""

NETWORK: Mapping[str, Settings] = {
    "fedavg": {"algorithm.name": "fedavg"},
    "cfl": CFL,
    "rcfl": {**RCFL, "rounds": 3},
    "auto": {**AUTO, "rounds": 4, "algorithm.budget": 5.0},
    "fl_hc": FL_HC,
    "fedgroup": FEDGROUP,
    "flexcfl": FLEXCFL,
    "ifca": IFCA,
    "fedsoft": FEDSOFT,
    "fedem": METHODS["fedem"],
    "fedrc": METHODS["fedrc"],
    "pacfl": METHODS["pacfl"],
    "flux": METHODS["flux"],
    "stocfl": STOCFL,
    "ditto": METHODS["ditto"],
    "apfl": METHODS["apfl"],
    "pfedme": PFEDME,
    "scaffold": METHODS["scaffold"],
    "fedrep": METHODS["fedrep"],
    "ditto with lasting momentum": VARIANTS["ditto, sampled, with lasting momentum"],
    "cfl by gradients": VARIANTS["cfl by gradients"],
    "balanced class weights": DATA["balanced class weights"],
    "int8": {**CFL, "network.encoding": "int8"},
    "streamed": SIGNATURES["streamed"],
    "robust rule": {"algorithm.name": "fedavg", "aggregate.rule": "median"},
}
"""Runs over a network: the same methods, whose queries and replies are messages."""

SMALL: Settings = {"rounds": 4, "data.clients": 6}
"""Fewer clients and rounds, for runs over a network unless they say otherwise."""

SECURE: Settings = {
    "network.secure_aggregation": True,
    "network.secure_norm": 20.0,
    "network.secure_fewest": 3,
    "rounds": 3,
}

SECURE_NODE: Mapping[str, Any] = {"min-honest": 2}

SUMS: Mapping[str, Settings] = {
    "fedavg": {"algorithm.name": "fedavg", **SECURE},
    "fl_hc": {
        **FL_HC,
        "algorithm.rounds_before": 1,
        "algorithm.metric": "cosine",
        **SECURE,
        "signature.kind": "signs",
        "signature.dim": 64,
    },
}
"""Runs over a network with secure aggregation, in which the server gets only sums."""

RAY: Mapping[str, Settings] = {
    "cfl": {**CFL, "engine": "ray", "rounds": 3},
    "ditto": {"algorithm.name": "ditto", "engine": "ray", "rounds": 3, **MOMENTUM},
}
"""Runs on two Ray actors."""

ALL_ALLOWED: Mapping[str, Any] = {
    "allow": "train evaluate statistics gradients subspaces shifts descriptors"
}
"""Node config of clients that reply to every kind of query."""


def all_cases() -> Iterator[Case]:
    """Yield all cases, whose names are unique."""
    groups: Mapping[str, Mapping[str, Settings]] = {
        "method": METHODS,
        "variant": VARIANTS,
        "engine": ENGINES,
        "model": MODELS,
        "data": DATA,
        "signature": SIGNATURES,
        "rule": {rule: robust(rule) for rule in RULES},
        "mixing": {"krum": {**robust("krum"), "aggregate.mixing": True}},
        "privacy": PRIVACY,
        "adversary": {kind: adversary(kind) for kind in ADVERSARIES},
        "lie": {lie: false_statement(lie) for lie in LIES},
        "clients": CLIENTS,
    }
    for group, cases in groups.items():
        for name, settings in cases.items():
            yield Case(f"{group}: {name}", settings)
    for name, settings in ASSIGNED.items():
        yield Case(f"assigned: {name}", settings, assigns=True)
    for name, settings in NETWORK.items():
        yield Case(f"network: {name}", {**SMALL, **settings}, "network", ALL_ALLOWED)
    for name, settings in SUMS.items():
        yield Case(f"sums: {name}", {**SMALL, **settings}, "network", SECURE_NODE)
    for name, settings in RAY.items():
        yield Case(f"ray: {name}", settings, "ray")


def robust(rule: str) -> Settings:
    """Return the settings of FedAvg with a rule of aggregation, and with malicious clients."""
    return {"algorithm.name": "fedavg", "aggregate.rule": rule, **SCALED, "rounds": 3}


def adversary(kind: str) -> Settings:
    """Return the settings of CFL with one kind of adversary."""
    return {**CFL, "adversary.kind": kind, "adversary.share": 0.25, "rounds": 4}


def false_statement(lie: str) -> Settings:
    """Return the settings of a method that requests a value which malicious clients falsify."""
    return {**LIES[lie], "adversary.lies": [lie], "adversary.share": 0.25}


def named(only: Sequence[str] = ()) -> list[Case]:
    """Return the cases whose names contain one of these texts; all cases if there are no texts."""
    return [case for case in all_cases() if not only or any(text in case.name for text in only)]
