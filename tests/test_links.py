"""The top-level links lead into the package, and every link of the documents leads somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

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


def test_top_level_folders_are_links_into_the_package_and_committed_as_links() -> None:
    for name in ("actors", "pipelines"):
        link = ROOT / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / "raydist" / name
        assert (link / "__init__.py").is_file()
        listed = subprocess.run(
            ["git", "ls-files", "--stage", name], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
        ).stdout
        if listed or (ROOT / ".git").exists():  # an unpacked archive has neither
            assert listed.startswith("120000 ")


def test_links_of_documents_resolve() -> None:
    broken = {str(document.relative_to(ROOT)): broken_links(document) for document in DOCUMENTS}
    assert {document: links for document, links in broken.items() if links} == {}


def test_the_check_sees_broken_links(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, here\n")
    document = tmp_path / "a.md"
    document.write_text("[a](nowhere.md) [b](other.md#a-heading-here) [c](other.md#none) `[d](code.md)` [e](#none)")
    assert broken_links(document) == ["nowhere.md", "other.md#none", "#none"]
