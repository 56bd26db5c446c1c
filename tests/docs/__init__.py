"""Every block of the documentation runs, or is checked: see ``blocks.py`` for how a page steers that."""
