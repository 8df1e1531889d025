"""An extension of griffe, which reads docstrings for the API pages: examples and roles become Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)
ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`~?\.?([^`]+)`")


def to_markdown(docstring: str) -> str:
    """Put doctest examples into code blocks, and names in the roles of Sphinx (`:class:`) between backticks."""
    fenced = EXAMPLE.sub(lambda example: f"{example[1]}```pycon\n{example[0]}\n{example[1]}```", docstring)
    return re.sub(r"::$", ":", ROLE.sub(r"`\1`", fenced), flags=re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites each docstring that griffe finds."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
