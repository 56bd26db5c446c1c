"""Models as files for plain PyTorch: what is in them, what their cards say, and what is refused."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fedclade import (
    CFL,
    ConfigError,
    FineTune,
    LocalTraining,
    Oracle,
    Run,
    RunError,
    TreeError,
    export_adapter,
    export_model,
    simulate,
)
from fedclade.config import check_config
from fedclade.core import files
from fedclade.core.params import Layout
from fedclade.runs.store import staging
from tests.folders import resealed, unsealed
from tests.tiny import FEATURES, LABELS, federation_of, linear, perceptron

SETTINGS = {"local": LocalTraining(batch_size=10), "rounds": 4, "engine": "loop"}
SPLITS = CFL(eps2=1e-3, split_rounds=(2, 3))


def ran(algorithm=SPLITS, module: nn.Module | None = None, **settings) -> Run:
    return simulate(
        algorithm, module or linear(), federation_of([0, 1, 2, 3] * 2), **{**SETTINGS, **settings}
    )


@pytest.fixture(scope="module")
def run() -> Run:
    """A root, 0, that is split in round 2 into 1 and 2; and 1 in round 3 into 3: {2, 3, 6, 7} and 4: {0, 1, 4}."""
    return ran()


def card_of(path: Path) -> dict:
    return json.loads(path.with_suffix(".json").read_text())


class Tied(nn.Module):
    """Two layers with one weight, a buffer that counts, a frozen layer, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = (
            nn.Linear(FEATURES, FEATURES),
            nn.BatchNorm1d(FEATURES),
            nn.Linear(FEATURES, FEATURES, bias=False),
        )
        self.second.weight = self.first.weight
        self.last = nn.Linear(FEATURES, LABELS)
        self.fixed = nn.Linear(LABELS, LABELS).requires_grad_(False)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.fixed(self.last(self.second(self.norm(self.first(x))))) * self.scale


@pytest.mark.parametrize("make", [linear, perceptron, Tied])
def test_plain_pytorch_loads_the_model_that_the_client_was_evaluated_with(make, tmp_path):
    """Under all of the module's names, tied weights too; its accuracy is the one that the run told."""
    federation = federation_of([0, 1, 2, 3] * 2)
    folder = ran(module=make()).save(tmp_path / "run")
    run = Run.load(folder)
    path = export_model(run, tmp_path / "five.safetensors", client=5)
    model = make()
    model.load_state_dict(load_file(path))
    (told,) = (
        row["accuracy"] for row in run.client_rows if row["round"] == 4 and row["client"] == 5
    )
    x, y = federation.examples(5, "test")
    assert float((model.eval()(x).argmax(1) == y).double().mean()) == told


def test_a_level_of_the_path_or_a_node_may_be_asked_for(run, tmp_path):
    path = [node.id for node in run.tree.path(3)]
    assert len(path) == 3
    for level, node in zip((0, 1, -1), path, strict=True):
        of_client = export_model(
            run, tmp_path / f"client{level}.safetensors", client=3, level=level
        )
        of_node = export_model(run, tmp_path / f"node{node}.safetensors", node=node)
        mine, its = load_file(of_client), load_file(of_node)
        assert all(torch.equal(mine[name], its[name]) for name in mine)
        assert torch.equal(
            mine["1.weight"].flatten(), run.tree.nodes[node].params[: FEATURES * LABELS]
        )
        assert card_of(of_client)["exported_for"] == {"client": 3, "name": "c3"}
        assert card_of(of_node)["exported_for"] is None


def test_the_card_of_a_leaf(run, tmp_path):
    leaf = run.tree.nodes[3]
    assert leaf.members == (2, 3, 6, 7)
    path = export_model(run, tmp_path / "leaf.safetensors", node=leaf.id)
    card = card_of(path)
    scores = [
        row["accuracy"]
        for row in run.client_rows
        if row["round"] == 4 and row["client"] in leaf.members
    ]
    assert (card["node"], card["level"], card["leaf"], card["members"]) == (
        3,
        2,
        True,
        [2, 3, 6, 7],
    )
    assert card["path"] == [0, 1, 3]
    assert card["rounds"] == {"run": 4, "born": 3, "trained_until": 4}
    assert card["data"] == {
        "description": "tiny",
        "training_examples": 4 * 24,
        "shape": [FEATURES],
        "scaled": None,
        "outputs": LABELS,
    }
    assert card["accuracy"]["mean"] == pytest.approx(sum(scores) / 4)
    assert (card["accuracy"]["clients"], card["accuracy"]["round"]) == (4, 4)
    assert card["algorithm"]["name"] == card["config"]["algorithm"]["name"] == "cfl"
    assert card["model"] == {"name": "Sequential", "parameters": FEATURES * LABELS + LABELS}
    assert card["tensors"]["1.weight"] == {"shape": [LABELS, FEATURES], "dtype": "float32"}
    assert set(card["versions"]) >= {"python", "torch"}
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["fedclade"]) == card


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        ("unit", "pixels as (x / 255 − 0.0) / 1.0"),
        ("pixel", "each pixel standardised over the images of the source"),
    ],
)
def test_a_card_says_how_pixels_were_scaled(scaling, told, tmp_path):
    """Whoever feeds the exported model has to do the same."""
    config = check_config(
        {"rounds": 1, "data": {"clients": 2, "scaling": scaling}, "model": {"name": "mclr"}}
    )
    path = export_model(config.run(config.federation()), tmp_path / "root.safetensors", node=0)
    assert told in path.with_suffix(".md").read_text()


def test_the_accuracy_of_an_inner_node_is_that_of_the_model_it_keeps(run, tmp_path):
    """The root was split in round 2, so it keeps, and the clients were served with, the model after round 1."""
    card = card_of(export_model(run, tmp_path / "root.safetensors", node=0))
    scores = [row["accuracy"] for row in run.client_rows if row["round"] == 1]
    assert card["rounds"] == {"run": 4, "born": 0, "trained_until": 1}
    assert card["accuracy"]["mean"] == pytest.approx(sum(scores) / 8)
    assert (card["accuracy"]["clients"], card["accuracy"]["round"], card["leaf"]) == (8, 1, False)


def test_a_node_that_nobody_was_served_with_has_no_accuracy(tmp_path):
    """The global model of fine-tuning, which was trained to the end all the same; clients have their copies."""
    path = export_model(ran(FineTune()), tmp_path / "root.safetensors", node=0)
    assert card_of(path)["accuracy"] is None
    assert card_of(path)["rounds"]["trained_until"] == 4
    assert "| accuracy | no client was evaluated with it |" in path.with_suffix(".md").read_text()


def test_of_the_root_of_a_star_no_round_is_told(tmp_path):
    """IFCA's is an initial model, FedGroup's the mean of the groups' models."""
    path = export_model(
        ran(Oracle({client: client % 2 for client in range(8)})),
        tmp_path / "root.safetensors",
        node=0,
    )
    assert card_of(path)["rounds"] == {"run": 4, "born": 0, "trained_until": None}
    assert "| rounds | root of a star, in a run of 4 |" in path.with_suffix(".md").read_text()


def test_the_page_tells_the_same_and_its_python_loads_the_model(run, tmp_path, monkeypatch):
    path = export_model(run, tmp_path / "seven.safetensors", client=7)
    page, card = path.with_suffix(".md").read_text(), card_of(path)
    assert page.startswith(f"# Node {card['node']} of a cfl run\n")
    assert "| exported for | client 7 (c7) |" in page
    assert "| members | 4 clients: 2, 3, 6, 7 |" in page
    assert "| rounds | as after round 4 of 4; there since round 4 |" in page
    assert f"| accuracy | {100 * card['accuracy']['mean']:.1f} % (" in page
    (lines,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(lines.splitlines()) == 2
    monkeypatch.chdir(tmp_path)
    model = linear(seed=1)
    exec(compile(lines, "card", "exec"), {"model": model})
    assert torch.equal(model[1].weight.flatten(), run.tree.model_for(7)[: FEATURES * LABELS])


def test_a_page_tells_how_pixels_are_scaled(run, tmp_path):
    inputs = {"shape": [1, 2, 2], "scaled": [0.25, 0.5]}
    run = replace(run, summary={**run.summary, "inputs": inputs})
    page = export_model(run, tmp_path / "m.safetensors", node=0).with_suffix(".md").read_text()
    assert "| inputs | shape [1, 2, 2], pixels as (x / 255 − 0.25) / 0.5 |" in page


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ({}, ConfigError, "a model is chosen by either --client or --node, got neither"),
        (
            {"client": 1, "node": 2},
            ConfigError,
            "a model is chosen by either --client or --node, got client 1 and node 2",
        ),
        (
            {"node": 2, "level": 1},
            ConfigError,
            "--level 1 can only be used with --client; leave it out, since node 2 has only one model",
        ),
        ({"node": 7}, TreeError, "node 7 is not in the parameter tree, which has the nodes 0 to 4"),
        (
            {"node": -1},
            TreeError,
            "node -1 is not in the parameter tree, which has the nodes 0 to 4",
        ),
        (
            {"client": 8},
            TreeError,
            "client 8 is not in the parameter tree, which has 8 clients from 0 to 7",
        ),
        (
            {"client": 1, "level": 3},
            TreeError,
            "level 3 is not on the path of client 1, which has 3 levels",
        ),
    ],
)
def test_what_the_tree_has_not_is_refused(run, tmp_path, asked, error, told):
    with pytest.raises(error, match=re.escape(told)):
        export_model(run, tmp_path / "model.safetensors", **asked)
    assert list(tmp_path.iterdir()) == []


def test_another_suffix_is_refused(run, tmp_path):
    told = f"the file to export to should end in .safetensors, got '{tmp_path / 'model.pt'}'"
    with pytest.raises(ConfigError, match=re.escape(told)):
        export_model(run, str(tmp_path / "model.pt"), node=0)


@pytest.mark.parametrize("suffix", [".safetensors", ".json", ".md"])
def test_a_file_that_exists_is_left_as_it_is(run, tmp_path, suffix):
    there = tmp_path / f"model{suffix}"
    there.write_text("mine")
    with pytest.raises(
        RunError, match=re.escape(f"{there} exists already; name another file with --out")
    ):
        export_model(run, tmp_path / "model.safetensors", node=0)
    assert there.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: no space left")]
)
def test_a_disk_that_fills_up_leaves_nothing_half_written(run, tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(
        RunError, match=re.escape(f"cannot write {tmp_path / 'm.safetensors'}: {error}")
    ):
        export_model(run, tmp_path / "m.safetensors", node=0)
    assert list(tmp_path.iterdir()) == []


def export_and_be_killed(run: Run, path: Path, moment: str) -> None:
    """Export in a process of its own that ends without any cleaning up, before some moment."""
    child = os.fork()
    if child == 0:
        try:
            if moment == "nothing is on the disk":
                staging.bring_to_disk = lambda _: os._exit(0)
            else:
                moves = iter(
                    (
                        "the card is moved",
                        "the page is moved",
                        "the model is moved",
                        "it has cleaned up",
                    )
                )
                move = staging.take_place

                def moved(source: Path, target: Path) -> None:
                    if next(moves) == moment:
                        os._exit(0)
                    move(source, target)
                    if moment == "it has cleaned up" and target == path:
                        os._exit(0)

                staging.take_place = moved
            export_model(run, path, node=0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


MOMENTS = ("nothing is on the disk", "the card is moved", "the page is moved", "the model is moved")


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_killed_export_left_does_not_stop_the_next(run, tmp_path, moment):
    path = tmp_path / "killed" / "m.safetensors"
    export_and_be_killed(run, path, moment)
    assert not path.exists()
    export_model(run, path, node=0)
    export_model(run, tmp_path / "whole" / "m.safetensors", node=0)
    names = ["m.json", "m.md", "m.safetensors"]
    for folder in ("killed", "whole"):
        assert sorted(each.name for each in (tmp_path / folder).iterdir()) == names
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_export_that_was_killed_when_all_was_done_is_kept(run, tmp_path):
    export_and_be_killed(run, tmp_path / "m.safetensors", "it has cleaned up")
    before = (tmp_path / "m.safetensors").read_bytes()
    with pytest.raises(RunError, match=re.escape(f"{tmp_path / 'm.safetensors'} exists already")):
        export_model(run, tmp_path / "m.safetensors", node=1)
    assert (tmp_path / "m.safetensors").read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.json", "m.md", "m.safetensors"]


def test_a_user_s_own_file_is_left_as_it_is_beside_what_a_killed_export_left(run, tmp_path):
    export_and_be_killed(run, tmp_path / "m.safetensors", "nothing is on the disk")
    (tmp_path / "m.md").write_text("mine")
    with pytest.raises(RunError, match=re.escape(f"{tmp_path / 'm.md'} exists already")):
        export_model(run, tmp_path / "m.safetensors", node=0)
    assert [each.name for each in tmp_path.iterdir()] == ["m.md"]
    assert (tmp_path / "m.md").read_text() == "mine"


def test_two_exports_of_a_model_are_the_same_bytes(run, tmp_path):
    for name in ("first", "second", "third"):
        export_model(run, tmp_path / name / "m.safetensors", client=5)
    for suffix in (".safetensors", ".json", ".md"):
        found = {
            (tmp_path / name / f"m{suffix}").read_bytes() for name in ("first", "second", "third")
        }
        assert len(found) == 1


def test_a_header_in_order_says_what_was_given_whatever_its_characters(tmp_path):
    """Whether safetensors draws another order is chance: of 20 files, all but surely some would differ."""
    odd = "".join(map(chr, range(1, 0x180))) + '\u2028 \ud7ff \ue000 \U0001f600 \\" /'
    header = {"format": "pt", "fedclade": odd, "é": odd[::-1]}
    written = set[bytes]()
    for number in range(20):
        path = tmp_path / f"{number}.safetensors"
        files.write_tensors(
            path, {"ä": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)}, header
        )
        written.add(path.read_bytes())
    assert len(written) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as tensors:
        assert tensors.metadata() == header
        assert tensors.get_tensor("ä").tolist() == [1, 1, 1]


def test_a_file_below_a_file_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError, match=re.escape(f"cannot write {tmp_path / 'file' / 'm.safetensors'}: ")
    ):
        export_model(run, tmp_path / "file" / "m.safetensors", node=0)


def test_a_folder_of_before_layouts_were_kept_reads_but_cannot_be_exported_from(run, tmp_path):
    folder = run.save(tmp_path / "run")
    file = folder / "tree" / "tree.json"
    content = json.loads(file.read_text())
    assert content.pop("layout")["dtype"] == "float32"
    file.write_text(json.dumps(content))
    again = Run.load(unsealed(folder))
    assert again.layout is None
    assert torch.equal(again.tree.model_for(3), run.tree.model_for(3))
    with pytest.raises(
        RunError, match=r"did not record the layout of the model.* run its config\.toml again"
    ):
        export_model(again, tmp_path / "model.safetensors", client=3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda layout: layout.pop("tied"),
        lambda layout: layout.update(dtype="softmax"),
        lambda layout: layout.update(dtype="float33"),
        lambda layout: layout["parameters"].insert(0, 3),
        lambda layout: layout["parameters"][0].pop("shape"),
    ],
)
def test_a_damaged_layout_is_one_clear_error(run, tmp_path, damage):
    folder = run.save(tmp_path / "run")
    file = folder / "tree" / "tree.json"
    content = json.loads(file.read_text())
    damage(content["layout"])
    file.write_text(json.dumps(content))
    with pytest.raises(RunError, match=rf"the layout in {re.escape(str(file))} is damaged: "):
        Run.load(resealed(folder))


def test_a_layout_of_another_model_is_refused(run, tmp_path):
    other = replace(run, layout=Layout.of(perceptron()))
    with pytest.raises(
        RunError,
        match="the run is damaged: its layout has 92 entries, but the model of node 3 has 28",
    ):
        export_model(other, tmp_path / "model.safetensors", node=3)


@pytest.mark.parametrize("algorithm", ["fedper", "ditto", "local", "finetune"])
def test_a_client_gets_the_whole_model_that_it_is_served_with(algorithm, tmp_path):
    federation = federation_of([0, 1, 2, 3] * 2)
    run = Run.load(ran(algorithm, perceptron()).save(tmp_path / "run"))
    for client in (1, 2):
        module = perceptron(seed=9)
        out = export_model(run, tmp_path / f"{client}.safetensors", client=client)
        module.load_state_dict(load_file(out))
        x, y = federation.examples(client, "test")
        (row,) = [row for row in run.client_rows if (row["round"], row["client"]) == (4, client)]
        assert float((module(x).argmax(1) == y).float().mean()) == pytest.approx(row["accuracy"])
        card = card_of(out)
        assert card["exported_for"].get("own", False) is (algorithm != "fedper")
        assert card["accuracy"]["clients"] == 1
        assert card["accuracy"]["mean"] == pytest.approx(row["accuracy"])
    assert not torch.equal(
        *(load_file(tmp_path / f"{client}.safetensors")["3.weight"] for client in (1, 2))
    )


def test_a_level_of_the_path_is_the_tree_s_and_a_node_has_what_is_shared(tmp_path):
    ditto, fedper = ran("ditto", perceptron()), ran("fedper", perceptron())
    root = load_file(export_model(ditto, tmp_path / "root.safetensors", client=1, level=0))
    assert torch.equal(
        root["1.weight"], ditto.layout.unflatten(ditto.tree.nodes[0].params)["1.weight"]
    )
    assert load_file(export_model(fedper, tmp_path / "node.safetensors", node=0)).keys() == {
        "1.weight",
        "1.bias",
    }


def test_what_only_a_client_of_a_network_has_is_not_exported(tmp_path):
    run = replace(ran("fedper", perceptron()), kept={})
    with pytest.raises(
        RunError,
        match="no personal parameters of client 1: over a network, only the client stores them",
    ):
        export_model(run, tmp_path / "model.safetensors", client=1)
    local = ran("local", perceptron())
    local = replace(local, kept={}, config={**local.config, "network": {}})
    for export in (export_model, partial(export_adapter, alpha=1.0)):
        with pytest.raises(
            RunError,
            match="no model of client 1: over a network, only the client stores its own model",
        ):
            export(local, tmp_path / "model.safetensors", client=1)


@pytest.mark.parametrize("shape", [(3,), (36, 1)])
def test_personal_parameters_of_another_shape_are_damaged(shape, tmp_path):
    run = ran("fedper", perceptron())
    folder = run.save(tmp_path / "run")
    save_file({"1/personal": torch.zeros(shape)}, folder / "personal.safetensors")
    with pytest.raises(
        RunError, match=r"1/personal in personal.safetensors should be .* of the shape \[36\], got"
    ):
        Run.load(resealed(folder))
