from __future__ import annotations

import re

import pytest

from fedclade import ConfigError, Signature, load_federation
from fedclade.config import Newcomers, check_config
from fedclade.faults import Faults


def test_signature_and_stream_have_their_defaults():
    config = check_config({})
    assert config.signature == Signature(kind="full", dim=1024)
    assert config.top.stream == "auto"
    assert config.as_dict()["signature"] == {"kind": "full", "dim": 1024}


def test_signature_and_stream_are_read():
    config = check_config({"stream": True, "signature": {"kind": "projected", "dim": 64}})
    assert config.signature == Signature(kind="projected", dim=64)
    assert config.top.stream is True
    assert check_config(config.as_dict()) == config


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"signature": {"kind": "sketch"}}, "kind of [signature] should be 'full' or 'projected', got 'sketch'"),
        ({"signature": {"dim": 0}}, "signature.dim should be at least 1, got 0"),
        ({"signature": {"dmi": 3}}, "unknown key of [signature]: 'dmi'; did you mean 'dim'?"),
        ({"stream": "yes"}, "stream of the config should be true or false or 'auto', got 'yes'"),
        ({"stream": True}, "stream = true: signatures of kind 'full' take as much memory as the updates"),
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
    config = check_config({"min_clients": 3, "faults": {"dropout": 0.1, "slow": 0.02, "corrupt": 0.01}})
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
        ({"privacy": {"clip_norm": -1.0}}, "privacy.clip_norm should be greater than 0 and finite, got -1.0"),
        (
            {"privacy": {"noise_multiplier": 2.0}},
            "privacy.noise_multiplier should be 0 where privacy.clip_norm is not set",
        ),
        ({"privacy": {"clip": 1.0}}, "unknown key of [privacy]: 'clip'; did you mean 'clip_norm'?"),
        (
            {"privacy": {"clip_norm": 1.0}, "algorithm": {"name": "ifca"}},
            "clients with differential privacy do not tell training losses that IFCA asks for",
        ),
    ],
)
def test_what_is_wrong_with_privacy_is_said(raw, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config(raw)


def test_newcomers_are_read_and_there_are_none_by_default():
    assert check_config({}).newcomers == Newcomers(clients=0, samples_per_client=None)
    config = check_config({"newcomers": {"clients": 3, "samples_per_client": 40}, "data": {"clients": 5}})
    assert config.newcomers == Newcomers(clients=3, samples_per_client=40)
    assert check_config(config.as_dict()) == config
    late = config.federation().newcomers
    assert late is not None
    assert [len(client.train) for client in late.clients] == [40] * 3


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"faults": {"dropout": 1.5}}, "faults.dropout should be in [0, 1], got 1.5"),
        ({"faults": {"dropout": 0.7, "corrupt": 0.5}}, "[faults] the sum of faults should be at most 1, got 1.2"),
        ({"faults": {"drop_out": 0.1}}, "unknown key of [faults]: 'drop_out'; did you mean 'dropout'?"),
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
    with pytest.raises(ConfigError, match=r"newcomers\.clients should be 0 unless data\.clients says how many others"):
        load_federation("synthetic", partition="natural", clients=None, newcomers=2)
    assert check_config({**raw, "data": {**raw["data"], "clients": 4}}).newcomers.clients == 2
