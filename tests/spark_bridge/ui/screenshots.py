"""``make screenshots``: pictures of pages for the docs, of a model and of real hosts, in a real Chromium.

With a directory as its argument the program takes pictures of all pages from top to bottom there, to look at.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.docs.pages import ROOT
from tests.spark_bridge.ui.browser import NARROW, WHY_NOT, WIDE, Tab, chromium, served_page
from tests.spark_bridge.ui.systems import ModelSystem, in_trouble, served

IMAGES = ROOT / "docs" / "images"
STATEMENT = (
    "select name, sum(n) as visits from totals where name is not null group by name order by visits desc limit 12"
)


@contextmanager
def of_hosts() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        made = served(Path(directory))
        names = ["anna", "bert", "cleo", "dora", "emil", "fina"]
        for batch in range(4):
            made.cluster.batch({i: (7 * i * (batch + 1), names[i % 6]) for i in range(40 * batch, 200)})
        try:
            with served_page(made.system) as address:
                yield address
        finally:
            made.cluster.close()


PICTURES = (
    ("page-overview", "/", WIDE, "light"),
    ("page-query", "/query?query=q-orders", WIDE, "light"),
    ("page-operator", "/operator?query=q-clicks&operator=totals", WIDE, "dark"),
    ("page-keys", "/keys?key.user=180&versions=1,2,4", WIDE, "light"),
)
FURTHER = (
    ("page-overview-narrow", "/", NARROW, "dark"),
    ("page-query-narrow", "/query?query=q-clicks", NARROW, "light"),
    ("page-hosts", "/hosts", WIDE, "light"),
    ("page-scan", "/scan?limit=20&column0=n&is0=%3E&value0=3000&x=user&y=n", WIDE, "light"),
    ("page-scan-narrow", "/scan?limit=20&column0=n&is0=%3E&value0=3000&x=user&y=n", NARROW, "light"),
    ("page-sql", "/sql", WIDE, "dark"),
    ("page-hottest", "/operator/hottest?table=q/totals/default", WIDE, "light"),
    ("page-savepoints", "/savepoints", WIDE, "light"),
)
OF_STATE = ("keys", "scan", "sql", "savepoints", "operator/hottest")


def take(directory: Path, *, all_of_them: bool) -> None:
    """Take the pictures."""
    with chromium() as browser, served_page(ModelSystem(in_trouble())) as model, of_hosts() as hosts:
        for name, path, viewport, scheme in (*PICTURES, *FURTHER) if all_of_them else PICTURES:
            base = hosts if path.lstrip("/").startswith(OF_STATE) else model
            tab = Tab(browser, base, viewport=viewport, scheme=scheme).open(path)
            if path == "/sql":
                tab.page.fill("#statement", STATEMENT)
                tab.page.click("text=Run")
                tab.page.wait_for_selector("table")
            tab.page.screenshot(path=str(directory / f"{name}.png"), full_page=all_of_them)
            tab.close()
            print(directory / f"{name}.png")


if __name__ == "__main__":
    if WHY_NOT:
        sys.exit(WHY_NOT)
    take(Path(sys.argv[1]) if sys.argv[1:] else IMAGES, all_of_them=bool(sys.argv[1:]))
