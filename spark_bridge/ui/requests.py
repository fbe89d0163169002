"""A request as the views see it, and the answers of views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from backends.storage.sending.prices import STANDARD, Prices
from spark_bridge.exceptions import RequestError
from spark_bridge.overview import formats
from spark_bridge.overview.model import Fault, Overview, Query
from spark_bridge.overview.process_faults import COORDINATOR_PROCESS
from spark_bridge.queryable.server.tokens.token_verifier import Grant
from spark_bridge.ui.formats import value
from spark_bridge.ui.sign_in import form_token
from spark_bridge.ui.system import StateTable, System, reference, tables_of

if TYPE_CHECKING:
    from spark_bridge.queryable.sql.duckdb_connections import SqlLimits
    from spark_bridge.ui.overviews import LastOverview

MOST_NUMBER = 10**18


@dataclass(frozen=True)
class PageCall:
    """One request of somebody who may see the page.

    ``base`` is the path below which the page is served, without a slash at the end. ``secret`` is what the tokens of
    forms follow from. ``query`` and ``form`` have the last value of each name. ``prices`` are those of storage,
    ``sql_limits`` those of all SQL statements together.
    """

    system: System
    seen: LastOverview
    grant: Grant
    base: str
    path: str
    secret: str
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    prices: Prices = STANDARD
    sql_limits: SqlLimits | None = None

    @property
    def overview(self) -> Overview:
        """Return the overview that all of the answer is made of."""
        return self.seen.overview

    def given(self, name: str) -> str:
        """Return a parameter of the form or the address, "" if there is none."""
        return self.form.get(name, self.query.get(name, "")).strip()

    def number(self, name: str, default: int, least: int = 0, most: int = MOST_NUMBER) -> int:
        """Return a parameter that is a whole number. Raises ``RequestError``."""
        text = self.given(name)
        if not text:
            return default
        if not text.isdecimal() or not text.isascii() or not least <= int(text[:20]) <= most:
            raise RequestError(f"{name}={text[:50]!r} is no whole number from {least:,} to {most:,}.")
        return int(text)

    def named_query(self) -> Query:
        """Return the query that ``query`` names. Raises ``LookupError`` with those that there are."""
        return self.overview.query(self.given("query") or None)

    def url(self, path: str, **parameters: Any) -> str:
        """Return the address of a page. Parameters that are None or "" are left out."""
        given = {name: value for name, value in parameters.items() if value not in (None, "")}
        return f"{self.base}/{path}" + (f"?{urlencode(given)}" if given else "")

    def again(self, **changes: Any) -> str:
        """Return the address of this page with some parameters changed."""
        return self.url(self.path.strip("/"), **{**self.query, **changes})

    def table(self) -> StateTable | None:
        """Return the state variable that ``table`` names. Raises ``LookupError`` for one that there is not."""
        named = self.given("table")
        if not named:
            return None
        for table in tables_of(self.overview):
            if table.id == named:
                return table
        raise LookupError(f"There is no state {named[:200]!r}; choose one of those that there are.")

    def render(self, template: str, status: int = 200, **context: Any) -> Response:
        """Return a page."""
        text = (
            _environment()
            .get_template(template)
            .render(
                call=self,
                url=self.url,
                overview=self.overview,
                stale=self.seen.problem,
                form_token=form_token(self.secret),
                ref=lambda query: reference(query, self.overview.queries),
                query_url=lambda query: self.url("query", query=reference(query, self.overview.queries)),
                operator_url=lambda query, operator: self.url(
                    "operator", query=reference(query, self.overview.queries), operator=operator.name
                ),
                fault_url=self._fault_url(),
                **context,
            )
        )
        return HTMLResponse(text, status)

    def _fault_url(self) -> Any:
        links = subjects(self)
        return lambda fault: links.get(fault.subject, "")


def subjects(call: PageCall) -> dict[str, str]:
    """Return the page of each subject that a fault may name."""
    queries = call.overview.queries
    found = {f"host {host.host_id}": call.url("hosts") for host in call.overview.hosts}
    found["hosts"] = found[COORDINATOR_PROCESS] = call.url("hosts")
    for query in queries:
        ref = reference(query, queries)
        found[f"query {query.title}"] = call.url("query", query=ref)
        for operator in query.operators:
            subject = f"operator {operator.name} of query {query.title}"
            found[subject] = call.url("operator", query=ref, operator=operator.name)
    return found


def faults_about(faults: Iterable[Fault], *subjects_: str) -> list[Fault]:
    """Return the faults of some subjects."""
    return [fault for fault in faults if fault.subject in subjects_]


def plain_page(template: str, status: int = 200, **context: Any) -> Response:
    """Return a page for somebody who is not signed in."""
    return HTMLResponse(_environment().get_template(template).render(**context), status)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("spark_bridge.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        bytesize=formats.size,
        number=formats.number,
        rate=formats.rate,
        duration=formats.duration,
        moment=formats.moment,
        dollars=formats.dollars,
        cell=value,
    )
    return made
