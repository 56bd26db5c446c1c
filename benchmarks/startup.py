"""CPU time of starts: imports, commands that compute nothing, shell completion, and a ClientApp.

    python benchmarks/startup.py [--repeat N]

The table has the seconds of CPU (user and system) of each process, its ratio to ``import torch``,
the number of fedclade's modules that it has imported, and the heavy packages. Of N processes, the
one with the least time counts, since other load on a machine only adds time. The processes are
called in turn, so that all of them meet the same load. Python's compiled files are written by a
first round, which does not count.

The ClientApp is measured up to its app object: the process has then imported everything that the
first reply needs. Flower's runner starts it with Flower imported, so its time is compared with
``import torch, flwr.clientapp``, too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence

# "torch" itself can be a substitute, see fedclade/cli/deferred_torch.py.
HEAVY = ("torch.nn", "numpy", "scipy.stats", "sklearn", "pyarrow", "flwr", "rich")

COMMAND = """
import sys
sys.argv = ["fedclade", *{arguments}]
from fedclade.cli import main
try:
    main()
except SystemExit:
    pass
"""

CONFIG = "cfl-digits-label-swap"

IMPORTS = {
    "import torch": "import torch",
    "import fedclade": "import fedclade",
    "fedclade.simulate": "import fedclade; fedclade.simulate",
    "import torch, flwr.clientapp": "import torch, flwr.clientapp",
    "a ClientApp": (
        "from fedclade.flower import client_app; client_app('mlp', lambda context: None)"
    ),
}

COMMANDS = {
    "fedclade --version": ["--version"],
    "fedclade --help": ["--help"],
    "fedclade ls": ["ls"],
    "fedclade run --help": ["run", "--help"],
    "fedclade validate": ["validate", CONFIG],
    "fedclade validate, fedavg": ["validate", "fedavg-digits-label-swap"],
}

COMPLETION = {
    "_FEDCLADE_COMPLETE": "complete_bash",
    "COMP_WORDS": "fedclade run --",
    "COMP_CWORD": "2",
}


def main() -> None:
    """Measure all starts, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="Number of processes of each kind.")
    repeat = parser.parse_args().repeat
    programs: dict[str, tuple[str, Mapping[str, str]]] = {}
    for name, code in IMPORTS.items():
        programs[name] = code, {}
    for name, arguments in COMMANDS.items():
        programs[name] = COMMAND.format(arguments=arguments), {}
    programs["shell completion"] = COMMAND.format(arguments=[]), COMPLETION
    imported = {name: read_imports(code, variables) for name, (code, variables) in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeat):
        for name, (code, variables) in programs.items():
            seconds[name].append(measure_cpu(code, variables))
    torch = min(seconds["import torch"])
    print("| start | CPU seconds | ratio to `import torch` | modules of fedclade | imports |")
    print("| :-- | --: | --: | --: | :-- |")
    for name, values in seconds.items():
        own, heavy = imported[name]
        print(f"| {name} | {min(values):.2f} | {min(values) / torch:.2f} | {own} | {heavy} |")


def measure_cpu(code: str, variables: Mapping[str, str]) -> float:
    """Return the seconds of CPU of a Python process that runs a program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run(code, variables)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def read_imports(code: str, variables: Mapping[str, str]) -> tuple[int, str]:
    """Return how many modules of fedclade a program has imported, and names of heavy packages."""
    listing = "import json, sys; print(json.dumps(list(sys.modules)), file=sys.stderr)"
    modules = json.loads(_run(f"{code}\n{listing}", variables).stderr.splitlines()[-1])
    own = [name for name in modules if name.partition(".")[0] == "fedclade"]
    heavy = [name.removesuffix(".nn") for name in HEAVY if name in modules]
    return len(own), ", ".join(heavy) or "none"


def _run(code: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )


if __name__ == "__main__":
    main()
