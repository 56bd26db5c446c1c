"""One paper, one file: the algorithms, by the names that configs use, and what an algorithm is made of.

They import clustering and core alone, and see the world as :class:`~fedclade.core.Clients`. Runs, configs, the network
and the papers import them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from inspect import isclass
from typing import Any

from fedclade.algorithms.apfl import APFL
from fedclade.algorithms.base import Algorithm, OwnModels, RoundLog, State
from fedclade.algorithms.cfl import CFL, CFLState
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of, move_clusters, train_clusters, train_root
from fedclade.algorithms.ditto import Ditto
from fedclade.algorithms.fedavg import FedAvg, FedBN, FedPer, FedRep, FineTune, LGFedAvg, Local, Oracle
from fedclade.algorithms.fedbuff import FedBuff
from fedclade.algorithms.feddrift import FedDrift
from fedclade.algorithms.fedem import FedEM, FedRC
from fedclade.algorithms.fedgroup import FedGroup
from fedclade.algorithms.fedsoft import FedSoft
from fedclade.algorithms.fesem import FeSEM
from fedclade.algorithms.fl_hc import FLHC
from fedclade.algorithms.flexcfl import FlexCFL, ShiftQuery
from fedclade.algorithms.flux import FLUX, DescriptorQuery, without_labels
from fedclade.algorithms.ifca import IFCA
from fedclade.algorithms.pacfl import PACFL, SubspaceQuery
from fedclade.algorithms.per_fedavg import PerFedAvg
from fedclade.algorithms.pfedme import PFedMe
from fedclade.algorithms.private_choice import PrivateChoice
from fedclade.algorithms.rcfl import ReplicatedCFL
from fedclade.algorithms.scaffold import Scaffold
from fedclade.algorithms.split_criterion import ExaminedCluster, ProposedSplit, SplitCriterion
from fedclade.algorithms.stocfl import StoCFL
from fedclade.core import ConfigError, Event, FedcladeError, check_arguments, known_arguments, name_of, named, shown

__all__ = [
    "ALGORITHMS",
    "APFL",
    "CFL",
    "FLHC",
    "FLUX",
    "IFCA",
    "PACFL",
    "TRUTH",
    "Algorithm",
    "CFLState",
    "ClusterUpdate",
    "DescriptorQuery",
    "Ditto",
    "Event",
    "ExaminedCluster",
    "FeSEM",
    "FedAvg",
    "FedBN",
    "FedBuff",
    "FedDrift",
    "FedEM",
    "FedGroup",
    "FedPer",
    "FedRC",
    "FedRep",
    "FedSoft",
    "FineTune",
    "FlexCFL",
    "LGFedAvg",
    "Local",
    "Oracle",
    "OwnModels",
    "PFedMe",
    "PerFedAvg",
    "PrivateChoice",
    "ProposedSplit",
    "ReplicatedCFL",
    "RoundLog",
    "Scaffold",
    "ShiftQuery",
    "SplitCriterion",
    "State",
    "StoCFL",
    "SubspaceQuery",
    "algorithm_class",
    "build_algorithm",
    "describe",
    "log_of",
    "move_clusters",
    "options_of",
    "train_clusters",
    "train_root",
    "without_labels",
]


@dataclass(frozen=True)
class Entry:
    """An algorithm of the library, and a line about it for people."""

    algorithm: type[Algorithm]
    summary: str


ALGORITHMS: Mapping[str, Entry] = {
    "fedavg": Entry(FedAvg, "one model for all clients; FedProx with local.mu > 0"),
    "local": Entry(Local, "no federation: every client on its own"),
    "oracle": Entry(Oracle, "FedAvg within the true clusters, the best to hope for"),
    "cfl": Entry(CFL, "recursive optimal bi-partition by cosine similarity (Sattler et al. 2019)"),
    "rcfl": Entry(ReplicatedCFL, "clusters tested on replicated updates, with no thresholds to set; fedclade's own"),
    "fl_hc": Entry(FLHC, "one step of hierarchical clustering of all updates (Briggs et al. 2020)"),
    "fedgroup": Entry(
        FedGroup, "groups by the first updates, newcomers by theirs; FedGrouProx with mu > 0 (Duan et al. 2020)"
    ),
    "flexcfl": Entry(FlexCFL, "FedGroup whose clients migrate when their labels shift (Duan et al. 2021)"),
    "ifca": Entry(IFCA, "k models, every client takes the one with the lowest training loss (Ghosh et al. 2020)"),
    "fesem": Entry(FeSEM, "k centres, every client goes to the nearest in parameter space (Xie et al. 2020)"),
    "fedsoft": Entry(
        FedSoft, "models of each client between k centres, by whose examples they fit (Ruan and Joe-Wong 2022)"
    ),
    "feddrift": Entry(
        FedDrift, "models opened where accuracy drops, merged where they agree (Jothimurugesan et al. 2023)"
    ),
    "fedem": Entry(FedEM, "M models, and every client a mixture of its own of them (Marfoq et al. 2021)"),
    "fedrc": Entry(FedRC, "FedEM that does not part clients by their labels alone (Guo et al. 2024)"),
    "pacfl": Entry(PACFL, "one-shot clusters by principal angles between the clients' data (Vahidian et al. 2023)"),
    "flux": Entry(FLUX, "clusters once by what a model makes of the clients' data (Fenoglio et al. 2025)"),
    "private_choice": Entry(
        PrivateChoice, "clusters by noisy sums and randomized choices, under differential privacy; fedclade's own"
    ),
    "stocfl": Entry(StoCFL, "clusters united by how an anchor model moves on their data (Zeng et al. 2023)"),
    "ditto": Entry(Ditto, "a personal model for each client, held near a global one (Li et al. 2021)"),
    "apfl": Entry(APFL, "each client's model is a mixture of the global one and one of its own (Deng et al. 2020)"),
    "pfedme": Entry(PFedMe, "personal models near a global one, which moves towards them (Dinh et al. 2020)"),
    "per_fedavg": Entry(PerFedAvg, "a global model that is good after a step of each client (Fallah et al. 2020)"),
    "scaffold": Entry(Scaffold, "FedAvg with control variates against client drift (Karimireddy et al. 2020)"),
    "fedper": Entry(FedPer, "FedAvg but for the head, which stays with each client (Arivazhagan et al. 2019)"),
    "fedrep": Entry(FedRep, "FedPer whose clients fit their heads first, and then the rest (Collins et al. 2021)"),
    "lg_fedavg": Entry(LGFedAvg, "FedAvg of the head alone, over representations of each client (Liang et al. 2020)"),
    "fedbn": Entry(FedBN, "FedAvg but for normalisation layers, which stay with each client (Li et al. 2021)"),
    "fedbuff": Entry(FedBuff, "buffered asynchronous rounds on a virtual clock, within clusters (Nguyen et al. 2022)"),
    "finetune": Entry(FineTune, "FedAvg, and every client fine-tunes its own copy"),
}


TRUTH = ("true_clusters", "later")
"""Parameters that are no hyper-parameters: only the oracle gets them, and no file has them."""

BUILTIN: Mapping[str, type[Algorithm]] = {name: entry.algorithm for name, entry in ALGORITHMS.items()}


def algorithm_class(name: object) -> type[Algorithm]:
    """Return the class of an algorithm by its name: one of :data:`ALGORITHMS`, a package's, or ``module:Class``.

    Raises
    ------
    ConfigError
        If the name is unknown, cannot be imported, or stands for something else.
    """
    found = named("algorithms", name, BUILTIN, "algorithm")
    if not (isclass(found) and issubclass(found, Algorithm)):
        raise ConfigError(f"algorithm {shown(name)} should be a subclass of fedclade.Algorithm, got {shown(found)}")
    if lacks := sorted(found.__abstractmethods__):
        raise ConfigError(f"algorithm {shown(name)} should define {', '.join(lacks)}, as fedclade.Algorithm says")
    if not is_dataclass(found):
        raise ConfigError(f"algorithm {shown(name)} should be a dataclass: put @dataclass(frozen=True) above the class")
    return found


def options_of(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's hyper-parameters, with which :func:`build_algorithm` builds it again."""
    given = [each.name for each in fields(algorithm) if each.init] if is_dataclass(algorithm) else []
    return {name: getattr(algorithm, name) for name in given if name not in TRUTH}


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's name and hyper-parameters, as a config has them; objects by a text that describes them."""
    options = {name: getattr(value, "described", value) for name, value in options_of(algorithm).items()}
    return {"name": name_of("algorithms", type(algorithm), BUILTIN), **options}


def build_algorithm(
    name: str,
    options: Mapping[str, Any] | None = None,
    true_clusters: Mapping[int, int] | None = None,
    later: Mapping[int, Mapping[int, int]] | None = None,
) -> Algorithm:
    """Build an algorithm from its name and hyper-parameters.

    Parameters
    ----------
    name
        One of :data:`ALGORITHMS` or of an installed package's entry points ``fedclade.algorithms``, or
        ``module:Class``.
    options
        Its hyper-parameters; what is left out keeps its default.
    true_clusters, later
        Handed to the ``oracle``, and to nobody else: those at first, and those from some rounds on.

    Raises
    ------
    ConfigError
        If the name or an option is unknown, an option is missing, a value is out of range, or the truth that the oracle
        needs is not known.
    """
    kind, owner = algorithm_class(name), f"algorithm {name!r}"
    given = check_arguments(owner, kind, options or {}, TRUTH, positional=True)
    known = known_arguments(kind, TRUTH, positional=True)
    if missing := [option for option, p in known.items() if p.default is p.empty and option not in given]:
        raise ConfigError("\n".join(f"{option} of {owner} is not set, and has no default" for option in missing))
    if kind is Oracle:
        if true_clusters is None:
            fix = "set data.shift, or with data of your own give Oracle(true_clusters) in Python"
            raise ConfigError(f"algorithm 'oracle' needs data whose true clusters are known; {fix}")
        return Oracle(true_clusters, later or {})
    try:
        return kind(**given)
    except FedcladeError:
        raise
    except Exception as error:  # of a user's own, which may check its options in its own way
        raise ConfigError(f"{owner} cannot be built with {given}: {type(error).__name__}: {error}") from error
