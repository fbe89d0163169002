"""Settings of Sphinx for the site that ``make docs`` builds into ``docs/_build/html``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_extensions")]

project = "ray-statestore"
copyright = "the authors of ray-statestore, Apache-2.0"
version = release = re.search(r'^version = "(.+)"$', (HERE.parent / "pyproject.toml").read_text(), re.MULTILINE)[1]

extensions = [
    "myst_parser",
    "root_pages",
]
exclude_patterns = ["_build", "_extensions"]
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

smartquotes = False  # "--option" stays what it is

html_theme = "furo"
html_title = f"ray-statestore {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
