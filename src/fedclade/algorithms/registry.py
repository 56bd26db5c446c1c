"""Registry of methods: looks up a method, and builds its algorithm, by name.

It contains the records of fedclade's own methods (:data:`METHODS`), and finds the records of
methods in other installed packages by their entry points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from inspect import isclass
from typing import Any

from fedclade import catalogue
from fedclade.algorithms.base import Algorithm
from fedclade.algorithms.fedavg import Oracle
from fedclade.algorithms.method import Method, Paper
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


@dataclass(frozen=True, kw_only=True)
class _OwnMethod(Method):
    """Record of one of fedclade's own methods, whose class is imported at its first use.

    So a config is checked, and a run begins, without the modules of all other methods.

    Parameters
    ----------
    reference
        The class, as ``module:Class``, where the module is in the package ``fedclade.algorithms``.
    """

    algorithm: type[Algorithm] = field(init=False, repr=False, compare=False)
    reference: str

    def __getattr__(self, name: str) -> Any:
        """Import the class; Python calls this method if the record has no ``algorithm`` yet."""
        if name != "algorithm":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        module, _, class_name = self.reference.partition(":")
        found = getattr(import_module(f"fedclade.algorithms.{module}"), class_name)
        object.__setattr__(self, name, found)
        return found


def _record(name: str, reference: str, **details: Any) -> Method:
    """Return the record of one of fedclade's own methods.

    Parameters
    ----------
    name
        Name of the method. The catalogue has its description. Its documentation page and its
        example config are named after the method.
    reference
        Its class, as ``module:Class``, where the module is in the package ``fedclade.algorithms``.
    **details
        Further fields of :class:`Method`, which replace those named above.
    """
    usual: dict[str, Any] = {
        "description": catalogue.METHODS[name],
        "scenarios": ("arena", "suite", "natural"),
        "config": f"{name}-mnist-label-swap",
        "page": f"methods/{name}.md",
    }
    return _OwnMethod(name=name, reference=reference, **{**usual, **details})


METHODS: tuple[Method, ...] = (
    _record(
        "fedavg",
        "fedavg:FedAvg",
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
    _record("local", "fedavg:Local", family="personal"),
    _record("oracle", "fedavg:Oracle", family="given"),
    _record(
        "cfl",
        "cfl:CFL",
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
        "rcfl", "rcfl:ReplicatedCFL", citations=("fedclade", "sattler2021cfl"), family="updates"
    ),
    _record(
        "auto",
        "auto:Auto",
        citations=("fedclade", "sattler2021cfl"),
        family="updates",
        scenarios=("natural",),  # the method needs validation data, which only these have
    ),
    _record(
        "fl_hc",
        "fl_hc:FLHC",
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
        "fedgroup:FedGroup",
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
        "flexcfl:FlexCFL",
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
        scenarios=("arena", "suite"),  # its shifts of labels do not exist in a regression
    ),
    _record(
        "ifca",
        "ifca:IFCA",
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
        "clove",
        "clove:CLoVE",
        papers=(
            Paper(
                ("Bhatia", "Papadis", "Kodialam", "Lakshman", "Chakrabarty"),
                2026,
                "CLoVE: Personalized Federated Learning through Clustering of Loss Vector "
                "Embeddings",
            ),
        ),
        citations=("bhatia2026clove",),
        family="models",
        clusters_as="clusters",
    ),
    _record(
        "fesem",
        "fesem:FeSEM",
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
        "fedsoft:FedSoft",
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
        "feddrift:FedDrift",
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
        "fedem:FedEM",
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
        "fedem:FedRC",
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
        scenarios=("arena", "suite"),  # a regression has no labels to count
    ),
    _record(
        "pacfl",
        "pacfl:PACFL",
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
        "flux:FLUX",
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
        "private_choice:PrivateChoice",
        citations=("fedclade",),
        family="updates",
        scenarios=(),  # the method is for federations with hundreds of private clients
    ),
    _record(
        "stocfl",
        "stocfl:StoCFL",
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
        "ocfl",
        "ocfl:OCFL",
        papers=(
            Paper(
                ("Zuziak", "Pellungrini", "Rinzivillo"),
                2024,
                "One-Shot Clustering for Federated Learning",
            ),
        ),
        citations=("zuziak2024ocfl",),
        family="updates",
    ),
    _record(
        "ditto",
        "ditto:Ditto",
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
        "apfl:APFL",
        papers=(
            Paper(("Deng", "Kamani", "Mahdavi"), 2020, "Adaptive Personalized Federated Learning"),
        ),
        citations=("deng2020apfl",),
        family="personal",
    ),
    _record(
        "pfedme",
        "pfedme:PFedMe",
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
        "per_fedavg:PerFedAvg",
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
        "scaffold:Scaffold",
        papers=(
            Paper(
                ("Karimireddy", "Kale", "Mohri", "Reddi", "Stich", "Suresh"),
                2020,
                "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
            ),
        ),
        citations=("karimireddy2020scaffold",),
        family="given",
        # arena/mnist trains with momentum, which control variates cannot correct
        scenarios=("arena/cifar10", "suite", "natural"),
    ),
    _record(
        "fedper",
        "fedavg:FedPer",
        papers=(
            Paper(
                ("Arivazhagan", "Aggarwal", "Singh", "Choudhary"),
                2019,
                "Federated Learning with Personalization Layers",
            ),
        ),
        citations=("arivazhagan2019fedper",),
        family="personal",
        scenarios=("arena/cifar10", "natural"),
    ),
    _record(
        "fedrep",
        "fedavg:FedRep",
        papers=(
            Paper(
                ("Collins", "Hassani", "Mokhtari", "Shakkottai"),
                2021,
                "Exploiting Shared Representations for Personalized Federated Learning",
            ),
        ),
        citations=("collins2021fedrep",),
        family="personal",
        scenarios=("arena/cifar10", "natural"),
    ),
    _record(
        "lg_fedavg",
        "fedavg:LGFedAvg",
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
        scenarios=("arena/cifar10", "natural"),
    ),
    _record(
        "fedbn",
        "fedavg:FedBN",
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
        "fedbuff:FedBuff",
        papers=(
            Paper(
                ("Nguyen", "Malik", "Zhan", "Yousefpour", "Rabbat", "Malek", "Huba"),
                2022,
                "Federated Learning with Buffered Asynchronous Aggregation",
            ),
        ),
        citations=("nguyen2022fedbuff",),
        family="given",
        scenarios=(),  # one of its rounds is a full buffer, not a round of all sampled clients
    ),
    _record("finetune", "fedavg:FineTune", citations=("mcmahan2017fedavg",), family="personal"),
)
"""The records of fedclade's own methods, in the order of ``fedclade ls``.

To add a method, write its module, add a record here, and its description to the catalogue.
``docs/method_lists.py`` then writes the method into the lists of the README, the documentation and
the shipped scenarios.
"""

ALGORITHMS: Mapping[str, Method] = {method.name: method for method in METHODS}
"""The records of fedclade's own methods, by name."""

TRUTH = ("true_clusters", "later")
"""Parameters of the oracle that are not hyper-parameters, and are never stored in files."""


def method_named(name: object) -> Method:
    """Return the record of a method by its name.

    Parameters
    ----------
    name
        A name in :data:`ALGORITHMS`, the name of an entry point of an installed package, or
        ``module:object``, where the object is a :class:`Method` or a subclass of ``Algorithm``. For
        a class without a record, a record is made from the attributes of the class.

    Raises
    ------
    ConfigError
        If the name is unknown, cannot be imported, or does not name a method.
    """
    found = named("algorithms", name, ALGORITHMS, "algorithm")
    is_record = isinstance(found, Method)
    algorithm = _check_class(name, found.algorithm if is_record else found)
    if not is_record:
        return Method.of_class(str(name), algorithm)
    if name in installed("algorithms") and found.name != name:
        fix = "set name of the Method to the name of its entry point"
        raise ConfigError(
            f"the entry point {shown(name)} of fedclade.algorithms provides a Method with another "
            f"name, {shown(found.name)}; {fix}"
        )
    return found


def method_of_run(name: str) -> Method | None:
    """Return the record of the method that a run folder names, or None if it is not installed.

    Run folders may come from untrusted sources. A name of the form ``module:object`` is therefore
    not imported, since the import would run code, and the result is None.
    """
    if name not in {*ALGORITHMS, *installed("algorithms")}:
        return None
    try:
        return method_named(name)
    except ConfigError:
        # The package of the method cannot be imported, but the run can be read without it.
        return None


def algorithm_class(name: object) -> type[Algorithm]:
    """Return the class of an algorithm by its name, which is as for :func:`method_named`.

    Raises
    ------
    ConfigError
        If the name is unknown, cannot be imported, or does not name an algorithm.
    """
    return method_named(name).algorithm


def _check_class(name: object, found: Any) -> type[Algorithm]:
    """Check that an object found under an algorithm's name is a usable algorithm class.

    Returns
    -------
    type
        The class itself.

    Raises
    ------
    ConfigError
        If the object is not a subclass of ``Algorithm``, if an abstract method is missing, or if
        the class is not a dataclass.
    """
    if not (isclass(found) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"algorithm {shown(name)} should be a subclass of fedclade.Algorithm, got "
            f"{shown(found)}"
        )
    if lacks := sorted(found.__abstractmethods__):
        raise ConfigError(
            f"algorithm {shown(name)} should define the methods of fedclade.Algorithm, but lacks "
            f"{', '.join(lacks)}; define them"
        )
    if not is_dataclass(found):
        raise ConfigError(
            f"algorithm {shown(name)} should be a dataclass: put @dataclass(frozen=True) above the "
            "class"
        )
    return found


def options_of(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's hyper-parameters by name, as :func:`build_algorithm` takes them.

    The true clusters of the algorithm ``oracle`` are left out.
    """
    given = (
        [each.name for each in fields(algorithm) if each.init] if is_dataclass(algorithm) else []
    )
    return {name: getattr(algorithm, name) for name in given if name not in TRUTH}


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's name and hyper-parameters, as a run's config stores them.

    Hyper-parameters that are objects, such as a split criterion, are replaced by their attribute
    ``described``, a text that describes them.
    """
    options = {
        name: getattr(value, "described", value) for name, value in options_of(algorithm).items()
    }
    kind = type(algorithm)

    def class_of(found: Any) -> Any:
        """Return the class of a method's record, or None if its name alone shows that it differs.

        Any other object is returned unchanged.
        """
        if isinstance(found, _OwnMethod) and not found.reference.endswith(f":{kind.__name__}"):
            return None  # the class is not imported for the comparison
        return found.algorithm if isinstance(found, Method) else found

    return {"name": name_of("algorithms", kind, ALGORITHMS, class_of), **options}


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
        A name in :data:`ALGORITHMS`, the name of an entry point ``fedclade.algorithms`` of an
        installed package, or ``module:Class``.
    options
        Hyper-parameters by name; hyper-parameters that are missing have their defaults.
    true_clusters
        True cluster of each client at the start of the run. Only the algorithm ``oracle`` uses it.
    later
        True cluster of each client after changes of the data, by the round of the change. Only the
        algorithm ``oracle`` uses it.

    Raises
    ------
    ConfigError
        If the name or an option is unknown, an option without default is missing, a value is out of
        range, or the algorithm is ``oracle`` and no true clusters are given.
    """
    kind = algorithm_class(name)
    owner = f"algorithm {name!r}"
    given = check_arguments(owner, kind, options or {}, TRUTH, positional=True)
    known = known_arguments(kind, TRUTH, positional=True)
    if missing := [
        option for option, p in known.items() if p.default is p.empty and option not in given
    ]:
        raise ConfigError(
            "\n".join(
                f"{option} of {owner} is not set and has no default; set it" for option in missing
            )
        )
    if kind is Oracle:
        if true_clusters is None:
            fix = "set data.shift or, for your own data, pass Oracle(true_clusters) in Python"
            raise ConfigError(f"algorithm 'oracle' needs data whose true clusters are known; {fix}")
        return Oracle(true_clusters, later or {})
    try:
        return kind(**given)
    except FedcladeError:
        raise
    except Exception as error:  # the constructor of a user's class may raise anything
        raise ConfigError(
            f"{owner} cannot be built with the options {given}: {type(error).__name__}: {error}; "
            "correct the options, or the class of the algorithm"
        ) from error
