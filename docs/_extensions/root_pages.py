"""Links to pages outside of docs/, such as SECURITY.md: on the site they lead to the page that includes the file.

Pages that include another file have a note for readers on GitHub, which does not include it. The site leaves the note
out.
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "benchmarks/FIGURES.md": "explanation/figures",
    "benchmarks/RESULTS.md": "explanation/results",
    "deploy/README.md": "how-to/cluster",
}
"""The files, and the pages of the site that include them."""
_BY_NAME = {Path(file).name: page for file, page in PAGES.items() if "README" not in file}
_BY_PATH = {str(ROOT / file).removesuffix(".md"): page for file, page in PAGES.items()}

NOTE_FOR_GITHUB = re.compile(r"^> On GitHub .*?\n\n", re.DOTALL | re.MULTILINE)


def _without_note(_app: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = NOTE_FOR_GITHUB.sub("", source[0], count=1)


def _redirect(app: Sphinx, document: nodes.document) -> None:
    for reference in document.findall(addnodes.pending_xref):
        target = reference.get("reftarget", "")
        page = _BY_PATH.get(target) or (_page_of_included(target) if target.endswith(".md") else None)
        if page is not None:
            reference["refdomain"], reference["reftarget"], reference["reftargetid"] = "doc", page, None


def _page_of_included(target: str) -> str | None:
    """Return the page for a link of an included file, which is relative to another directory."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/").removesuffix(".md")
    return PAGES.get(target) or _BY_NAME.get(Path(target).name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the hooks."""
    app.connect("source-read", _without_note)
    app.connect("doctree-read", _redirect)
    return {"parallel_read_safe": True}
