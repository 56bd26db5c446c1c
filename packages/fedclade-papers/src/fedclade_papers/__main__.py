"""Entry point ``python -m fedclade_papers NAME``, equivalent to ``fedclade reproduce NAME``.

The entry point also works if ``fedclade_papers`` is importable but not installed as a package.
"""

import sys

from fedclade.cli import app, main
from fedclade_papers.command import reproduce

app.command()(reproduce)
sys.argv.insert(1, "reproduce")
main()
