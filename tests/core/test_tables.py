"""Tables of tables as one."""

from __future__ import annotations

from fedclade.core import flat


def test_a_config_is_flat_without_what_is_unset():
    config = {
        "seed": 0,
        "local": {"lr": 0.1, "mu": None},
        "model": {"adapter": {"rank": 8}},
        "target": {},
    }
    assert flat(config) == {"seed": 0, "local.lr": 0.1, "model.adapter.rank": 8}
