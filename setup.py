"""README.md for the package index, which has none of the other files: links and pictures become absolute."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<before>(?P<picture>!?)\[[^\]]*\]\()(?!https?://|#)(?P<path>[^)\s]+)\)")


def description() -> str:
    """Return README.md with links into the repository that pyproject.toml names."""
    (repository,) = re.findall(r'^Repository = "https://github.com/(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    page, picture = f"https://github.com/{repository}/blob/main", f"https://raw.githubusercontent.com/{repository}/main"

    def absolute(link: re.Match[str]) -> str:
        url = f"{picture}/{link['path']}?sanitize=true" if link["picture"] else f"{page}/{link['path']}"
        return f"{link['before']}{url})"

    return LINK.sub(absolute, (ROOT / "README.md").read_text())


if __name__ == "__main__":
    setup(long_description=description(), long_description_content_type="text/markdown")
