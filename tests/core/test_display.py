"""What draws things is imported when it is needed, and a prompt or a notebook is told from a script."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import fedclade
from fedclade.core.plugins import at_prompt, in_notebook
from fedclade.report import Comparison, compare
from tests.tiny import federation_of


def test_a_thing_is_drawn_by_the_report():
    tree = fedclade.ParameterTree.root_only([0, 1], torch.zeros(1))
    assert "2 clients in 1 cluster" in tree._repr_html_()


def test_what_is_of_the_report_is_found_in_the_package():
    assert fedclade.compare is compare
    assert fedclade.Comparison is Comparison
    with pytest.raises(AttributeError, match="module 'fedclade' has no attribute 'comparison'"):
        _ = fedclade.comparison


def test_a_script_is_neither_a_prompt_nor_a_notebook(monkeypatch):
    assert not at_prompt()
    assert not in_notebook()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert at_prompt()
    for shell, expected in (
        (None, False),
        (SimpleNamespace(), False),
        (SimpleNamespace(kernel=1), True),
    ):
        monkeypatch.setitem(
            sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell)
        )
        assert in_notebook() == expected


def test_what_a_notebook_lists_has_a_short_repr():
    assert (
        repr(federation_of([0]).clients[0])
        == "ClientData(0, 'c0', train=24, validation=10, test=20)"
    )
    tree = fedclade.ParameterTree.root_only([0, 1], torch.zeros(1))
    assert repr(tree.nodes[0]) == "Node(0, parent=None, clients=2, born=0)"
    assert repr(fedclade.Newcomers([], [], 3)) == "Newcomers(0, fit_nowhere=0)"
