"""``make screenshots``: the pages as pictures for the docs, of a model and of real hosts, in a real Chromium."""

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


def take(directory: Path) -> None:
    """Take all pictures."""
    with chromium() as browser, served_page(ModelSystem(in_trouble())) as model, of_hosts() as hosts:
        for name, base, path, viewport, scheme in (
            ("page-overview", model, "/", WIDE, "light"),
            ("page-overview-narrow", model, "/", NARROW, "dark"),
            ("page-query", model, "/query?query=q-orders", WIDE, "light"),
            ("page-operator", model, "/operator?query=q-clicks&operator=totals", WIDE, "dark"),
            ("page-hosts", model, "/hosts", WIDE, "light"),
            ("page-keys", hosts, "/keys?key.user=180&versions=1,2,4", WIDE, "light"),
            ("page-scan", hosts, "/scan?limit=20&column0=n&is0=%3E&value0=3000&x=user&y=n", WIDE, "light"),
            ("page-sql", hosts, "/sql", WIDE, "dark"),
            ("page-savepoints", hosts, "/savepoints", WIDE, "light"),
        ):
            tab = Tab(browser, base, viewport=viewport, scheme=scheme).open(path)
            if path == "/sql":
                tab.page.fill("#statement", STATEMENT)
                tab.page.click("text=Run")
                tab.page.wait_for_selector("table")
            tab.page.screenshot(
                path=str(directory / f"{name}.png"), full_page=viewport is WIDE and "--full" in sys.argv
            )
            tab.close()
            print(directory / f"{name}.png")


if __name__ == "__main__":
    if WHY_NOT:
        sys.exit(WHY_NOT)
    take(IMAGES)
