"""The top-level links lead into the package, and every link of the documents leads somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.parts))

# [text](target) and ![text](target), but not in code blocks, which `text_of` removes.
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def text_of(markdown: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", markdown, flags=re.DOTALL)


def anchors_of(markdown: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", markdown, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    broken = []
    for target in LINK.findall(text_of(document.read_text())):
        path, _, anchor = target.partition("#")
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("name", ["actors", "pipelines"])
def test_top_level_folder_is_a_link_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / "raydist" / name
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["actors", "pipelines"])
def test_link_is_committed_as_a_link(name: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--stage", name], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    ).stdout
    if not listed and not (ROOT / ".git").exists():
        return  # an unpacked archive: `test_top_level_folder_is_a_link_into_the_package` has looked at the link itself
    assert listed.startswith("120000 ")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_documents_resolve(document: Path) -> None:
    assert broken_links(document) == []


def test_the_check_sees_broken_links(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, here\n")
    document = tmp_path / "a.md"
    document.write_text("[a](nowhere.md) [b](other.md#a-heading-here) [c](other.md#none) `[d](code.md)` [e](#none)")
    assert broken_links(document) == ["nowhere.md", "other.md#none", "#none"]
