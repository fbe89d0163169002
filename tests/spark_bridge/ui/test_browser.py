"""The page in a real Chromium: every page and every action at two widths, with no console error, no request to
elsewhere, and nothing that axe finds.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.messages import SavepointStatus
from spark_bridge.overview.model import Overview
from spark_bridge.ui.live import StoredSystem
from tests.effort import effort, only_thorough
from tests.spark_bridge.state_data.format_fixtures import Stored
from tests.spark_bridge.ui.browser import NARROW, WHY_NOT, WIDE, Tab, chromium, served_page
from tests.spark_bridge.ui.systems import ACT, LOOK, ModelSystem, Served, healthy, in_trouble

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

BOTH_WIDTHS = pytest.mark.parametrize("viewport", [NARROW, only_thorough(WIDE)], ids=["narrow", "wide"])

TABLE = "q/totals/default"
MODEL_PAGES = [
    "/",
    "/query?query=q-orders",
    "/operator?query=q-clicks&operator=totals&by=time",
    "/hosts",
    "/savepoints?query=q-clicks",
]
STATE_PAGES = [
    "/",
    "/keys",
    "/keys?key.user=5&versions=1,2,3",
    "/scan?limit=20&x=name&y=n",
    "/sql",
    f"/operator/hottest?table={TABLE}",
    "/savepoints",
]
Open = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture
def model() -> ModelSystem:
    return ModelSystem(in_trouble())


@pytest.fixture
def model_page(model: ModelSystem) -> Iterator[str]:
    with served_page(model) as address:
        yield address


@pytest.fixture(scope="module")
def state_page(hosts: Served) -> Iterator[str]:
    with served_page(hosts.system) as address:
        yield address


@pytest.fixture
def tab(browser: Any) -> Iterator[Open]:
    """Opens tabs, and says at the end that nothing went wrong in them."""
    made: list[Tab] = []

    def open_tab(base: str, **options: Any) -> Tab:
        made.append(Tab(browser, base, **options))
        return made[-1]

    yield open_tab
    for one in made:
        one.close()
        assert one.problems == []


def look_over(tab: Tab, paths: list[str], *axe_at: dict[str, int]) -> None:
    """Look at pages at both widths. Axe takes most of the time: it looks at some widths, by default at both."""
    for path in paths:
        tab.page.set_viewport_size(WIDE)
        tab.open(path)
        for viewport in (WIDE, NARROW):
            tab.page.set_viewport_size(viewport)
            assert not tab.overflows(), (path, viewport)
            if viewport in (axe_at or (WIDE, NARROW)):
                assert tab.violations() == [], (path, viewport)


# -- pages -------------------------------------------------------------------------------------


def test_the_pages_of_a_system_in_trouble(model_page: str, tab: Open) -> None:
    look_over(tab(model_page), MODEL_PAGES, *effort([WIDE], [WIDE, NARROW]))


def test_the_pages_of_state(state_page: str, tab: Open) -> None:
    look_over(tab(state_page, scheme="dark"), STATE_PAGES, *effort([NARROW], [WIDE, NARROW]))


@pytest.mark.thorough  # the two tests above look at each page in one of the schemes
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_pages_in_both_schemes(model_page: str, state_page: str, tab: Open, scheme: str) -> None:
    look_over(tab(model_page, scheme=scheme), MODEL_PAGES)
    look_over(tab(state_page, scheme=scheme), STATE_PAGES)
    look_over(tab(state_page, scheme=scheme, token=LOOK), STATE_PAGES)
    look_over(tab(state_page, scheme=scheme, token=None), ["/signin"])


@pytest.mark.thorough  # the pages are the same ones; test_state.py asks for each variable
def test_the_pages_of_a_checkpoint(tab: Open) -> None:
    with served_page(StoredSystem(str(Stored("file").checkpoint))) as address:
        opened = tab(address).open("/")
        paths = ["/", "/savepoints", "/sql"]
        for link in opened.page.locator("main a").all():
            paths.append(link.get_attribute("href") or "")
        opened.open("/scan")
        for option in opened.page.locator("#table option").all():
            name = option.get_attribute("value")
            paths += [f"/scan?limit=10&table={name}", f"/keys?table={name}"] if name else []
        look_over(opened, paths)
        opened.close()  # before its server stops: an open page asks it for news, and the browser logs the failure


@pytest.mark.thorough  # test_pages.py asks for a query that there is not
def test_page_of_an_unknown_query_is_404(model_page: str, tab: Open) -> None:
    opened = tab(model_page).open("/query?query=nothing")
    assert opened.violations() == [] and "nothing" in opened.page.get_by_role("alert").inner_text()
    opened.expected.append("404")  # the browser logs the status


# -- actions -----------------------------------------------------------------------------------


@BOTH_WIDTHS
def test_signing_in_by_keyboard_and_out(model_page: str, tab: Open, viewport: dict[str, int]) -> None:
    opened = tab(model_page, token=None, viewport=viewport).open("/signin")
    page = opened.page
    assert opened.violations() == []
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    opened.expected.append("401")  # the browser logs the status
    page.locator("#token").fill(LOOK)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="2 errors").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'main'")
    cookies = {c["name"]: c for c in opened.context.cookies()}
    assert cookies["statestore_session"]["httpOnly"] and cookies["statestore_session"]["sameSite"] == "Strict"
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/signin")
    assert "statestore_session" not in {c["name"] for c in opened.context.cookies()}


@pytest.mark.thorough  # test_pages.py follows the links
def test_navigation_from_a_fault_to_its_cause(model_page: str, tab: Open) -> None:
    page = tab(model_page).open("/").page
    fault = page.locator(".fault", has_text="slow-partition")
    assert "What to do" in fault.inner_text()
    fault.get_by_role("link").click()
    page.get_by_role("link", name="rows", exact=True).click()
    page.get_by_text("Hottest partitions by rows").wait_for()
    assert page.locator(".hottest li").first.inner_text().startswith("partition 3")
    page.get_by_role("columnheader", name="time of last batch").get_by_role("link").click()
    assert page.locator("#partitions tbody th").first.inner_text() == "3"


def test_a_page_keeps_up_until_it_is_paused(model: ModelSystem, model_page: str, tab: Open) -> None:
    page = tab(model_page).open("/").page
    page.get_by_role("heading", name="2 errors").wait_for()
    model.shown = healthy()
    page.get_by_role("heading", name="Nothing is wrong").wait_for()
    assert page.locator(".fault").count() == 0
    page.get_by_role("button", name="Pause updates").click()
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"


def test_page_opened_before_any_query_shows_new_queries(model: ModelSystem, model_page: str, tab: Open) -> None:
    model.shown = Overview("cluster", 0)
    opened = tab(model_page).open("/")
    page = opened.page
    page.get_by_role("heading", name="No query runs").wait_for()
    model.shown = healthy()
    page.get_by_role("heading", name="Nothing is wrong").wait_for()
    page.get_by_role("link", name="clicks").wait_for()
    assert opened.violations() == []


def test_open_page_shows_that_it_is_out_of_date(model: ModelSystem, tab: Open) -> None:
    with served_page(model) as address:
        opened = tab(address).open("/")
        page = opened.page
        model.problem = "The coordinator did not answer."
        page.get_by_text("This is not up to date. The coordinator did not answer.").wait_for()
        assert opened.violations() == []
        model.problem = None
        page.get_by_text("This is not up to date").wait_for(state="detached")
    page.get_by_text("The server of this page has not answered since").wait_for()
    assert page.get_by_role("heading", name="2 errors").count() == 1, "the known faults stay"
    opened.expected.append("Failed to load resource")  # the browser logs that the server does not answer


def test_open_page_shows_an_error_of_its_server(model: ModelSystem, model_page: str, tab: Open) -> None:
    """As while a service restarts, and where a proxy does not know it any more."""
    opened = tab(model_page).open("/")
    page = opened.page
    page.route("**/", lambda route: route.fulfill(status=503, content_type="text/plain", body="Restarting"))
    page.get_by_text('The server of this page has answered "503 Service Unavailable" since').wait_for()
    assert opened.violations() == []
    assert page.get_by_role("heading", name="2 errors").count() == 1, "the known faults stay"
    page.unroute("**/")
    page.route("**/", lambda route: route.fulfill(status=404, content_type="text/plain", body="No such path"))
    page.get_by_text('has answered "404 Not Found" since').wait_for()
    page.unroute("**/")
    page.route("**/", lambda route: route.abort())
    page.get_by_text("has not answered since").wait_for()
    page.unroute("**/")
    model.shown = healthy()
    page.get_by_role("heading", name="Nothing is wrong").wait_for()
    page.get_by_text("The server of this page has").wait_for(state="detached")
    page.get_by_role("button", name="Pause updates").wait_for()
    opened.expected.append("Failed to load resource")  # the browser logs statuses, and that nothing answers


@BOTH_WIDTHS
def test_a_key_is_looked_up(state_page: str, tab: Open, viewport: dict[str, int]) -> None:
    opened = tab(state_page, viewport=viewport).open("/keys")
    page = opened.page
    page.get_by_label("user").first.fill("5")
    page.get_by_label("Versions").fill("1, 3")
    page.get_by_role("button", name="Look up").click()
    page.get_by_role("heading", name="Versions side by side").wait_for()
    assert page.locator("tr.changed td").all_inner_texts() == ["5", "7"]
    assert not opened.overflows()


def test_a_key_is_watched(hosts: Served, state_page: str, tab: Open) -> None:
    opened = tab(state_page).open("/keys?key.user=150")
    page = opened.page
    page.get_by_role("button", name="Watch").click()
    page.get_by_text("Watching: changes show here").wait_for()
    n = 1_000
    while not page.locator("#watched tbody tr").count():  # the watch begins when the host is asked
        n += 1
        hosts.cluster.batch({150: (n, "watched")})
        page.wait_for_timeout(50)
    row = page.locator("#watched tbody tr").first
    assert "update" in row.inner_text() and "watched" in row.inner_text()
    assert opened.violations() == []
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()


def rows_of(download: Any) -> list[list[str]]:
    return list(csv.reader(Path(download.path()).read_text().splitlines()))


@BOTH_WIDTHS
def test_a_scan_with_a_chart_and_csv(state_page: str, tab: Open, viewport: dict[str, int]) -> None:
    page = tab(state_page, viewport=viewport).open("/scan").page
    page.locator("#column0").select_option("user")
    page.locator("#is0").select_option("<")
    page.locator("#value0").fill("3")
    page.get_by_role("button", name="Scan", exact=True).click()
    page.get_by_role("heading", name="3 rows at version").wait_for()
    assert page.locator("svg.bars rect").count() == 3
    page.locator("#y").select_option("user")
    page.get_by_role("button", name="Draw").click()
    page.get_by_text("user by user").wait_for()
    assert page.locator("#value0").input_value() == "3"
    with page.expect_download() as got:
        page.get_by_role("button", name="Download all as CSV").click()
    assert [row[0] for row in sorted(rows_of(got.value)[1:])] == ["0", "1", "2"]


@BOTH_WIDTHS
def test_a_statement_with_a_chart_and_csv(state_page: str, tab: Open, viewport: dict[str, int]) -> None:
    opened = tab(state_page, viewport=viewport).open("/sql")
    page = opened.page
    page.get_by_label("Statement").fill("select '<b0>' as t, user % 3 as third, count(*) as n from totals group by all")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("heading", name="3 rows").wait_for()
    assert page.locator("main b0").count() == 0 and "<b0>" in page.locator("table").inner_text()
    assert page.locator("svg.bars rect").count() == 3 and opened.violations() == []
    with page.expect_download() as got:
        page.get_by_role("button", name="Download as CSV").click()
    assert len(rows_of(got.value)) == 4
    page.get_by_label("Statement").fill("drop table totals")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("alert").wait_for()
    opened.expected.append("400")  # the browser logs the status


def test_a_savepoint_is_asked_for_and_followed(model: ModelSystem, model_page: str, tab: Open) -> None:
    page = tab(model_page, token=ACT).open("/savepoints?query=q-clicks").page
    page.get_by_label("Below the directory").fill("s3://bucket/saved")
    page.get_by_role("button", name="Make a savepoint").click()
    page.get_by_text("is being made").wait_for()
    model.status = SavepointStatus(known=True, path="s3://bucket/saved/savepoint-1")
    page.get_by_text("s3://bucket/saved/savepoint-1").wait_for()
    assert model.triggered == [("run-clicks", "s3://bucket/saved")]
    others = tab(model_page, token=LOOK).open("/savepoints?query=q-clicks").page
    assert others.get_by_role("button", name="Make a savepoint").count() == 0


@pytest.mark.thorough  # test_access.py sends what such a browser says
def test_cross_site_form_is_rejected_by_browser_headers(
    model: ModelSystem, model_page: str, tab: Open, browser: Any
) -> None:
    """The other site is the same machine by another name, so the cookie is another site's too."""
    evil = browser.new_context()
    try:
        page = evil.new_page()
        page.set_content(
            f'<form method="post" action="{model_page}/savepoints"><input name="query" value="run-clicks"></form>'
        )
        with page.expect_response(re.compile("/savepoints")) as got:
            page.evaluate("document.forms[0].submit()")
        assert got.value.status in (401, 403) and model.triggered == []
    finally:
        evil.close()


def test_content_policy_blocks_foreign_content(model: ModelSystem, model_page: str, tab: Open) -> None:
    opened = tab(model_page).open("/")
    opened.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);"
        " document.body.setAttribute('style', 'color: red'); }"
    )
    assert opened.page.evaluate("() => window.ran") is None
    assert sum("Content Security Policy" in problem for problem in opened.problems) >= 1
    opened.expected.append("Content Security Policy")


@pytest.mark.thorough  # test_pages.py reads the pages as they are sent
def test_pages_are_complete_without_scripts(model: ModelSystem, model_page: str, browser: Any) -> None:
    model.shown = replace(model.shown)
    context = browser.new_context(java_script_enabled=False, extra_http_headers={"Authorization": f"Bearer {ACT}"})
    try:
        page = context.new_page()
        for path in MODEL_PAGES:
            page.goto(model_page + path)
            assert page.locator("h1").count() == 1
        assert page.locator("#pause").is_hidden()
    finally:
        context.close()


def long_names() -> Overview:
    made = healthy()
    names = ("authorised", "unauthorised_attempts", "chargebacks", "merchants", "card_holders")
    operators = tuple(replace(made.queries[1].operators[0], name=name) for name in names)
    busy = replace(made.queries[1], name="card_payments_of_all_countries", operators=operators, lag_ms=90_000)
    return replace(made, queries=(busy, made.queries[0]))


@pytest.mark.parametrize("width", [400, 1400])
def test_names_do_not_break_within_words_and_cut_tables_say_so(
    model: ModelSystem, model_page: str, tab: Open, width: int
) -> None:
    model.shown = long_names()
    opened = tab(model_page, viewport={"width": width, "height": 900}).open("/")
    page = opened.page
    for name in ("authorised", "unauthorised_attempts"):
        link = page.get_by_role("link", name=name, exact=True)
        assert link.evaluate("e => e.getBoundingClientRect().height") < 30, f"{name} is on one line"
    for table in page.locator(".scroll").all():
        is_cut = table.evaluate("e => e.scrollWidth > e.clientWidth + 1")
        more = table.evaluate("e => getComputedStyle(e.nextElementSibling).display")
        assert (more != "none") == is_cut
    if width == 400:
        assert page.locator(".scroll.cut").count() == 1
        page.locator(".scroll").evaluate("e => { e.scrollLeft = e.scrollWidth; }")
        page.locator(".scroll.cut").wait_for(state="detached")  # not by a function, which the page's policy refuses
    opened.open("/query?query=q-clicks")
    rows = "[...document.querySelectorAll('#checkpoints tbody tr')]"
    heights = page.evaluate(f"{rows}.map(e => e.getBoundingClientRect().height)")
    assert max(heights) < 40, "no row of double height"
    assert opened.violations() == []
