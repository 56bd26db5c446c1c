from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import nn

from fedclade import ConfigError, ModelError
from fedclade.models import MODELS, build_model
from fedclade.models.build import TextClassifier, VectorClassifier, WordLSTM

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "input_shape", "outputs", "arguments", "count"),
    [
        ("mclr", MNIST, 10, {}, 784 * 10 + 10),  # 7,850 (FedGroup, Table II)
        ("mlp", MNIST, 10, {}, 784 * 128 + 128 + 128 * 10 + 10),  # 101,770
        ("mlp", MNIST, 26, {"hidden": 512}, 784 * 512 + 512 + 512 * 26 + 26),  # 415,258
        (
            "cnn",
            MNIST,
            10,
            {},
            32 * 26 + 64 * (32 * 25 + 1) + 1024 * 512 + 512 + 512 * 10 + 10,
        ),  # 582,026
        (
            "cifar_cnn",
            CIFAR,
            10,
            {},
            32 * 28 + 64 * 289 + 64 * 577 + 1024 * 256 + 256 + 256 * 10 + 10,
        ),  # 321,290
        (
            "cifar_cnn",
            CIFAR,
            10,
            {"width": 8},
            8 * 28 + 16 * 73 + 16 * 145 + 256 * 64 + 64 + 64 * 10 + 10,
        ),
    ],
)
def test_number_of_parameters(name, input_shape, outputs, arguments, count):
    module = build_model(name, input_shape=input_shape, outputs=outputs, arguments=arguments)
    assert parameters(module) == count
    assert module(torch.zeros(2, *input_shape)).shape == (2, outputs)


def test_the_counts_that_the_papers_give():
    """FedGroup, Table II; FL+HC, section IV; and what the docstring of cifar_cnn says."""
    counts = {
        name: parameters(build_model(name, input_shape=shape, outputs=10))
        for name, shape in [("mclr", MNIST), ("mlp", MNIST), ("cnn", MNIST), ("cifar_cnn", CIFAR)]
    }
    assert counts == {"mclr": 7_850, "mlp": 101_770, "cnn": 582_026, "cifar_cnn": 321_290}
    assert (
        parameters(build_model("mlp", input_shape=MNIST, outputs=26, arguments={"hidden": 512}))
        == 415_258
    )
    assert parameters(build_model("mclr", input_shape=MNIST, outputs=26)) == 20_410
    assert parameters(build_model("mclr", input_shape=(60,), outputs=10)) == 610
    assert parameters(build_model("vector_lstm", input_shape=(25, 300), outputs=2)) == 243_861


def lstm(task: str, outputs: int, **arguments) -> nn.Module:
    return build_model(
        "lstm",
        input_shape=(6,),
        outputs=outputs,
        task=task,
        vocabulary_size=50,
        arguments=arguments or None,
    )


def test_vector_lstm_is_torchs_lstm_with_one_vector_of_biases():
    """Forget gates begin open, and the first label has logit 0."""
    module = build_model(
        "vector_lstm", input_shape=(5, 7), outputs=3, arguments={"hidden": 4, "dense": 6}
    )
    assert isinstance(module, VectorClassifier)
    layers = []
    for ours, width in ((module.first, 7), (module.second, 4)):
        theirs = nn.LSTM(width, 4, batch_first=True)
        weight = ours.weight_ih_l0.detach()
        assert weight[:, -1].tolist() == [0] * 4 + [1] * 4 + [0] * 8
        parts = {
            "weight_ih_l0": weight[:, :-1],
            "weight_hh_l0": ours.weight_hh_l0.detach(),
            "bias_ih_l0": weight[:, -1],
        }
        theirs.load_state_dict({**parts, "bias_hh_l0": torch.zeros(16)})
        layers.append(theirs)
    x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    states = layers[1](layers[0](x)[0])[0]
    logits = module(x)
    torch.testing.assert_close(logits[:, 1:], module.output(module.dense(states[:, -1])))
    assert logits[:, 0].tolist() == [0, 0]


def test_vector_lstm_needs_vectors():
    with pytest.raises(
        ModelError,
        match=r"'vector_lstm' takes sequences of word vectors, .*, got input shape \(25,\); load word",
    ):
        build_model("vector_lstm", input_shape=(25,), outputs=2, vocabulary_size=9)


def test_lstm_predicts_a_word_at_every_place():
    module = lstm("language", 50)
    assert isinstance(module, WordLSTM)
    assert module(torch.ones(2, 6, dtype=torch.int64)).shape == (2, 6, 50)
    gates = 4 * (64 * 128 + 128 * 128 + 2 * 128) + 4 * (128 * 128 + 128 * 128 + 2 * 128)
    assert parameters(module) == 50 * 64 + gates + 128 * 50 + 50


def test_lstm_does_not_look_ahead():
    module = lstm("language", 50).eval()
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 40
    assert torch.equal(module(tokens)[0, :4], module(changed)[0, :4])
    assert not torch.equal(module(tokens)[0, 4:], module(changed)[0, 4:])


def test_lstm_classifies_a_text_by_the_state_behind_its_last_word():
    """Padding behind the last word changes nothing."""
    module = lstm("classification", 2, hidden=16, dense=5).eval()
    assert isinstance(module, TextClassifier)
    short = torch.tensor([[7, 8, 9]])
    padded = torch.tensor([[7, 8, 9, 0, 0, 0]])
    assert module(padded).shape == (1, 2)
    torch.testing.assert_close(module(padded), module(short))
    assert not torch.equal(module(padded), module(torch.tensor([[7, 8, 9, 9, 0, 0]])))
    assert not torch.equal(module(padded), module(torch.tensor([[7, 8, 3, 0, 0, 0]])))


def test_lstm_takes_a_text_without_words():
    assert lstm("classification", 2)(torch.zeros(3, 6, dtype=torch.int64)).isfinite().all()


def test_lstm_needs_text():
    with pytest.raises(
        ModelError,
        match="'lstm' takes tokens, but the data is not text; use 'mclr', 'mlp' or 'cnn'",
    ):
        build_model("lstm", input_shape=MNIST, outputs=10)


@pytest.mark.parametrize(
    ("name", "shape", "smallest"),
    [("cnn", (1, 15, 28), 16), ("cifar_cnn", (3, 32, 7), 8), ("cnn", (64,), 16)],
)
def test_convolutions_need_images_of_some_size(name, shape, smallest):
    text = (
        f"a convolutional model takes images [channels, height, width] of at least {smallest} pixels a side, "
        f"got input shape {shape}; use 'mlp' or 'mclr'"
    )
    with pytest.raises(ModelError, match=re.escape(text)):
        build_model(name, input_shape=shape, outputs=10)


@pytest.mark.parametrize(("name", "smallest"), [("cnn", 16), ("cifar_cnn", 8)])
def test_convolutions_take_images_of_the_smallest_size(name, smallest):
    module = build_model(name, input_shape=(1, smallest, smallest), outputs=3)
    assert module(torch.zeros(2, 1, smallest, smallest)).shape == (2, 3)


def test_initial_parameters_depend_on_the_seed_alone():
    def build(seed):
        return build_model("mlp", input_shape=(4,), outputs=2, seed=seed)[1].weight

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(build(0), first)
    assert not torch.equal(build(1), first)


def test_an_unknown_model_suggests_the_nearest():
    known = "cifar_cnn, cnn, lenet, lstm, mclr, mlp, vector_lstm"
    text = f"unknown model 'mpl'; did you mean 'mlp'? (known: {known}); for an object of your own, write"
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_model("mpl", input_shape=(4,), outputs=2)


def test_an_unknown_argument_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"'hiden'; did you mean 'hidden'\?"):
        build_model("mlp", input_shape=(4,), outputs=2, arguments={"hiden": 3})


def test_what_the_data_gives_is_no_argument():
    with pytest.raises(ConfigError, match="'outputs'"):
        build_model("mlp", input_shape=(4,), outputs=2, arguments={"outputs": 3})


def test_a_factory_that_fails_names_model_and_arguments():
    text = re.escape(
        "building model 'torch.nn:Linear' with {'in_features': -1, 'out_features': 2} failed: "
    )
    with pytest.raises(ModelError, match=text):
        build_model(
            "torch.nn:Linear",
            input_shape=(4,),
            outputs=2,
            arguments={"in_features": -1, "out_features": 2},
        )


def test_a_size_below_one_is_named():
    with pytest.raises(ConfigError, match=r"model\.hidden should be at least 1, got -1"):
        build_model("mlp", input_shape=(4,), outputs=2, arguments={"hidden": -1})


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_line_for_people(name):
    assert MODELS[name].summary
    assert "\n" not in MODELS[name].summary


USERS_OWN = """
from torch import nn

answer = 42

def tiny(input_shape, outputs, scale=1):
    return nn.Linear(input_shape[0], outputs * scale)

def anything(outputs, **rest):
    return nn.Linear(rest["width"], outputs)

def wrong():
    return "a string"
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(USERS_OWN)
    (tmp_path / "users_broken.py").write_text("raise RuntimeError('no such thing')")
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_models"
    sys.modules.pop("users_models", None)


def test_a_users_own_factory_gets_what_it_has_parameters_for(users_module):
    module = build_model(
        f"{users_module}:tiny", input_shape=(4,), outputs=2, arguments={"scale": 3}
    )
    assert module.weight.shape == (2 * 3, 4)


def test_a_users_own_factory_may_take_anything(users_module):
    module = build_model(
        f"{users_module}:anything", input_shape=(4,), outputs=2, arguments={"width": 9}
    )
    assert module.weight.shape == (2, 9)


def test_a_factory_that_returns_no_module_is_refused(users_module):
    with pytest.raises(
        ModelError, match=r"'users_models:wrong' should return a torch\.nn\.Module, got str"
    ):
        build_model(f"{users_module}:wrong", input_shape=(4,), outputs=2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("users_models:missing", "module 'users_models' has no attribute 'missing'"),
        (
            "no_such_module_at_all:f",
            "No module named 'no_such_module_at_all'; run from the module's folder, or set PYTHONPATH",
        ),
        ("users_broken:f", "RuntimeError: no such thing"),
        (":f", "ValueError: Empty module name"),
    ],
)
def test_a_factory_that_cannot_be_imported_says_why(users_module, name, reason):
    text = f"model {name!r} cannot be imported: {reason}"
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_model(name, input_shape=(4,), outputs=2)


def test_a_name_that_is_no_function_is_refused(users_module):
    text = "model 'users_models:answer' should name a function that returns a module, got 42"
    with pytest.raises(ConfigError, match=text):
        build_model(f"{users_module}:answer", input_shape=(4,), outputs=2)


def test_a_model_of_a_billion_outputs_is_refused_before_it_takes_memory():
    told = (
        "model 'mlp' would have 1,290,000,512 parameters for inputs of shape [3] and 10,000,000 outputs, but "
        "fedclade's models may have at most 1,073,741,824"
    )
    with pytest.raises(ModelError) as caught:
        build_model("mlp", input_shape=(3,), outputs=10**7)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"input_shape": (0,)}, "input_shape should be sizes of at least 1, got (0,)"),
        ({"outputs": 0}, "outputs should be at least 1, got 0"),
        ({"vocabulary_size": -1}, "vocabulary_size should be at least 0, got -1"),
        ({"seed": -1}, "seed should be at least 0, got -1"),
        ({"task": "x"}, "unknown task: 'x'"),
        ({"outputs": "2"}, "outputs of build_model should be a whole number, got '2'"),
    ],
)
def test_data_that_no_model_is_for_is_refused(changes, told):
    with pytest.raises(ConfigError) as caught:
        build_model("mlp", **{"input_shape": (3,), "outputs": 2, **changes})
    assert told in str(caught.value)
