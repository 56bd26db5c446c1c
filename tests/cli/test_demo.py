"""The demo: what it says at its end of pictures that there are, or are not."""

import sys
from pathlib import Path

import pytest

from fedclade.cli import compare
from fedclade.config import check_config

DIGITS = {
    "rounds": 1,
    "data": {"name": "digits", "clients": 2, "samples_per_client": 40},
    "model": {"name": "mclr"},
}


@pytest.mark.parametrize("extras", [True, False])
def test_pictures_are_announced_if_there_are_some(extras, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Without the extra ``report`` nothing can draw them."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(compare, "read_config", lambda *_: check_config(DIGITS))
    if not extras:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    compare.demo(out=tmp_path / "demo", quiet=True)
    told = capsys.readouterr().out
    assert (tmp_path / "demo" / "cfl" / "seed-0" / "summary.json").is_file()
    for announced in ("the pictures of CFL in", "fedclade report"):
        assert (announced in told) == extras
    assert ("pip install 'fedclade[report]'" in told) != extras
