"""Pages that are made from the code when the site is built: the reference, and what stands beside a method."""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import griffe
import typer.main
from roles import linked

import fedclade
from fedclade.algorithms import ALGORITHMS, TRUTH
from fedclade.cli.app import app
from fedclade.config.settings import FIXED, TopLevel
from fedclade.core import installed, named, settings_of, summary_of
from fedclade.data import FilesSettings
from fedclade.flower.from_config import AppSettings
from fedclade.flower.network import Network
from fedclade.models import Parts
from fedclade.report import cite_name

ROOT = Path(__file__).parents[1]
ROOMS = {
    **{
        room: f"reference/{room}.md"
        for room in ("algorithms", "catalogue", "channel", "clustering", "core", "data", "flower")
    },
    **{
        room: f"reference/{room}.md"
        for room in ("models", "report", "runs", "sweeps", "tasks", "trackers", "training")
    },
    "cli": "reference/cli-api.md",
    "config": "reference/config-api.md",
}
"""The page of each room; the commands and the keys of a config have pages of their own."""


def pages() -> Mapping[str, Callable[[], str]]:
    """Return what writes each generated page of the reference, by where the page is."""
    rooms = {page: (lambda room=room: room_page(room)) for room, page in ROOMS.items()}
    return {
        **rooms,
        "reference/index.md": names_page,
        "reference/cli.md": cli_page,
        "reference/config.md": config_page,
    }


@cache
def _package() -> griffe.Object:
    found = griffe.load("fedclade", search_paths=[str(ROOT / "src")], resolve_aliases=True)
    assert isinstance(found, griffe.Object)
    return found


def _documented() -> dict[str, str]:
    """Return for every object that a room exports the dotted name that it is documented under, by its own."""
    found: dict[str, str] = {}
    for room in ROOMS:
        module = _package()[room]
        for name in sorted(module.exports or (), key=str.lower):
            own = module[name].canonical_path
            home = f"fedclade.{room}." if own.startswith(f"fedclade.{room}.") else ""
            if home or own not in found:
                found[own] = f"{home or module.path + '.'}{name}"
    return found


def names_page() -> str:
    """Return the page of all names of ``fedclade`` itself, each with its anchor, and a link to where it is told."""
    documented = _documented()
    lines = [
        "# Reference",
        "What `import fedclade` has. Whatever else a room exports is on the room's page; see also the"
        " [command line](cli.md) and the [keys of a config](config.md).",
        "| name | description |\n| :-- | :-- |",
    ]
    for name in fedclade.__all__:
        value = getattr(fedclade, name)
        place = documented.get(_package()[name].canonical_path)
        says = (
            (inspect.getdoc(value) or "").split("\n\n")[0]
            if name != "__version__"
            else "The version, a string."
        )
        shown = f"`{name}`" if place is None else f"[`{name}`][{place}]"
        first = linked(" ".join(says.split())).replace("|", "\\|")
        lines[-1] += f'\n| <a id="fedclade.{name}"></a>{shown} | {first} |'
    return "\n\n".join(lines) + "\n"


def room_page(room: str) -> str:
    """Return the page of a room: what it is for, and all that it exports and no other room has documented."""
    module = import_module(f"fedclade.{room}")
    prefix = f"fedclade.{room}."
    names = [name for name in _documented().values() if name.startswith(prefix)]
    names.sort(key=str.lower)
    head = f"# fedclade.{room}\n\n{linked(inspect.getdoc(module) or '')}\n\n"
    return head + "\n\n".join(f"::: {name}" for name in names) + "\n"


def cli_page() -> str:
    """Return the page of all commands, walked from the command line itself."""
    command = typer.main.get_command(app)
    sections = ["# Command line", "`fedclade COMMAND --help` says the same."]
    assert isinstance(command, click.Group)
    sections += _commands(command, "fedclade")
    return "\n\n".join(sections) + "\n"


def _commands(group: click.Group, path: str) -> Iterator[str]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])  # imports those of other packages
        if command is None or command.hidden:
            continue
        full = f"{path} {name}"
        if isinstance(command, click.Group):
            yield from _commands(command, full)
            continue
        pieces = " ".join(command.collect_usage_pieces(click.Context(command, info_name=full)))
        yield f"## {full}\n\n```\n{full} {pieces}\n```"
        yield from map(_paragraph, inspect.cleandoc(command.help or "").split("\n\n"))
        if rows := [
            _row(parameter) for parameter in command.params if isinstance(parameter, click.Option)
        ]:
            yield "| option | default | description |\n| :-- | :-- | :-- |\n" + "\n".join(rows)


def _paragraph(text: str) -> str:
    """Return a paragraph of help as Markdown; examples are code."""
    head, colon, examples = " ".join(text.split()).partition(": ")
    if colon and head in ("Example", "Examples"):
        return "```\n" + "\n".join(examples.split("; ")) + "\n```"
    return _plain(text)


def _row(option: click.Option) -> str:
    default = option.default
    shown = isinstance(default, (str, int, float, Path)) and not isinstance(default, bool)
    names = " ".join(f"`{name}`" for name in option.opts)
    return f"| {names} | {f'`{default}`' if shown else ''} | {_plain(option.help or '')} |"


def _plain(text: str) -> str:
    """Return help in a line that Markdown leaves as it is."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*")


def config_page() -> str:
    """Return the page of all keys of a config, made from the settings and the docstrings of what they set."""
    fixed = [
        (f"[{name}]", ABOUT.get(name, ""), settings_table(kind)) for name, kind in FIXED.items()
    ]
    own = [
        (f"[middleware.{name}]", summary_of(kind), settings_table(kind))
        for name, kind in installed_middleware().items()
    ]
    sections = [
        ("Above the sections", "", settings_table(TopLevel)),
        (
            "[data]",
            "A data set by name, shared out; options of source, partition and shift are keys, too.",
            data_keys(),
        ),
        ("[data] with files", "See [your own data](../own-data.md).", parameters(FilesSettings)),
        (
            "[model]",
            "",
            {
                "name": (
                    "`'mlp'`",
                    "Of the model, or `module:factory`; its options are keys, too.",
                ),
                **settings_table(Parts),
            },
        ),
        *fixed,
        (
            "[network]",
            "In the run config of a Flower app. See [deploy](../deploy.md).",
            {**settings_table(Network), **settings_table(AppSettings)},
        ),
        *own,
    ]
    of_algorithms = [
        (f"[algorithm] {name}", entry.summary, parameters(entry.algorithm))
        for name, entry in ALGORITHMS.items()
    ]
    head = (
        "# Config keys\n\nA config is a TOML file of these. `--set section.key=value` sets any of them; "
        "`fedclade validate` checks them. `[target]` names metrics and what to reach. "
        "`[middleware.NAME]` has the settings of [middleware of your own](../your-own.md#middleware)."
    )
    return (
        "\n\n".join([head, *(_section(*section) for section in (*sections, *of_algorithms))]) + "\n"
    )


ABOUT = {
    "adversary": "See [robustness](../robustness.md).",
    "aggregate": "See [robustness](../robustness.md).",
    "privacy": "See [privacy](../privacy.md).",
    "server": "See [server optimizers](../how-it-works.md#server-optimizers).",
    "report": "See [the report](../report.md).",
    "task": "See [your own task](../own-task.md).",
}
"""Further reading on a section."""


def data_keys() -> dict[str, tuple[str, str]]:
    """Return the keys of ``[data]`` for data sets that are shared out."""
    data = parameters(fedclade.load_federation)
    of_others = ("newcomers", "newcomer_samples", "seed", "data_dir")
    for name in (*of_others, "source_arguments, partition_arguments, shift_arguments"):
        data.pop(name, None)
    return {
        "name": data.pop("source"),
        **data,
        "attributes": (
            "–",
            "File with a row of attributes for each client, such as its country, for the report.",
        ),
    }


def installed_middleware() -> dict[str, type[Any]]:
    """Return the middleware that installed packages add, by name."""
    return {name: named("middleware", name, {}, "middleware") for name in installed("middleware")}


def settings_table(kind: type[Any]) -> dict[str, tuple[str, str]]:
    """Return the default and the description with the range of each setting of a class, by its name."""
    table: dict[str, tuple[str, str]] = {}
    for name, (_, about) in settings_of(kind).items():
        text = _escaped(about.doc)
        if about.allowed is not None and about.allowed.text not in about.doc:
            text += f" Allowed: {_escaped(about.allowed.text)}."
        table[name] = _default(kind, name), text
    return table


def _escaped(text: str) -> str:
    return linked(" ".join(text.split())).replace("|", "\\|")


def _section(title: str, about: str, keys: Mapping[str, tuple[str, str]]) -> str:
    rows = [
        f"| `{name}` | {default} | {what} |"
        for name, (default, what) in keys.items()
        if name not in TRUTH
    ]
    table = (
        "| key | default | description |\n| :-- | :-- | :-- |\n" + "\n".join(rows)
        if rows
        else "No options."
    )
    return "\n\n".join(part for part in (f"## {title}", about, table) if part)


def parameters(of: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """Return the default and the description of each parameter that a docstring tells, by its name."""
    sections = griffe.parse_numpy(griffe.Docstring(inspect.getdoc(of) or ""), warnings=False)
    found: dict[str, tuple[str, str]] = {}
    for section in sections:
        if section.kind is griffe.DocstringSectionKind.parameters:
            for each in section.value:
                found[each.name] = _default(of, each.name), _escaped(each.description)
    return found


def _default(of: Callable[..., Any], name: str) -> str:
    if is_dataclass(of):
        by_name = {each.name: each for each in fields(of)}
        found = by_name[name].default if name in by_name else MISSING
    else:
        known = inspect.signature(of).parameters
        found = known[name].default if name in known else MISSING
    if found is MISSING or found is inspect.Parameter.empty:
        return ""
    shown = {None: "–", True: "`true`", False: "`false`"}
    return (
        shown[found]
        if found is None or isinstance(found, bool)
        else f"`{found!r}`"
        if found != ()
        else "`[]`"
    )


def with_file(name: str, text: str) -> str:
    """Return the page of a method with the method's file beside it, and how to cite it below."""
    method = ALGORITHMS[name]
    kind = method.algorithm
    path = Path(inspect.getsourcefile(kind) or "").resolve()
    head, _, rest = text.partition("\n## ")
    source, place = path.read_text(encoding="utf-8"), path.relative_to(ROOT.resolve())
    cites = (
        f'??? quote "BibTeX"\n\n    ```bibtex\n{_indented(cite_name(name))}\n    ```\n'
        if method.citations
        else ""
    )
    documented = _documented().get(f"{kind.__module__}.{kind.__qualname__}")
    in_python = f"`{kind.__name__}`" if documented is None else f"[`{kind.__name__}`][{documented}]"
    options = f"[All its options](../reference/config.md#algorithm-{name}), and {in_python}."
    return (
        f'{head}\n\n<div class="beside" markdown>\n<div markdown>\n\n## {rest}\n\n{options}\n\n{cites}\n</div>\n'
        f"<div markdown>\n\n## The file\n\n`{place}`\n\n````python\n{source}````\n\n</div>\n</div>\n"
    )


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
