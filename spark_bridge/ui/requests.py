"""A request as the views see it, and the answers of views."""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response

from backends.storage.requests import STANDARD, Prices
from coordinator_actor.messages import SavepointStatus
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.exceptions import STATESTORE_ERRORS, AccessDeniedError, RequestError
from spark_bridge.overview import model
from spark_bridge.overview.faults import COORDINATOR_PROCESS
from spark_bridge.overview.model import CLUSTER, Fault, Overview, Query
from spark_bridge.queryable.client.client import QueryableStateClient, scoped_client
from spark_bridge.queryable.client.watch import StateChange
from spark_bridge.queryable.server.tokens import MAX_TOKEN, Grant, TokenVerifier
from spark_bridge.state_format.layouts import ROLLING
from spark_bridge.ui.charts import value

if TYPE_CHECKING:
    from spark_bridge.queryable.sql.sql import SqlLimits

# Access to the page: tokens in a header or in a cookie, and the tokens of forms.


SESSION_COOKIE = "statestore_session"
VISIT_COOKIE = "statestore_visit"
"""A random number of a browser, which distinguishes our sign-in form from one of another site."""


class OwnToken:
    """A token that this process has made for the person who has started it, in addition to those that ``others`` know.

    It ends with the process. ``code`` may be exchanged for it once, so that an address can sign a person in and is
    worthless afterwards.
    """

    def __init__(self, others: TokenVerifier | None, *, admin: bool) -> None:
        self.token = secrets.token_urlsafe(24)
        self._others = others
        self._grant = Grant("this page's own", read_only=True, admin=admin)
        self._code: str | None = secrets.token_urlsafe(18)

    @property
    def code(self) -> str | None:
        """The code, until it is used."""
        return self._code

    def exchanged(self, code: str) -> str | None:
        """Return the token for the code, once; None for anything else."""
        if self._code is None or not _equal(code, self._code):
            return None
        self._code = None
        return self.token

    def verify(self, token: str) -> Grant:
        if _equal(token, self.token):
            return self._grant
        if not token:
            raise AccessDeniedError("No token was given.")
        if self._others is None:
            unknown = "The token is unknown here; this page takes the one that was printed when it was started."
            raise AccessDeniedError(unknown)
        return self._others.verify(token)


def token_of_request(headers: Headers, cookies: Mapping[str, str]) -> str:
    """Return the token of a request: that of ``Authorization: Bearer``, else the cookie's; "" if there is none."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    token = credentials.strip() if scheme.lower() == "bearer" else cookies.get(SESSION_COOKIE, "")
    return token if len(token) <= MAX_TOKEN else ""


def form_token(secret: str) -> str:
    """Return the token that a form of a page must send back: it follows from a cookie that no other site can read."""
    return hmac.digest(secret.encode(), b"form of the page", "sha256").hex()


def refusal_of_form(headers: Headers, secret: str, token: str) -> str | None:
    """Return why a form may come from another site; None if it comes from a page of ours.

    Makes three checks; each alone is enough in a current browser: the origin of the request according to the browser
    (``Sec-Fetch-Site``), the ``Origin``, and the token of the form.
    """
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return "The form was sent by another site."
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return f"The form was sent by {origin[:100]!r}, not by this page."
    if not secret or not _equal(token, form_token(secret)):
        return "The form is of an earlier sign-in, or of another site. Load the page again, and send the form again."
    return None


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))


# The interface of the page to the system that it shows: a running cluster or a checkpoint (``live``).


class System(Protocol):
    """The data behind the page. All calls block, and may come from several threads."""

    is_live: bool
    """Whether the page shows a cluster, which people may act on."""
    place: str
    """The source of the page, in words: the namespace of a cluster, or the location of a checkpoint."""

    def overview(self) -> Overview:
        """Return the overview as it is now."""

    def client(self) -> QueryableStateClient:
        """Return the client, made when it is needed first."""

    def recent_changes(self, table: StateTable, since: int, until: int) -> Iterator[StateChange]:
        """Yield the changes of the completed versions after ``since`` up to ``until``, in any order."""

    def savepoints(self, query: Query, base: str | None = None) -> list[SavepointInfo]:
        """Return the savepoints in a directory, by default the one next to the state of the query."""

    def describe_savepoint(self, path: str, *, check_files: bool = False) -> SavepointInfo:
        """Describe a savepoint, and with ``check_files`` read all of its files."""

    def trigger_savepoint(self, request_id: str, query: str, path: str | None) -> None:
        """Begin a savepoint of a running query."""

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        """Return how far a savepoint is."""


@dataclass(frozen=True)
class StateTable:
    """One state variable of an operator of a query, as the page names it. ``id`` names it in addresses.

    ``schema_version`` is the version that has the columns; None means the newest.
    """

    query: str
    query_title: str
    operator: str
    state: str
    kind: str
    key: tuple[str, ...]
    window: str | None
    versions: range
    types: dict[str, str] = field(default_factory=dict, hash=False)
    schema_version: int | None = None

    @property
    def is_rolling(self) -> bool:
        return self.kind == ROLLING

    @property
    def id(self) -> str:
        return state_id(self.query, self.operator, self.state)

    @property
    def title(self) -> str:
        of = self.operator if self.state == "default" else f"{self.operator}.{self.state}"
        return f"{of} of {self.query_title}"


def reference(query: Query, queries: Iterable[Query]) -> str:
    """Return how addresses name a query: by its id, which stays, or by its run if several runs have that id."""
    return query.query_id if sum(q.query_id == query.query_id for q in queries) == 1 else query.run_id


def tables_of(overview: Overview) -> list[StateTable]:
    """Return the state variables of all queries."""
    return [
        StateTable(
            reference(query, overview.queries),
            query.title,
            operator.name,
            variable.name,
            variable.kind,
            tuple(name for name in variable.key if name != variable.window),
            variable.window,
            range(first, last + 1),
            {**variable.key, **variable.inner, **variable.value},
            # If a manifest is damaged, the newest version may be missing.
            query.readable[-1][-1] if query.readable else None,
        )
        for query in overview.queries
        for first, last in query.readable[-1:] or ((query.oldest_version or 0, query.completed_version),)
        for operator in query.operators
        for variable in operator.variables
    ]


def state_id(query: str, operator: str, state: str) -> str:
    """Return the name of a state variable in addresses: three parts, with escaped slashes."""
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in (query, operator, state))


MAX_NUMBER = 10**18


@dataclass(frozen=True)
class PageCall:
    """One request of a person who may see the page.

    ``base`` is the path that the page is served below, without a slash at the end. The tokens of forms are derived from
    ``secret``. ``query`` and ``form`` have the last value of each name. ``prices`` are those of storage,
    ``sql_limits`` those of all SQL statements together.
    """

    system: System
    seen: LastOverview
    grant: Grant
    base: str
    path: str
    secret: str = field(repr=False)
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    prices: Prices = STANDARD
    sql_limits: SqlLimits | None = None

    @property
    def overview(self) -> Overview:
        """Return the overview that all of the answer is made of: what the person may see."""
        return self.seen.overview

    @property
    def may_name_places(self) -> bool:
        """Return whether the person may name a directory, which may have savepoints of any query."""
        return self.grant.admin and self.grant.scope.is_all

    def client(self) -> QueryableStateClient:
        return scoped_client(self.system.client(), self.grant.scope)

    def given(self, name: str) -> str:
        """Return a parameter of the form or the address, "" if there is none."""
        return self.form.get(name, self.query.get(name, "")).strip()

    def number(self, name: str, default: int, least: int = 0, most: int = MAX_NUMBER) -> int:
        """Return a parameter that is a whole number. Raises ``RequestError``."""
        text = self.given(name)
        if not text:
            return default
        if not text.isdecimal() or not text.isascii() or not least <= int(text[:20]) <= most:
            raise RequestError(f"{name}={text[:50]!r} is not a whole number from {least:,} to {most:,}.")
        return int(text)

    def named_query(self) -> Query:
        """Return the query that ``query`` names. Raises ``LookupError`` naming the existing ones."""
        return self.overview.query(self.given("query") or None)

    def url(self, path: str, **parameters: Any) -> str:
        """Return the address of a page. Parameters that are None or "" are left out."""
        query = {name: value for name, value in parameters.items() if value not in (None, "")}
        return f"{self.base}/{path}" + (f"?{urlencode(query)}" if query else "")

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
        raise LookupError(f"The state {named[:200]!r} does not exist; choose an existing one.")

    def render(self, template: str, status: int = 200, **context: Any) -> Response:
        links = subjects(self)

        def ref(query: Query) -> str:
            return reference(query, self.overview.queries)

        return plain_page(
            template,
            status,
            call=self,
            url=self.url,
            overview=self.overview,
            stale=self.seen.problem,
            form_token=form_token(self.secret),
            ref=ref,
            query_url=lambda query: self.url("query", query=ref(query)),
            operator_url=lambda query, operator: self.url("operator", query=ref(query), operator=operator.name),
            fault_url=lambda fault: links.get(fault.subject, ""),
            **context,
        )


def subjects(call: PageCall) -> dict[str, str]:
    """Return the page of each subject that a fault may name."""
    queries = call.overview.queries
    links = {f"host {host.host_id}": call.url("hosts") for host in call.overview.hosts}
    links["hosts"] = links[COORDINATOR_PROCESS] = call.url("hosts")
    for query in queries:
        ref = reference(query, queries)
        links[f"query {query.title}"] = call.url("query", query=ref)
        for operator in query.operators:
            subject = f"operator {operator.name} of query {query.title}"
            links[subject] = call.url("operator", query=ref, operator=operator.name)
    return links


def faults_about(faults: Iterable[Fault], *subjects_: str) -> list[Fault]:
    """Return the faults of some subjects."""
    return [fault for fault in faults if fault.subject in subjects_]


def plain_page(template: str, status: int = 200, **context: Any) -> Response:
    """Return a page. People who are not signed in see those without a ``PageCall``."""
    return HTMLResponse(_environment().get_template(template).render(**context), status)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("spark_bridge.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytesize=model.size,
        number=model.number,
        rate=model.rate,
        duration=model.duration,
        moment=model.moment,
        dollars=model.dollars,
        cell=value,
    )
    return environment


# The overview that requests share: made at most once a second, for any number of people.


log = logging.getLogger(__name__)

PAGE_FRESH_SECONDS = 1.0
RECENT_SECONDS = 10.0
RECENT_WAIT_SECONDS = 0.05
"""A request waits at most this many seconds for a newer overview if the last one is younger than ``RECENT_SECONDS``:
pages stay quick where thousands of partitions take longer to be described, and where hosts do not answer.
"""
OVERVIEW_WAIT_SECONDS = 1.0
"""The same if the last overview is older than ``RECENT_SECONDS``, as for the first who looks again."""
OLD_SECONDS = 30.0
"""An older overview is shown with a note of its age."""


@dataclass(frozen=True)
class LastOverview:
    """An overview, and why there is no newer one, if an attempt to get one has failed."""

    overview: Overview
    problem: str | None = None


class SharedOverview:
    """Asks for the overview, in one thread for all requests that arrive during the query.

    If the query fails, the last overview stays, with the reason: then a page still shows the last known state.
    """

    def __init__(self, ask: Callable[[], Overview], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: LastOverview | None = None
        self._seen_at = 0.0
        self._asking: threading.Event | None = None

    def get(self) -> LastOverview:
        """Return the overview, not older than ``PAGE_FRESH_SECONDS`` if it arrives in time.

        That is within ``RECENT_WAIT_SECONDS`` if the last one is younger than ``RECENT_SECONDS``, within
        ``OVERVIEW_WAIT_SECONDS`` if it is older, and without a limit if there is none.
        """
        with self._lock:
            seen = self._seen
            if seen is not None and self._clock() - self._seen_at < PAGE_FRESH_SECONDS:
                return seen
            if self._asking is None:
                self._asking = threading.Event()
                args = (self._asking,)
                threading.Thread(target=self._refresh, args=args, name="statestore-page", daemon=True).start()
            asking, age = self._asking, self._clock() - self._seen_at
        asking.wait(None if seen is None else RECENT_WAIT_SECONDS if age < RECENT_SECONDS else OVERVIEW_WAIT_SECONDS)
        with self._lock:
            assert self._seen is not None, "it is set before the event"
            age = self._clock() - self._seen_at
            if age > OLD_SECONDS and self._seen.problem is None:
                return replace(self._seen, problem=f"This data is {age:.0f} s old: coordinator and hosts are slow.")
            return self._seen

    def _refresh(self, done: threading.Event) -> None:
        overview = self._next()
        with self._lock:
            self._seen, self._seen_at, self._asking = overview, self._clock(), None
        done.set()

    def _next(self) -> LastOverview:
        try:
            return LastOverview(self._ask())
        except (*STATESTORE_ERRORS, LookupError) as error:
            problem = str(error)
        except Exception as error:
            log.exception("The overview could not be made")
            problem = f"The overview could not be made ({type(error).__name__}); the log of this process says why."
        last = self._seen or LastOverview(Overview(CLUSTER, int(time.time() * 1000)))
        return replace(last, problem=problem)
