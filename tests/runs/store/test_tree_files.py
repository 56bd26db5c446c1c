from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fedclade.core import Layout, Node, ParameterTree, RunError
from fedclade.runs.store.tree_files import read_layout, write_tree


def written(folder: Path, personal: tuple[str, ...]) -> Layout:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    layout = Layout.of(module, personal)
    tree = ParameterTree((Node(0, None, (0,), layout.flatten(module), 0),))
    write_tree(tree, folder, layout)
    return layout


@pytest.mark.parametrize("personal", [(), ("1",), ("2",)])
def test_a_layout_written_and_read_is_the_same(tmp_path, personal):
    layout = written(tmp_path / "tree", personal)
    again = read_layout(tmp_path / "tree")
    assert again == layout
    assert again.full == layout.full
    assert torch.equal(again.joined(*again.parted(torch.arange(17.0))), torch.arange(17.0))


def test_a_layout_whose_shared_part_is_not_of_the_whole_is_damaged(tmp_path):
    written(tmp_path / "tree", ("2",))
    path = tmp_path / "tree" / "tree.json"
    content = json.loads(path.read_text())
    content["layout"]["parameters"].reverse()
    path.write_text(json.dumps(content))
    with pytest.raises(
        RunError,
        match=r"layout .* is damaged: ValueError: the tensors that clients share should be",
    ):
        read_layout(tmp_path / "tree")
