"""``python -m fedclade`` is the command line."""

from fedclade.cli import main

main()
