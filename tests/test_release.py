"""What a release consists of besides the package: the parts name the same version, papers, targets and numbers."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from importlib.metadata import entry_points, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from fedclade_papers.command import reproduce
from fedclade_papers.result import Result

ROOT = Path(__file__).parents[1]
_hook = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
assert _hook is not None
assert _hook.loader is not None
_module = module_from_spec(_hook)
_hook.loader.exec_module(_module)
with_absolute_links = _module.with_absolute_links
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAPERS = tomllib.loads((ROOT / "packages/fedclade-papers/pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def entries(file: Path) -> dict[str, str]:
    """Return the entries of a BibTeX file by their keys."""
    found = re.split(r"\n(?=@)", file.read_text(encoding="utf-8"))
    return {match[1]: each.strip() for each in found if (match := re.match(r"@\w+\{(\w+),", each))}


SHIPPED = entries(ROOT / "src/fedclade/report/citations.bib")


def test_the_citation_is_of_this_version_and_of_the_papers_that_fedclade_cites():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    plain = {key: re.sub(r"[{}]", "", " ".join(entry.split())) for key, entry in SHIPPED.items()}
    for key, reference in zip(
        ("sattler2021cfl", "briggs2020flhc", "duan2020fedgroup"),
        citation["references"],
        strict=True,
    ):
        assert f"title = {reference['title']}" in re.sub(r" +", " ", plain[key])
        assert str(reference["year"]) in plain[key]
        assert reference["identifiers"][0]["value"] in plain[key]
        for author in reference["authors"]:
            assert author["given-names"] in plain[key]


def test_both_distributions_have_the_same_version_python_licence_and_lower_bounds():
    for key in ("version", "requires-python", "license", "authors"):
        assert PAPERS[key] == PROJECT[key]
    assert (ROOT / "packages/fedclade-papers/LICENSE").read_bytes() == (
        ROOT / "LICENSE"
    ).read_bytes()
    library, *others = PAPERS["dependencies"]
    assert Requirement(library).specifier.contains(PROJECT["version"])
    assert set(others) <= set(PROJECT["dependencies"])


def test_both_distributions_have_the_same_hook_for_their_readme():
    hooks = [path / "hatch_build.py" for path in (ROOT, ROOT / "packages/fedclade-papers")]
    assert hooks[0].read_bytes() == hooks[1].read_bytes()
    for project in (PROJECT, PAPERS):
        assert project["dynamic"] == ["readme", "urls"]


@pytest.mark.parametrize("folder", ["", "packages/fedclade-papers"])
def test_the_links_of_a_readme_lead_to_files_of_the_repository_at_the_tag(folder: str):
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    url = "https://example.org/fedclade"
    written = with_absolute_links(text, url, "v1.2.3", folder)
    links = re.findall(r"\]\(([^)\s]+)\)", written)
    assert len(links) == len(re.findall(r"\]\(([^)\s]+)\)", text)) > 0
    for link in links:
        assert link.startswith("https://")
        if link.startswith(url):
            path = re.fullmatch(rf"{url}/(?:blob|raw)/v1\.2\.3/([^#]+)(?:#.+)?", link)
            assert path, link
            assert (ROOT / path[1]).exists(), link


def test_an_image_of_a_readme_is_the_raw_file_and_other_links_stay():
    text = "![a](docs/a.png) [b](b.md#c) [d](https://e.org) [f](#g)"
    assert with_absolute_links(text, "https://h.org/x", "v1", "") == (
        "![a](https://h.org/x/raw/v1/docs/a.png) [b](https://h.org/x/blob/v1/b.md#c) "
        "[d](https://e.org) [f](#g)"
    )


def test_every_version_of_the_changelog_has_a_summary():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    title, *versions = re.split(r"^## ", text, flags=re.MULTILINE)
    assert title.startswith("# Changelog")
    for entry in versions:
        heading, summary = entry.partition("\n### ")[0].split("\n", 1)
        assert re.match(r"\d+\.\d+\.\d+ \((\d{4}-\d\d-\d\d|not released yet)\)$", heading), heading
        assert len(summary.split()) > 20, heading
    assert versions[0].startswith(PROJECT["version"])


def test_a_release_is_signed_before_it_is_published_without_a_password():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    signing = [step.get("uses", "").split("@")[0] for step in jobs["sign"]["steps"]]
    assert signing[-2:] == ["actions/attest-build-provenance", "actions/attest-sbom"]
    assert jobs["sign"]["permissions"] == {"attestations": "write", "id-token": "write"}
    assert jobs["publish"]["needs"] == "sign"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in str(jobs["publish"])


def test_the_command_reproduce_is_an_entry_point_of_the_papers():
    (point,) = entry_points(group="fedclade.commands", name="reproduce")
    assert PAPERS["entry-points"]["fedclade.commands"] == {"reproduce": point.value}
    assert point.load() is reproduce


@pytest.mark.parametrize("file", ["Makefile", "README.md"])
def test_one_install_command_names_both_distributions(file: str):
    text = (ROOT / file).read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"pip install[^`\n]* -c constraints.txt([^`\n]*)", text)
    assert re.fullmatch(
        r'-e "\.\[(dev|all)\]" -e packages/fedclade-papers', " ".join(command.split())
    )


def test_every_citation_of_the_paper_resolves_and_none_differs_from_what_fedclade_prints():
    cited = set(
        re.findall(r"@([a-z]+\d{4}\w+)", (ROOT / "paper/paper.md").read_text(encoding="utf-8"))
    )
    listed = entries(ROOT / "paper/paper.bib")
    assert cited == set(listed)
    assert {key: listed[key] for key in cited & set(SHIPPED)} == {
        key: SHIPPED[key] for key in cited & set(SHIPPED)
    }


def test_the_paper_counts_the_statements_of_the_committed_results():
    """But for the figure whose statements are those of a table."""
    results = [Result.load(path) for path in (ROOT / "results").glob("*.json")]
    seen = Counter(
        claim.seen
        for result in results
        if result.name != "fedgroup-fig1"
        for claim in result.outcome.claims
    )
    counted = re.compile(
        rf"Of {seen.total()} statements(.|\n)*{seen['yes']} were seen and "
        rf"{seen['direction only']} in direction only;\s+"
        rf"{seen['no']} were not,\s+{seen['not tested']} could not be tested"
    )
    assert counted.search((ROOT / "paper/paper.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_runs_targets_that_there_are_and_pins_what_it_uses(file: Path):
    jobs: dict[str, Any] = yaml.safe_load(file.read_text())["jobs"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    steps = [step for job in jobs.values() for step in job["steps"]]
    for step in steps:
        if "uses" in step:
            # whoever owns a tag can move it
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
        else:
            assert step["run"].split()[0] == "make"
            assert step["run"].split()[1] in targets
    used = {each for job in jobs.values() for each in job.get("needs", "").split()}
    assert used <= set(jobs)
    lines = [line for line in file.read_text().splitlines() if "uses:" in line]
    # the version, for people
    assert all(re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line) for line in lines)


FIXED_IN = {
    "cryptography": "50.0.0",  # CVE-2026-69247; before it CVE-2026-69249, CVE-2026-26007 and others
    "filelock": "3.20.3",  # CVE-2026-22701, CVE-2025-68146
    "jinja2": "3.1.6",  # CVE-2025-27516, CVE-2024-56326
    "pillow": "12.1.1",  # CVE-2026-25990
    "pyarrow": "23.0.1",  # CVE-2026-25087
    "ray": "2.55.0",  # CVE-2026-32981, CVE-2026-27482, CVE-2025-62593
}
"""By package: the first version without a vulnerability that is known."""


@pytest.mark.parametrize("package", FIXED_IN)
def test_a_lower_bound_leaves_out_versions_with_known_vulnerabilities(package: str):
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = [Requirement(text) for each in lists for text in each]
    bounds = [each.specifier for each in wanted if canonicalize_name(each.name) == package]
    assert bounds
    for bound in bounds:
        lowest = [Version(each.version) for each in bound if each.operator == ">="]
        assert max(lowest) >= Version(FIXED_IN[package])
        assert bound.contains(version(package), prereleases=True)


def test_every_python_that_is_named_is_tested():
    named = {
        name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)
    }
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert set(workflow["jobs"]["test"]["strategy"]["matrix"]["python"]) == named
    assert (
        PROJECT["requires-python"]
        == f">={min(named, key=lambda version: int(version.split('.')[1]))}"
    )


def test_all_is_every_extra_of_a_user():
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(re.findall(r"[a-z]+", everything.removeprefix("fedclade")))
    assert named == set(extras) - {"all", "dev", "docs"}
