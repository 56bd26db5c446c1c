from pathlib import Path

import pytest

from fedclade.config import Batch, read_config
from fedclade.config.scenario import is_scenario, known_scales, read_scenario, read_scenarios
from fedclade.core.errors import ConfigError

SCENARIO = """
rounds = 9
[data]
clients = 8
[algorithms]
fedavg = {}
prox = { name = "fedgroup", mu = 0.1 }
[scales.smoke]
seeds = 2
data.clients = 4
algorithms.prox.groups = 2
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(SCENARIO)
    return file


def test_a_scenario_is_one_config_for_each_algorithm(scenario):
    read = read_scenario(scenario)
    assert (read.name, read.seeds, list(read.configs)) == ("mine", 1, ["fedavg", "prox"])
    fedavg, prox = read.configs.values()
    assert (fedavg.algorithm["name"], prox.algorithm["name"], prox.algorithm["mu"]) == (
        "fedavg",
        "fedgroup",
        0.1,
    )
    assert (fedavg.data, fedavg.top) == (prox.data, prox.top)


def test_a_scale_changes_single_keys_and_overrides_win_over_it(scenario):
    prox = read_scenario(scenario, ["rounds=3", "data.clients=6"], "smoke").configs["prox"]
    assert (prox.top.rounds, prox.data["clients"]) == (3, 6)
    assert (prox.algorithm["groups"], prox.algorithm["mu"]) == (2, 0.1)
    assert read_scenario(scenario, scale="smoke").seeds == 2
    assert read_scenario(scenario, scale="smoke").configs["prox"].data["clients"] == 4


def test_a_scenario_is_told_from_a_config(scenario, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("rounds = 1")
    assert (is_scenario(scenario), is_scenario(config)) == (True, False)
    assert known_scales(scenario) == ("smoke",)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("rounds = 9", "seeds = 0", "seeds should be a whole number of at least 1, got 0"),
        (
            "clients = 8",
            "clients = 8\n[algorithm]\neps2 = 1.0",
            "a scenario should have no section [algorithm]",
        ),
        ("mu = 0.1", "mu = -1.0", "algorithms.prox.mu should be at least 0, or left out, got -1.0"),
        ("mu = 0.1", "nu = 0.1", "unknown key of [algorithms.prox]: 'nu'"),
        (
            "fedavg = {}",
            "fedagv = {}",
            "[algorithms.fedagv] unknown algorithm 'fedagv'; did you mean 'fedavg'?",
        ),
        ("fedavg = {}", "fedavg = 3", "fedavg should be a table, got 3"),
        ("rounds = 9", "round = 9", "unknown key of the config: 'round'; did you mean 'rounds'?"),
    ],
)
def test_problems_are_said_once_and_name_the_algorithm(scenario, old, new, told):
    scenario.write_text(SCENARIO.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_scenario(scenario)
    assert str(caught.value).count(told) == 1
    assert str(caught.value).startswith(f"{scenario}: ")


def test_a_scenario_needs_an_algorithm_and_knows_its_scales(scenario):
    with pytest.raises(ConfigError, match="unknown scale 'smok'; did you mean 'smoke'"):
        read_scenario(scenario, scale="smok")
    scenario.write_text("[algorithms]")
    with pytest.raises(
        ConfigError, match=r"\[algorithms\] should name at least 1 algorithm, got none"
    ):
        read_scenario(scenario)


GRID = (
    SCENARIO
    + """
[cells]
"data.clients" = [4, 6]
"local.lr" = [0.1]
"""
)


def test_cells_make_a_scenario_of_each_combination(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(GRID)
    few, more = read_scenarios(file)
    assert (few.name, few.folder, more.name) == ("grid 4 0.1", "grid-4-0.1", "grid 6 0.1")
    assert [each.configs["prox"].data["clients"] for each in (few, more)] == [4, 6]
    with pytest.raises(ConfigError, match="should have a single scenario, got 2"):
        read_scenario(file)


def test_a_name_that_is_no_folder_has_one_that_is(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(
        GRID.replace('"data.clients" = [4, 6]', '"model.name" = ["mlp"]\n"data.name" = ["digits"]')
    )
    assert read_scenarios(file)[0].folder == "grid-mlp-digits-0.1"


@pytest.mark.parametrize("values", ["3", "[]"])
def test_a_cell_without_values_is_an_error(tmp_path, values):
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace("[4, 6]", values))
    with pytest.raises(ConfigError, match=r"data.clients of \[cells\] should be a list of values"):
        read_scenarios(file)


PRINTED = """
[cells]
"data.clients" = [4, 6]
rounds = [1, 2]
[printed]
source = "A paper"
means_over = ["rounds"]
4 = { fedavg = 50.5 }
"""


def test_printed_figures_are_of_groups_of_the_cells_and_of_the_file_as_it_stands(scenario):
    scenario.write_text(SCENARIO + PRINTED)
    found = {each.name: each.printed for each in read_scenarios(scenario)}
    assert found["mine 6 1"] is found["mine 6 2"] is None
    assert found["mine 4 1"] == found["mine 4 2"]
    printed = found["mine 4 1"]
    assert printed is not None
    assert (printed.name, printed.scenarios, printed.figures) == (
        "mine 4",
        ("mine 4 1", "mine 4 2"),
        {"fedavg": 50.5},
    )
    assert all(each.printed is None for each in read_scenarios(scenario, scale="smoke"))
    assert all(
        each.printed is None for each in read_scenarios(scenario, ["data.test_fraction=0.5"])
    )


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            'source = "A paper"',
            "",
            "source of [printed] should state where the scores were published, got ''",
        ),
        (
            '["rounds"]',
            '["round"]',
            "means_over of [printed] should be a list of keys of [cells], got 'round'",
        ),
        (
            '["rounds"]',
            "[[1]]",
            "means_over of [printed] should be a list of keys of [cells], got [1]",
        ),
        (
            '["rounds"]',
            '"rounds"',
            "means_over of [printed] should be a list of keys of [cells], got 'rounds'",
        ),
        ("4 = {", "5 = {", "unknown group of [printed]: '5'"),
        (
            "{ fedavg =",
            "{ fedagv =",
            "unknown algorithm of [printed.4]: 'fedagv'; did you mean 'fedavg'?",
        ),
        ("50.5", '"50.5"', "fedavg of [printed.4] should be a number, got '50.5'"),
        ("{ fedavg = 50.5 }", "50.5", "4 should be a table, got 50.5"),
    ],
)
def test_printed_figures_that_cannot_be_placed_are_refused(scenario, old, new, told):
    scenario.write_text(SCENARIO + PRINTED.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_scenarios(scenario)
    assert told in str(caught.value)


def test_an_algorithm_whose_folder_would_lie_elsewhere_is_refused(scenario):
    scenario.write_text(
        SCENARIO.replace("prox =", '"../x" =').replace("algorithms.prox.groups = 2", "")
    )
    with pytest.raises(
        ConfigError,
        match=r"a key of \[algorithms\] is invalid: label '../x' should be a valid name of a folder",
    ):
        read_scenarios(scenario)


def test_a_scenario_is_no_config(scenario):
    with pytest.raises(ConfigError, match=r"is a scenario: it has several \[algorithms\]; run it"):
        read_config(scenario)


def test_a_cell_that_is_there_twice_is_refused(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace("[4, 6]", "[4, 6, 4]"))
    with pytest.raises(
        ConfigError, match=r"data.clients of \[cells\] should list different values, got 4 more"
    ):
        read_scenarios(file)


def test_a_batch_writes_into_its_own_folder_alone(tmp_path, scenario):
    configs = {"../x": read_scenario(scenario).configs["fedavg"]}
    with pytest.raises(ConfigError, match=r"'../x' should be a valid name of a folder"):
        Batch(lambda name, rounds: lambda row, tree: None).run(configs, 1, tmp_path / "runs")
    assert not (tmp_path / "x").exists()
