from __future__ import annotations

import math
import re

import pytest

from fedclade import ConfigError, Signature, load_federation
from fedclade.channel.retry import Faults
from fedclade.config import check_config
from fedclade.config.settings import Newcomers


def test_signature_and_stream_have_their_defaults():
    config = check_config({})
    assert config.signature == Signature(kind="full", dim=1024)
    assert config.top.stream == "auto"
    assert config.as_dict()["signature"] == {"kind": "full", "dim": 1024, "of": ()}


def test_signature_and_stream_are_read():
    config = check_config({"stream": True, "signature": {"kind": "projected", "dim": 64}})
    assert config.signature == Signature(kind="projected", dim=64)
    assert config.top.stream is True
    assert check_config(config.as_dict()) == config


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (
            {"signature": {"kind": "sketch"}},
            "kind of [signature] should be 'full' or 'projected' or 'signs', got 'sketch'",
        ),
        ({"signature": {"dim": 0}}, "signature.dim should be at least 1, got 0"),
        ({"signature": {"dmi": 3}}, "unknown key of [signature]: 'dmi'; did you mean 'dim'?"),
        ({"stream": "yes"}, "stream of the config should be true or false or 'auto', got 'yes'"),
        (
            {"stream": True, "algorithm": {"name": "cfl"}},
            "stream = true: signatures of kind 'full' take as much memory as the updates",
        ),
    ],
)
def test_what_is_wrong_with_signature_and_stream_is_said(raw, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config(raw)


def test_there_are_no_faults_unless_they_are_asked_for():
    config = check_config({})
    assert config.faults == Faults()
    assert config.top.min_clients == 1


def test_faults_and_min_clients_are_read():
    config = check_config(
        {"min_clients": 3, "faults": {"dropout": 0.1, "slow": 0.02, "corrupt": 0.01}}
    )
    assert config.faults == Faults(dropout=0.1, slow=0.02, corrupt=0.01)
    assert config.top.min_clients == 3
    assert check_config(config.as_dict()) == config


def test_privacy_is_read_and_there_is_none_by_default():
    assert check_config({}).as_dict()["privacy"] == {
        **{"permute": False, "clip_norm": None, "noise_multiplier": 0.0, "delta": 1e-5}
    }
    section = {"permute": True, "clip_norm": 2, "noise_multiplier": 0.5, "delta": 1e-6}
    assert check_config({"privacy": section}).as_dict()["privacy"] == {**section, "clip_norm": 2.0}


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (
            {"privacy": {"clip_norm": -1.0}},
            "privacy.clip_norm should be greater than 0 and finite, got -1.0",
        ),
        (
            {"privacy": {"noise_multiplier": 2.0}},
            "privacy.noise_multiplier should be 0 if privacy.clip_norm is not set",
        ),
        ({"privacy": {"clip": 1.0}}, "unknown key of [privacy]: 'clip'; did you mean 'clip_norm'?"),
        (
            {"privacy": {"clip_norm": 1.0}, "algorithm": {"name": "ifca"}},
            "clients with differential privacy do not reveal training losses that IFCA requests",
        ),
    ],
)
def test_what_is_wrong_with_privacy_is_said(raw, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config(raw)


def test_newcomers_are_read_and_there_are_none_by_default():
    assert check_config({}).newcomers == Newcomers(clients=0, samples_per_client=None)
    config = check_config(
        {"newcomers": {"clients": 3, "samples_per_client": 40}, "data": {"clients": 5}}
    )
    assert config.newcomers == Newcomers(clients=3, samples_per_client=40)
    assert "without_labels" not in config.as_dict()["newcomers"]
    blind = check_config(
        {"newcomers": {"clients": 3, "without_labels": True}, "data": {"clients": 5}}
    )
    assert blind.as_dict()["newcomers"]["without_labels"] is True
    assert check_config(config.as_dict()) == config
    late = config.federation().newcomers
    assert late is not None
    assert [len(client.train) for client in late.clients] == [40] * 3


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"faults": {"dropout": 1.5}}, "faults.dropout should be in [0, 1], got 1.5"),
        (
            {"faults": {"dropout": 0.7, "corrupt": 0.5}},
            "[faults] the sum of faults should be at most 1, got 1.2",
        ),
        (
            {"faults": {"drop_out": 0.1}},
            "unknown key of [faults]: 'drop_out'; did you mean 'dropout'?",
        ),
        ({"min_clients": 0}, "min_clients should be at least 1, got 0"),
    ],
)
def test_what_is_wrong_with_faults_and_min_clients_is_said(raw, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config(raw)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"clients": -1}, "newcomers.clients should be at least 0, got -1"),
        ({"samples_per_client": 0}, "newcomers.samples_per_client should be at least 1, got 0"),
        ({"client": 3}, "unknown key of [newcomers]: 'client'; did you mean 'clients'?"),
        ({"clients": "all"}, "clients of [newcomers] should be a whole number, got 'all'"),
    ],
)
def test_what_is_wrong_with_newcomers_is_said(raw, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config({"newcomers": raw})


def test_newcomers_need_a_number_of_others():
    raw = {"data": {"name": "synthetic", "partition": "natural"}, "newcomers": {"clients": 2}}
    with pytest.raises(
        ConfigError, match=r"newcomers\.clients should be 0 if data\.clients is left out"
    ):
        load_federation("synthetic", partition="natural", clients=None, newcomers=2)
    assert check_config({**raw, "data": {**raw["data"], "clients": 4}}).newcomers.clients == 2


@pytest.mark.parametrize(
    "odd",
    [["digits"], {"name": "digits"}, [["x"]], 5, True, 10**5000],
    ids=lambda odd: type(odd).__name__,
)
@pytest.mark.parametrize(
    ("section", "key", "told"),
    [
        ("data", "name", "unknown dataset in [data]: "),
        ("data", "partition", "[data] unknown partition "),
        ("data", "shift", "[data] unknown shift "),
        ("algorithm", "name", "[algorithm] unknown algorithm "),
        ("model", "name", "[model] unknown model "),
    ],
)
def test_a_name_that_is_no_string_is_refused(section, key, told, odd):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config({section: {key: odd}})


@pytest.mark.parametrize(
    "number", [2**63, -(10**400), 10**5000], ids=["2**63", "-10**400", "10**5000"]
)
@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (
            lambda number: {"local": {"lr": number}},
            "lr of [local] should be a number or left out, got ",
        ),
        (
            lambda number: {"data": {"clients": number}},
            "clients of [data] should be a whole number or left out, got ",
        ),
        (lambda number: {"seed": number}, "seed of the config should be a whole number, got "),
        (
            lambda number: {"algorithm": {"name": "cfl", "split_rounds": [1, number]}},
            "split_rounds of [algorithm] should",
        ),
    ],
)
def test_a_whole_number_of_more_than_64_bits_is_refused(raw, told, number):
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        check_config(raw(number))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("section", "key"),
    [("local", "lr"), ("local", "clip_norm"), ("faults", "dropout"), ("algorithm", "eps1")],
)
def test_a_setting_that_is_not_a_number_is_refused(section, key):
    algorithm = {"algorithm": {"name": "cfl"}}
    raw = {**algorithm, section: {**algorithm.get(section, {}), key: math.nan}}
    with pytest.raises(
        ConfigError, match=re.escape(f"{key} of [{section}] should be a number") + ".*got nan"
    ):
        check_config(raw)


def test_a_value_that_is_very_long_or_deep_is_shortened_in_its_message():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, [1] * 10**6, {str(i): i for i in range(10**5)}):
        with pytest.raises(
            ConfigError, match=r"lr of \[local\] should be a number or left out, got "
        ) as error:
            check_config({"local": {"lr": value}})
        assert len(str(error.value)) < 1000


def test_newcomers_are_checked_beside_wrong_data_as_far_as_that_goes():
    """Clients that leave would be compared with those that there are, of whom nothing is known here."""
    raw = {"data": {"clients": "six"}, "newcomers": {"clients": 2, "leave_round": 2}}
    told = "clients of [data] should be a whole number or left out, got 'six'"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        check_config(raw)
    raw["newcomers"]["clients"] = -1
    with pytest.raises(
        ConfigError,
        match="^" + re.escape(f"{told}\nnewcomers.clients should be at least 0, got -1"),
    ):
        check_config(raw)


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        (
            {"name": "fedgroup", "groups": 10**9},
            "algorithm.groups should be at most 6, the number of clients that can",
        ),
        (
            {"name": "fedgroup", "base_directions": 10**9},
            "algorithm.base_directions should be at most 6, since 6 clients",
        ),
        (
            {"name": "ifca", "clusters": 10**9},
            "algorithm.clusters should be at most the number of clients, 6",
        ),
        (
            {"name": "fesem", "clusters": 10**9},
            "algorithm.clusters should be at most the number of clients, 6",
        ),
        (
            {"name": "fl_hc", "n_clusters": 7},
            "algorithm.n_clusters should be at most the number of clients, 6, got 7",
        ),
        (
            {"name": "pacfl", "n_clusters": 7},
            "algorithm.n_clusters should be at most the number of clients, 6, got 7",
        ),
        (
            {"name": "fedgroup", "eta_g": 1e300},
            "algorithm.eta_g should be at most 3.4e+38, got 1e+300",
        ),
        ({"name": "fedgroup", "mu": 1e300}, "algorithm.mu should be at most 3.4e+38, got 1e+300"),
        ({"name": "ditto", "lam": 1e300}, "algorithm.lam should be at most 3.4e+38, got 1e+300"),
    ],
)
def test_hyper_parameters_beyond_reason_are_refused_before_anything_is_loaded(algorithm, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config({"data": {"clients": 6}, "algorithm": algorithm})


@pytest.mark.parametrize("name", ["builtins:dict", "builtins:type", "math:pi"])
def test_a_model_that_no_options_can_be_given_is_refused(name):
    with pytest.raises(ConfigError, match=re.escape(f"model '{name}'")):
        check_config({"model": {"name": name}})


def test_a_model_section_names_parts_besides_arguments():
    adapter = {"targets": ["1"], "rank": 2}
    config = check_config(
        {"model": {"name": "mlp", "hidden": 8, "freeze": ["3.bias"], "adapter": adapter}}
    )
    assert config.model == {
        **{"name": "mlp", "hidden": 8, "freeze": ("3.bias",)},
        "adapter": {"targets": ("1",), "rank": 2, "alpha": 16.0, "train": (), "kind": "lora"},
    }
    assert (config.settings.freeze, config.settings.adapter.rank) == (("3.bias",), 2)
    assert check_config(config.as_dict()) == config
    run = config.run(config.federation())
    assert [slot.name for slot in run.layout.parameters] == ["1.lora_A.weight", "1.lora_B.weight"]


def test_what_is_wrong_with_parts_is_said_with_the_rest():
    raw = {
        "model": {"name": "mlp", "hiden": 8, "freeze": "3", "adapter": {"rank": 2}},
        "signature": {"of": 3},
    }
    with pytest.raises(ConfigError) as error:
        check_config(raw)
    for text in (
        "freeze of [model] should be a list with entries that are each a string, got '3'",
        "unknown key of [model]: 'hiden'",
        "of of [signature] should be a list with entries that are each a string, or a string, got 3",
    ):
        assert text in str(error.value)


def test_an_adapter_without_targets_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"model.adapter.targets should be at least one pattern, such as 'fc\*', got \(\)",
    ):
        check_config({"model": {"name": "mlp", "adapter": {"rank": 2}}})


def test_of_a_misspelt_key_nobody_knows_what_else_it_makes_wrong():
    with pytest.raises(ConfigError) as error:
        check_config({"privacy": {"clipnorm": 1.0, "noise_multiplier": 1.0}})
    assert str(error.value).startswith(
        "unknown key of [privacy]: 'clipnorm'; did you mean 'clip_norm'? (known: "
    )
    assert "\n" not in str(error.value)
    with pytest.raises(
        ConfigError, match=r"lr of \[local\].*\n.*local.lr_decay should be in \(0, 1\], got 5"
    ):
        check_config({"local": {"lr": "x", "lr_decay": 5}})


def test_values_out_of_range_are_told_beside_values_of_a_wrong_type():
    """And none that only lack what was of a wrong type, such as the clusters of ifca."""
    raw = {
        "data": {"clients": 0, "samples_per_client": "many"},
        "local": {"lr": -1, "epochs": "x"},
        "algorithm": {"name": "ifca", "clusters": "two", "restarts": 0},
    }
    with pytest.raises(ConfigError) as error:
        check_config(raw)
    told = str(error.value).splitlines()
    assert [line.partition(", got")[0] for line in told] == [
        "samples_per_client of [data] should be a whole number or left out",
        "[data] clients should be at least 1",
        "clusters of [algorithm] should be a whole number",
        "algorithm.restarts should be at least 1",
        "epochs of [local] should be a whole number or a number or left out",
        "local.lr should be greater than 0",
    ]
