"""What docstrings say in Sphinx's roles, as links of the site: an extension of griffe, which reads them."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:mod|class|func|data|attr|meth|obj|exc):`(~?)([^`]+)`")


class Roles(Extension):
    """Turn ``:class:`~fedclade.core.Clients``` into a link to where that is documented, if it is."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object; that of a settings class is made when it is imported."""
        if obj.docstring and obj.is_class and "document_settings" in decorators_of(obj):
            value = getattr(import_module(obj.module.path), obj.name)
            obj.docstring.value = inspect.getdoc(value) or ""
        if obj.docstring:
            obj.docstring.value = linked(obj.docstring.value)


def decorators_of(obj: Object) -> list[str]:
    """Return the names of the decorators of a class."""
    return [str(each.value) for each in getattr(obj, "decorators", ())]


def linked(text: str) -> str:
    """Return a text of Markdown with its roles as optional cross-references, and its double backticks as single."""
    return ROLE.sub(_link, text).replace("``", "`")


def _link(role: re.Match[str]) -> str:
    text, _, target = " ".join(role[2].split()).partition(" <")
    name = target.removesuffix(">") or text
    shown = name.rsplit(".", 1)[-1] if role[1] else text
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'
