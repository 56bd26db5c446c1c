"""Models as ONNX files: onnxruntime computes from raw inputs what the run predicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from torch import Tensor, nn

import fedclade
from fedclade import ConfigError, MissingExtraError, ModelError, Run, RunError, export_onnx
from fedclade.algorithms import build_algorithm
from tests.runs.test_prediction import FRAME, federation_for, run_on
from tests.tiny import FEATURES, LABELS, federation_of, linear, perceptron


def outputs_of(path: Path, inputs: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(["outputs"], {"inputs": inputs})
    return outputs


@pytest.mark.parametrize("target", ["grade", "cost"])
def test_it_scales_inputs_and_predicts_in_the_unit_of_the_targets(target: str, tmp_path: Path):
    federation = federation_for(target)
    run = run_on(federation, folder=tmp_path / "run")
    path = export_onnx(Run.load(tmp_path / "run"), tmp_path / "m.onnx", client="hospital-1")
    inputs = run.summary["inputs"]
    mean, std = np.array(inputs["mean"]), np.array(inputs["std"])
    raw = federation.pool.x.double().numpy() * std + mean
    expected = run.predict(FRAME, client="hospital-1").outputs.numpy()
    for rows in (1, 7, len(raw)):  # any number of rows
        found = outputs_of(path, raw[:rows].astype(np.float32))
        np.testing.assert_allclose(found, expected[:rows], rtol=2e-4, atol=2e-4)
    model = onnx.load(path)
    (card,) = [json.loads(each.value) for each in model.metadata_props if each.key == "fedclade"]
    assert card["exported_for"]["name"] == "hospital-1"
    assert card["data"]["columns"] == list(federation.pool.columns.inputs)


def test_images_are_given_as_they_are(tmp_path: Path):
    federation = fedclade.load_federation("digits", clients=2, samples_per_client=40)
    run = run_on(federation, model="mclr")
    path = export_onnx(run, tmp_path / "m.onnx", node=0)
    images = federation.pool.x[:5].numpy()
    expected = run.predict(images, node=0).outputs.numpy()
    np.testing.assert_allclose(outputs_of(path, images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["fedem", "fedper", "ditto"])
def test_mixtures_personal_parts_and_own_models(name: str, tmp_path: Path):
    federation = federation_of([0, 1, 0, 1])
    options = {"clusters": 2} if name == "fedem" else {}
    run = run_on(federation, build_algorithm(name, options), model=perceptron)
    path = export_onnx(run, tmp_path / "m.onnx", client=1, model=perceptron)
    rows = federation.pool.x[:6].numpy()
    expected = run.predict(rows, client=1, model=perceptron).outputs.numpy()
    np.testing.assert_allclose(outputs_of(path, rows), expected, rtol=1e-4, atol=1e-5)


class Undecided(nn.Linear):
    """A model whose steps depend on the values of its inputs, which ONNX cannot express."""

    def forward(self, inputs: Tensor) -> Tensor:
        if float(inputs.sum()) > 1:
            return super().forward(inputs)
        return super().forward(-inputs)


def test_a_model_that_cannot_be_exported_is_one_clear_error(tmp_path: Path):
    module = Undecided(FEATURES, LABELS)
    run = run_on(federation_of([0, 1]), "fedavg", model=module, rounds=1)
    with pytest.raises(ModelError, match=r"(?s)cannot be exported to ONNX: .* in .safetensors"):
        export_onnx(run, tmp_path / "m.onnx", client=1, model=module)
    assert list(tmp_path.iterdir()) == []


def test_wrong_files_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_on(federation_of([0, 1]), "fedavg", model=linear, rounds=1)
    with pytest.raises(ConfigError, match=r"the file to export to should end in .onnx, got 'm.pt'"):
        export_onnx(run, "m.pt", client=1)
    (tmp_path / "m.onnx").touch()
    with pytest.raises(RunError, match="exists already; name another file with --out"):
        export_onnx(run, tmp_path / "m.onnx", client=1, model=linear)
    missing: Any = None
    monkeypatch.setitem(sys.modules, "onnxscript", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'fedclade\[onnx\]'"):
        export_onnx(run, tmp_path / "n.onnx", client=1, model=linear)


class Failing(nn.Linear):
    """A model that accepts no inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        raise RuntimeError("no")


def test_no_inputs_suit_a_model_that_fails(tmp_path: Path):
    module = nn.Linear(FEATURES, LABELS)
    run = run_on(federation_of([0, 1]), "fedavg", model=module, rounds=1)
    with pytest.raises(ModelError, match=r"cannot be applied to inputs of shape \[6\]: .*: no"):
        export_onnx(run, tmp_path / "n.onnx", client=1, model=Failing(FEATURES, LABELS))
