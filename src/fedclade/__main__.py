"""Entry point of ``python -m fedclade``, which runs fedclade's command line."""

from fedclade.cli import main

main()
