"""What the metadata of a package contain besides ``pyproject.toml``: its README, and its addresses.

In the repository, the links of a README are relative paths. A package index shows the README without
the repository, so that such links lead nowhere there. If the environment variable
``FEDCLADE_REPOSITORY_URL`` is set, as in the workflow of releases, each relative link becomes a link to
the file at the tag of the version, and the metadata also name the repository. Without the variable,
the README is taken as it is.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "FEDCLADE_REPOSITORY_URL"
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?P<path>(?![a-z]+:|#)[^)\s]+)\)")
COMMENT = re.compile(r"^<!--.*?-->\n", flags=re.DOTALL | re.MULTILINE)


class ReadmeHook(MetadataHookInterface):
    """Fill in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README and, if the repository's address is known, the addresses of the project."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        url = os.environ.get(VARIABLE, "").rstrip("/")
        metadata["urls"] = {}
        if url:
            text = with_absolute_links(text, url, f"v{metadata['version']}", self.config["folder"])
            metadata["urls"] = {
                "Source": url,
                "Issues": f"{url}/issues",
                "Changelog": f"{url}/blob/v{metadata['version']}/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, url: str, tag: str, folder: str) -> str:
    """Return a README whose relative links and images are those of the repository at a tag.

    Parameters
    ----------
    text
        The README, in Markdown.
    url
        Address of the repository.
    tag
        Tag of the version.
    folder
        Folder of the README in the repository; empty for its root.
    """

    def absolute(link: re.Match[str]) -> str:
        path, _, anchor = link["path"].partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        view = "raw" if link["image"] else "blob"
        end = f"#{anchor}" if anchor else ""
        return f"{link['image']}{link['text']}({url}/{view}/{tag}/{path}{end})"

    return LINK.sub(absolute, COMMENT.sub("", text))
