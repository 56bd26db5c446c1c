from __future__ import annotations

import re

import pytest

from fedclade import ConfigError, Signature
from fedclade.config import check_config


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
