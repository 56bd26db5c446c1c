"""Methods by name: the records of fedclade's own methods, and of methods in installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from inspect import isclass
from typing import Any

from fedclade.algorithms.apfl import APFL
from fedclade.algorithms.base import Algorithm
from fedclade.algorithms.cfl import CFL
from fedclade.algorithms.ditto import Ditto
from fedclade.algorithms.fedavg import (
    FedAvg,
    FedBN,
    FedPer,
    FedRep,
    FineTune,
    LGFedAvg,
    Local,
    Oracle,
)
from fedclade.algorithms.fedbuff import FedBuff
from fedclade.algorithms.feddrift import FedDrift
from fedclade.algorithms.fedem import FedEM, FedRC
from fedclade.algorithms.fedgroup import FedGroup
from fedclade.algorithms.fedsoft import FedSoft
from fedclade.algorithms.fesem import FeSEM
from fedclade.algorithms.fl_hc import FLHC
from fedclade.algorithms.flexcfl import FlexCFL
from fedclade.algorithms.flux import FLUX
from fedclade.algorithms.ifca import IFCA
from fedclade.algorithms.method import Method, Paper
from fedclade.algorithms.pacfl import PACFL
from fedclade.algorithms.per_fedavg import PerFedAvg
from fedclade.algorithms.pfedme import PFedMe
from fedclade.algorithms.private_choice import PrivateChoice
from fedclade.algorithms.rcfl import ReplicatedCFL
from fedclade.algorithms.scaffold import Scaffold
from fedclade.algorithms.stocfl import StoCFL
from fedclade.core import (
    ConfigError,
    FedcladeError,
    check_arguments,
    installed,
    known_arguments,
    name_of,
    named,
    shown,
)


def _record(name: str, algorithm: type[Algorithm], description: str, **details: Any) -> Method:
    """Return the record of one of fedclade's methods, with its name for page and config."""
    usual: dict[str, Any] = {
        "scenarios": ("arena", "suite"),
        "config": f"{name}-mnist-label-swap",
        "page": f"methods/{name}.md",
    }
    return Method(name=name, algorithm=algorithm, description=description, **{**usual, **details})


METHODS: tuple[Method, ...] = (
    _record(
        "fedavg",
        FedAvg,
        "one model for all clients; FedProx with local.mu > 0",
        papers=(
            Paper(
                ("McMahan", "Moore", "Ramage", "Hampson", "Agüera y Arcas"),
                2017,
                "Communication-Efficient Learning of Deep Networks from Decentralized Data",
            ),
            Paper(
                ("Li", "Sahu", "Zaheer", "Sanjabi", "Talwalkar", "Smith"),
                2018,
                "Federated Optimization in Heterogeneous Networks",
            ),
        ),
        citations=("mcmahan2017fedavg",),
        family="given",
    ),
    _record("local", Local, "no federation: every client on its own", family="personal"),
    _record(
        "oracle", Oracle, "FedAvg within the true clusters, the best to hope for", family="given"
    ),
    _record(
        "cfl",
        CFL,
        "recursive optimal bi-partition by cosine similarity",
        papers=(
            Paper(
                ("Sattler", "Müller", "Samek"),
                2019,
                "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization "
                "Under Privacy Constraints",
            ),
        ),
        citations=("sattler2021cfl",),
        family="updates",
        options={"eps1": 0.3, "eps2": 1.2},
    ),
    _record(
        "rcfl",
        ReplicatedCFL,
        "clusters tested on replicated updates, with no thresholds to set; fedclade's own",
        citations=("fedclade", "sattler2021cfl"),
        family="updates",
    ),
    _record(
        "fl_hc",
        FLHC,
        "one step of hierarchical clustering of all updates",
        papers=(
            Paper(
                ("Briggs", "Fan", "Andras"),
                2020,
                "Federated Learning with Hierarchical Clustering of Local Updates to Improve "
                "Training on Non-IID Data",
            ),
        ),
        citations=("briggs2020flhc",),
        family="updates",
        options={"rounds_before": 5, "metric": "l2", "linkage": "ward"},
    ),
    _record(
        "fedgroup",
        FedGroup,
        "groups by the first updates, newcomers by theirs; FedGrouProx with mu > 0",
        papers=(
            Paper(
                ("Duan", "Liu", "Ji", "Liu", "Liang", "Chen", "Tan"),
                2020,
                "FedGroup: Efficient Clustered Federated Learning via Decomposed Data-Driven "
                "Measure",
            ),
        ),
        citations=("duan2020fedgroup",),
        family="updates",
        options={"pretrain_scale": 3},
        clusters_as="groups",
    ),
    _record(
        "flexcfl",
        FlexCFL,
        "FedGroup whose clients migrate when their labels shift",
        papers=(
            Paper(
                ("Duan", "Liu", "Ji", "Wu", "Liang", "Chen", "Tan"),
                2021,
                "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift",
            ),
        ),
        citations=("duan2021flexcfl",),
        family="updates",
        options={"pretrain_scale": 3},
        clusters_as="groups",
    ),
    _record(
        "ifca",
        IFCA,
        "k models, every client takes the one with the lowest training loss",
        papers=(
            Paper(
                ("Ghosh", "Chung", "Yin", "Ramchandran"),
                2020,
                "An Efficient Framework for Clustered Federated Learning",
            ),
        ),
        citations=("ghosh2020ifca",),
        family="models",
        options={"restarts": 4},
        clusters_as="clusters",
    ),
    _record(
        "fesem",
        FeSEM,
        "k centres, every client goes to the nearest in parameter space",
        papers=(
            Paper(
                ("Xie", "Long", "Shen", "Zhou", "Wang", "Jiang", "Zhang"),
                2020,
                "Multi-Center Federated Learning",
            ),
        ),
        citations=("xie2020fesem",),
        family="models",
        clusters_as="clusters",
    ),
    _record(
        "fedsoft",
        FedSoft,
        "models of each client between k centres, by whose examples they fit",
        papers=(
            Paper(
                ("Ruan", "Joe-Wong"),
                2022,
                "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating",
            ),
        ),
        citations=("ruan2022fedsoft",),
        family="models",
        options={"lam": 0.1, "selection": 20},
        clusters_as="clusters",
    ),
    _record(
        "feddrift",
        FedDrift,
        "models opened where accuracy drops, merged where they agree",
        papers=(
            Paper(
                ("Jothimurugesan", "Hsieh", "Wang", "Joshi", "Gibbons"),
                2023,
                "Federated Learning under Distributed Concept Drift",
            ),
        ),
        citations=("jothimurugesan2023feddrift",),
        family="models",
        options={"step_rounds": 4},
    ),
    _record(
        "fedem",
        FedEM,
        "M models, and every client a mixture of its own of them",
        papers=(
            Paper(
                ("Marfoq", "Neglia", "Bellet", "Kameni", "Vidal"),
                2021,
                "Federated Multi-Task Learning under a Mixture of Distributions",
            ),
        ),
        citations=("marfoq2021fedem",),
        family="models",
    ),
    _record(
        "fedrc",
        FedRC,
        "FedEM that does not separate clients by their labels alone",
        papers=(
            Paper(
                ("Guo", "Tang", "Lin"),
                2024,
                "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by "
                "Robust Clustering",
            ),
        ),
        citations=("guo2024fedrc",),
        family="models",
    ),
    _record(
        "pacfl",
        PACFL,
        "one-shot clusters by principal angles between the clients' data",
        papers=(
            Paper(
                ("Vahidian", "Morafah", "Wang", "Kungurtsev", "Chen", "Shah", "Lin"),
                2023,
                "Efficient Distribution Similarity Identification in Clustered Federated "
                "Learning via Principal Angles between Client Data Subspaces",
            ),
        ),
        citations=("vahidian2023pacfl",),
        family="data",
        options={"vectors": 3},
    ),
    _record(
        "flux",
        FLUX,
        "clusters once by what a model makes of the clients' data",
        papers=(
            Paper(
                ("Fenoglio", "Li", "Barbiero", "Lane", "Langheinrich", "Gjoreski"),
                2025,
                "FLUX: Efficient Descriptor-Driven Clustered Federated Learning under Arbitrary "
                "Distribution Shifts",
            ),
        ),
        citations=("fenoglio2025flux",),
        family="data",
    ),
    _record(
        "private_choice",
        PrivateChoice,
        "clusters by noisy sums and randomized choices, under differential privacy; fedclade's own",
        citations=("fedclade",),
        family="updates",
        scenarios=(),  # it is made for hundreds of private clients
    ),
    _record(
        "stocfl",
        StoCFL,
        "clusters united by how an anchor model moves on their data",
        papers=(
            Paper(
                ("Zeng", "Hu", "Liu", "Yu", "Wang", "Xu"),
                2023,
                "Stochastic Clustered Federated Learning",
            ),
        ),
        citations=("zeng2023stocfl",),
        family="updates",
    ),
    _record(
        "ditto",
        Ditto,
        "a personal model for each client, held near a global one",
        papers=(
            Paper(
                ("Li", "Hu", "Beirami", "Smith"),
                2021,
                "Ditto: Fair and Robust Federated Learning Through Personalization",
            ),
        ),
        citations=("li2021ditto",),
        family="personal",
    ),
    _record(
        "apfl",
        APFL,
        "each client's model is a mixture of the global one and one of its own",
        papers=(
            Paper(("Deng", "Kamani", "Mahdavi"), 2020, "Adaptive Personalized Federated Learning"),
        ),
        citations=("deng2020apfl",),
        family="personal",
    ),
    _record(
        "pfedme",
        PFedMe,
        "personal models near a global one, which moves towards them",
        papers=(
            Paper(
                ("Dinh", "Tran", "Nguyen"),
                2020,
                "Personalized Federated Learning with Moreau Envelopes",
            ),
        ),
        citations=("dinh2020pfedme",),
        family="personal",
    ),
    _record(
        "per_fedavg",
        PerFedAvg,
        "a global model that is good after a step of each client",
        papers=(
            Paper(
                ("Fallah", "Mokhtari", "Ozdaglar"),
                2020,
                "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic "
                "Meta-Learning Approach",
            ),
        ),
        citations=("fallah2020perfedavg",),
        family="personal",
    ),
    _record(
        "scaffold",
        Scaffold,
        "FedAvg with control variates against client drift",
        papers=(
            Paper(
                ("Karimireddy", "Kale", "Mohri", "Reddi", "Stich", "Suresh"),
                2020,
                "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
            ),
        ),
        citations=("karimireddy2020scaffold",),
        family="given",
        # arena/mnist trains with momentum, which it cannot correct
        scenarios=("arena/cifar10", "suite"),
    ),
    _record(
        "fedper",
        FedPer,
        "FedAvg but for the head, which stays with each client",
        papers=(
            Paper(
                ("Arivazhagan", "Aggarwal", "Singh", "Choudhary"),
                2019,
                "Federated Learning with Personalization Layers",
            ),
        ),
        citations=("arivazhagan2019fedper",),
        family="personal",
        scenarios=("arena/cifar10",),
    ),
    _record(
        "fedrep",
        FedRep,
        "FedPer whose clients fit their heads first, and then the rest",
        papers=(
            Paper(
                ("Collins", "Hassani", "Mokhtari", "Shakkottai"),
                2021,
                "Exploiting Shared Representations for Personalized Federated Learning",
            ),
        ),
        citations=("collins2021fedrep",),
        family="personal",
        scenarios=("arena/cifar10",),
    ),
    _record(
        "lg_fedavg",
        LGFedAvg,
        "FedAvg of the head alone, over representations of each client",
        papers=(
            Paper(
                ("Liang", "Liu", "Ziyin", "Allen", "Auerbach", "Brent", "Salakhutdinov", "Morency"),
                2020,
                "Think Locally, Act Globally: Federated Learning with Local and Global "
                "Representations",
            ),
        ),
        citations=("liang2020lgfedavg",),
        family="personal",
        scenarios=("arena/cifar10",),
    ),
    _record(
        "fedbn",
        FedBN,
        "FedAvg but for normalisation layers, which stay with each client",
        papers=(
            Paper(
                ("Li", "Jiang", "Zhang", "Kamp", "Dou"),
                2021,
                "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
            ),
        ),
        citations=("li2021fedbn",),
        family="personal",
        scenarios=(),
        config="",  # no model of fedclade has normalisation layers
    ),
    _record(
        "fedbuff",
        FedBuff,
        "buffered asynchronous rounds on a virtual clock, within clusters",
        papers=(
            Paper(
                ("Nguyen", "Malik", "Zhan", "Yousefpour", "Rabbat", "Malek", "Huba"),
                2022,
                "Federated Learning with Buffered Asynchronous Aggregation",
            ),
        ),
        citations=("nguyen2022fedbuff",),
        family="given",
        scenarios=(),  # its rounds are buffers
    ),
    _record(
        "finetune",
        FineTune,
        "FedAvg, and every client fine-tunes its own copy",
        citations=("mcmahan2017fedavg",),
        family="personal",
    ),
)
"""The records of fedclade's own methods, in the order of ``fedclade ls``.

A new method needs its file and a record here; ``docs/method_lists.py`` writes every list that is a
text.
"""

ALGORITHMS: Mapping[str, Method] = {method.name: method for method in METHODS}
"""The records of fedclade's own methods, by name."""

TRUTH = ("true_clusters", "later")
"""Parameters of the oracle that are not hyper-parameters, and are never stored in files."""


def method_named(name: object) -> Method:
    """Return the record of a method by its name.

    The name is one of :data:`ALGORITHMS`, of a package's entry points, or ``module:object``. The
    object is a record or a class; a class without a record gets one that is made from its
    attributes.

    Raises
    ------
    ConfigError
        If the name is unknown, cannot be imported, or stands for something else.
    """
    found = named("algorithms", name, ALGORITHMS, "algorithm")
    is_record = isinstance(found, Method)
    algorithm = _check_class(name, found.algorithm if is_record else found)
    if not is_record:
        return Method.of_class(str(name), algorithm)
    if name in installed("algorithms") and found.name != name:
        fix = "give the record and its entry point the same name"
        raise ConfigError(
            f"algorithm {shown(name)} has a record with the name {shown(found.name)}; {fix}"
        )
    return found


def method_of_run(name: str) -> Method | None:
    """Return the record of a method that a run folder names, or None if it is not installed.

    Run folders may come from untrusted sources, so no ``module:object`` is imported.
    """
    if name not in {*ALGORITHMS, *installed("algorithms")}:
        return None
    try:
        return method_named(name)
    except ConfigError:
        # The package of the method is broken, but the run can be read without it.
        return None


def algorithm_class(name: object) -> type[Algorithm]:
    """Return the class of an algorithm by its name; see :func:`method_named`.

    Raises
    ------
    ConfigError
        If the name is unknown, cannot be imported, or stands for something else.
    """
    return method_named(name).algorithm


def _check_class(name: object, found: Any) -> type[Algorithm]:
    """Check that a name stands for the class of an algorithm, and return the class."""
    if not (isclass(found) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"algorithm {shown(name)} should be a subclass of fedclade.Algorithm, got "
            f"{shown(found)}"
        )
    if lacks := sorted(found.__abstractmethods__):
        raise ConfigError(
            f"algorithm {shown(name)} should define {', '.join(lacks)}, as fedclade.Algorithm says"
        )
    if not is_dataclass(found):
        raise ConfigError(
            f"algorithm {shown(name)} should be a dataclass: put @dataclass(frozen=True) above the "
            "class"
        )
    return found


def _class_of(found: Any) -> Any:
    """Return the class of a record; any other object unchanged."""
    return found.algorithm if isinstance(found, Method) else found


def options_of(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's hyper-parameters, from which :func:`build_algorithm` builds it."""
    given = (
        [each.name for each in fields(algorithm) if each.init] if is_dataclass(algorithm) else []
    )
    return {name: getattr(algorithm, name) for name in given if name not in TRUTH}


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's name and hyper-parameters, in the form of a config.

    Objects are replaced by a text that describes them.
    """
    options = {
        name: getattr(value, "described", value) for name, value in options_of(algorithm).items()
    }
    return {"name": name_of("algorithms", type(algorithm), ALGORITHMS, _class_of), **options}


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
        A name of :data:`ALGORITHMS` or of an installed package's entry points
        ``fedclade.algorithms``, or ``module:Class``.
    options
        The hyper-parameters; those that are missing have their defaults.
    true_clusters, later
        The true clusters at the start, and after changes of the data, by round. Only the ``oracle``
        receives them.

    Raises
    ------
    ConfigError
        If the name or an option is unknown, an option is missing, a value is out of range, or the
        true clusters that the oracle needs are not known.
    """
    kind = algorithm_class(name)
    owner = f"algorithm {name!r}"
    given = check_arguments(owner, kind, options or {}, TRUTH, positional=True)
    known = known_arguments(kind, TRUTH, positional=True)
    if missing := [
        option for option, p in known.items() if p.default is p.empty and option not in given
    ]:
        raise ConfigError(
            "\n".join(f"{option} of {owner} is not set, and has no default" for option in missing)
        )
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
        raise ConfigError(
            f"{owner} cannot be built with {given}: {type(error).__name__}: {error}"
        ) from error
