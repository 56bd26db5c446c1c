"""Export of a run's model as an ONNX file, which other programs and languages can run.

The file contains the whole way from a client's inputs to predictions in the unit of its targets:
scaling, model (or mixture of models), and conversion to the unit.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.core import (
    ConfigError,
    ModelError,
    RunError,
    appear,
    checked,
    import_extra,
    make_folder,
)
from fedclade.data import InputEncoding
from fedclade.runs.models import Maker
from fedclade.runs.noted import NotedRun
from fedclade.runs.prediction import input_encoding, load_state
from fedclade.runs.store import Run
from fedclade.runs.store.export import SelectedModel, model_card, select_model
from fedclade.tasks import ModelMixture, TargetScale

SUFFIX = ".onnx"

ROWS = 2
"""Number of rows of the example on which the model is traced; the file allows any number."""


class DeployedModel(nn.Module):
    """Model of a run with the scaling of its inputs and the unit of its targets.

    Parameters
    ----------
    model
        The model, or a mixture of models.
    by
        Encoding of the run's inputs.
    scale
        Scale by which targets were standardized; None if they were not.
    """

    shift: Tensor
    factor: Tensor

    def __init__(self, model: nn.Module, by: InputEncoding, scale: TargetScale | None) -> None:
        super().__init__()
        self.model = model
        self.scale = scale
        self.is_image = by.inputs.get("scaled") is not None
        if self.is_image:
            mean, std = by.inputs["scaled"]
            mean, std = 255 * mean, 255 * std
        else:
            mean, std = by.inputs.get("mean", 0.0), by.inputs.get("std", 1.0)
        self.register_buffer("shift", torch.tensor(mean))
        self.register_buffer("factor", torch.tensor(std))
        self.scales = self.is_image or "mean" in by.inputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Return predictions ``[N, ...]`` for inputs ``[N, ...]`` before scaling."""
        if self.scales:
            inputs = (inputs.to(self.shift.dtype) - self.shift) / self.factor
        outputs = self.model(inputs)
        if self.scale is None:
            return outputs
        return self.scale.restore(outputs)


@checked()
def export_onnx(
    run: Run,
    out: str | Path,
    *,
    client: int | str | None = None,
    node: int | None = None,
    level: int | None = None,
    model: nn.Module | str | Maker | None = None,
) -> Path:
    """Write one model of a run as an ONNX file, with its model card in the file's metadata.

    The input ``inputs`` of the file takes encoded rows before scaling: the columns that the card
    lists, with 0 and 1 for categories; images of type uint8; or tokens. The output ``outputs`` has
    logits of labels, or numbers in the unit of the targets.

    Parameters
    ----------
    run, client, node, level
        See :func:`fedclade.export_model`.
    out
        Path of the new file, which ends in ``.onnx``.
    model
        Model of the run, if its config cannot name it.

    Raises
    ------
    ConfigError
        If the file's name has another ending, not exactly one of client and node is given, or the
        model must be passed.
    MissingExtraError
        If ``onnx`` or ``onnxscript`` is not installed.
    ModelError
        If the model cannot be exported, for example because its steps depend on the values of the
        inputs.
    RunError
        If the file exists already or cannot be written, or the model cannot be released; see
        :func:`fedclade.export_model`.
    """
    target = Path(out)
    if target.suffix != SUFFIX:
        raise ConfigError(f"the file to export to should end in {SUFFIX}, got {str(out)!r}")
    if target.exists():
        raise RunError(f"{target} exists already; name another file with --out, or remove it")
    purpose = "exporting to ONNX"
    onnx: Any = import_extra("onnx", "onnx", "onnx", purpose)
    import_extra("onnxscript", "onnxscript", "onnx", purpose)
    selected = select_model(run, client=client, node=node, level=level)
    by = input_encoding(run)
    module = NotedRun(run, "fedclade.export_onnx").module(model)
    scale = TargetScale.of_inputs(run.summary["inputs"])
    deployed = DeployedModel(_load(selected, module), by, scale).eval()
    example = _make_example(deployed, by)
    proto = _traced(deployed, example)
    card = model_card(
        run,
        selected.node,
        selected.layout,
        selected.client,
        own=selected.is_own,
        mixture=selected.mixture,
    )
    entry = proto.metadata_props.add()
    entry.key = "fedclade"
    entry.value = json.dumps(card)
    try:
        make_folder(target.parent)
        appear(target, lambda beside: onnx.save(proto, str(beside)))
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}") from error
    return target


def _load(selected: SelectedModel, module: nn.Module) -> nn.Module:
    """Return a module with the selected model, or a mixture of modules."""
    states = selected.states
    if selected.mixture is None:
        load_state(module, states[0])
        return module
    mixture = ModelMixture(module, len(states), selected.mixture.task)
    for each, state in zip(mixture.models, states, strict=True):
        load_state(each, state)
    mixture.weights.copy_(selected.mixture.weights)
    return mixture


def _make_example(deployed: DeployedModel, by: InputEncoding) -> Tensor:
    """Return an example of inputs ``[2, ...]`` of the type that the model takes.

    Raises
    ------
    ModelError
        If the model accepts neither numbers nor tokens.
    """
    if deployed.is_image:
        return torch.zeros(ROWS, *by.shape, dtype=torch.uint8)
    is_text = by.schema is not None and bool(by.schema.words)
    types = (torch.int64,) if is_text else (torch.float32, torch.int64)
    reason = ""
    for dtype in types:
        example = torch.zeros(ROWS, *by.shape, dtype=dtype)
        try:
            with torch.no_grad():
                copy.deepcopy(deployed)(example)
        except Exception as error:  # a user's module may raise anything
            reason = reason or f"{type(error).__name__}: {error}"
        else:
            return example
    raise ModelError(f"the model cannot be applied to inputs of shape {list(by.shape)}: {reason}")


def _traced(deployed: nn.Module, example: Tensor) -> Any:
    """Return the model as an ONNX model, for any number of rows.

    Raises
    ------
    ModelError
        If the model cannot be exported.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the exporter logs what it does
    try:
        program = torch.onnx.export(
            deployed,
            (example,),
            dynamo=True,
            input_names=["inputs"],
            output_names=["outputs"],
            dynamic_shapes={"inputs": {0: torch.export.Dim("rows")}},
            verbose=False,
        )
        assert program is not None
        return program.model_proto
    except Exception as error:  # the exporter raises many kinds of errors
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the model cannot be exported to ONNX: {type(error).__name__}: {first_line}; export "
            "it as a state dict, with a file that ends in .safetensors"
        ) from error
    finally:
        logging.disable(before)
