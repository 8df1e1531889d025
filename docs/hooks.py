"""Hooks of mkdocs: what GitHub shows as it is needs small changes in the site."""

from __future__ import annotations

import re
from typing import Any

REPOSITORY_FILE = re.compile(
    r"\]\((?:\.\./)+((?:examples|deploy|benchmarks|tests|raydist)[^)#]*|[A-Za-z]+\.(?:md|yaml))\)"
)
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drop comments (code for the tests), and show links to files of the repository as their names.

    >>> on_page_markdown("See [the deploy folder](../deploy/README.md). <!-- setup -->")
    'See the deploy folder (`deploy/README.md`). '
    """
    markdown = COMMENT.sub("", markdown)
    return re.sub(r"\[([^\]]+)" + REPOSITORY_FILE.pattern, _named, markdown)


def _named(match: re.Match[str]) -> str:
    text, path = match.groups()
    return f"`{path}`" if text in (path, path.rpartition("/")[2]) else f"{text} (`{path}`)"
