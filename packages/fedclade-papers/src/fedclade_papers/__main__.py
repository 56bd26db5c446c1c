"""Entry point ``python -m fedclade_papers NAME``, the same as ``fedclade reproduce NAME``.

It also works where the package is not installed.
"""

import sys

from fedclade.cli import app, main
from fedclade_papers.command import reproduce

app.command()(reproduce)
sys.argv.insert(1, "reproduce")
main()
