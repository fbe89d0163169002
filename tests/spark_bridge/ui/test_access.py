"""Who may see the page and who may act; forms of other sites, hostile input, and the headers that keep browsers in
check.

``statestore ui``, and that a wheel carries what the page is made of.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys

import httpx
import pytest
from starlette.testclient import TestClient

from spark_bridge.cli.main import app
from spark_bridge.ui import app as page_app
from spark_bridge.ui.app import POLICY, POSTED, SEEN, create_ui
from spark_bridge.ui.requests import SESSION_COOKIE, OwnToken, form_token
from tests.command_line import CliRunner
from tests.docs.pages import ROOT
from tests.spark_bridge.state_data.format_fixtures import Stored
from tests.spark_bridge.ui.conftest import Look
from tests.spark_bridge.ui.systems import ACT, HOSTILE, LOOK, PROCESSES, Forms, ModelSystem, Tokens, healthy, in_trouble

HTML = {"Accept": "text/html"}
ROOTS = pytest.mark.parametrize("root", ["", "/state/ui"])


def browser(root: str = "", system: ModelSystem | None = None, tokens: Tokens | None = None) -> TestClient:
    app = create_ui(system or ModelSystem(healthy()), tokens or Tokens())
    return TestClient(app, headers=HTML, root_path=root, follow_redirects=False)


def sign_in(client: TestClient, token: str, root: str = "", following: str = "") -> None:
    shown = client.get(f"{root}/signin")
    fields = {**Forms(shown.text).hidden, "token": token, "next": following}
    answer = client.post(f"{root}/signin", data=fields)
    assert answer.status_code == 303, answer.text


# -- signing in and out ------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*SEEN, "/watch"])
def test_without_a_token_nothing_is_shown(path: str) -> None:
    client = browser()
    answer = client.get(path, params={"query": "q-clicks"})
    assert answer.status_code == 401 and "clicks" not in answer.text.replace("q-clicks", "")
    assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401


@pytest.mark.parametrize("path", [*POSTED, "/signout"])
def test_without_a_token_nothing_is_sent(path: str) -> None:
    system = ModelSystem(healthy())
    assert browser(system=system).post(path, data={"query": "q-clicks"}).status_code in (401, 403)
    assert system.triggered == []


@ROOTS
def test_session_cookie_is_hidden_from_scripts_and_other_sites(root: str) -> None:
    client = browser(root)
    shown = client.get(f"{root}/signin")
    answer = client.post(f"{root}/signin", data={**Forms(shown.text).hidden, "token": LOOK, "next": "/hosts?from=0"})
    assert answer.headers["location"] == f"{root}/hosts?from=0"
    cookie = next(c for c in answer.headers.get_list("set-cookie") if c.startswith(SESSION_COOKIE))
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and f"Path={root or '/'}" in cookie
    assert client.get(f"{root}/").status_code == 200
    left = client.post(f"{root}/signout", data=Forms(client.get(f"{root}/").text).hidden)
    assert left.headers["location"] == f"{root}/signin" and client.get(f"{root}/").status_code == 401


def test_sign_in_redirects_to_the_requested_page() -> None:
    client = browser()
    shown = client.get("/query?query=q-clicks")
    answer = client.post("/signin", data={**Forms(shown.text).hidden, "token": LOOK})
    assert answer.headers["location"] == "/query?query=q-clicks"


@pytest.mark.parametrize(
    "hostile", ["//evil.example", "/\\evil.example", "https://evil.example", "/a\r\nX: y", "javascript:1"]
)
def test_sign_in_does_not_redirect_to_other_sites(hostile: str) -> None:
    client = browser()
    fields = {**Forms(client.get("/signin").text).hidden, "token": LOOK, "next": hostile}
    assert client.post("/signin", data=fields).headers["location"] == "/"


def test_wrong_tokens_and_process_tokens_cannot_sign_in() -> None:
    client = browser()
    hidden = Forms(client.get("/signin").text).hidden
    for token, why in (("wrong", "unknown"), ("", "No token"), (PROCESSES, "token issue --admin")):
        answer = client.post("/signin", data={**hidden, "token": token})
        assert answer.status_code == 401 and why in answer.text and SESSION_COOKIE not in client.cookies


def test_a_revoked_token_ends_the_session() -> None:
    tokens = Tokens()
    client = browser(tokens=tokens)
    sign_in(client, LOOK)
    assert client.get("/").status_code == 200
    tokens.revoked.add(LOOK)
    assert client.get("/").status_code == 401


def test_the_code_of_an_address_signs_in_once() -> None:
    own = OwnToken(None, admin=True)
    app = create_ui(ModelSystem(healthy()), own, own)
    first, second = (TestClient(app, headers=HTML, follow_redirects=False) for _ in range(2))
    code = own.code
    assert first.get("/signin?code=guess").status_code == 401
    assert first.get(f"/signin?code={code}").status_code == 303 and first.get("/").status_code == 200
    again = second.get(f"/signin?code={code}")
    assert again.status_code == 401 and "used already" in again.text and second.get("/").status_code == 401
    sign_in(second, own.token)
    assert second.get("/").status_code == 200


# -- acting ------------------------------------------------------------------------------------


def forms_of(client: TestClient) -> dict[str, str]:
    return Forms(client.get("/savepoints?query=q-clicks").text).hidden


def test_a_read_only_token_sees_and_does_not_act() -> None:
    system = ModelSystem(healthy())
    client = browser(system=system)
    sign_in(client, LOOK)
    shown = client.get("/savepoints?query=q-clicks")
    assert "Make a savepoint</button>" not in shown.text
    refused = client.post("/savepoints", data=forms_of(client))
    assert refused.status_code == 403 and "administrator" in refused.text and system.triggered == []


def test_an_admin_token_acts() -> None:
    system = ModelSystem(healthy())
    client = browser(system=system)
    sign_in(client, ACT)
    assert "Make a savepoint</button>" in client.get("/savepoints?query=q-clicks").text
    answer = client.post("/savepoints", data={**forms_of(client), "path": "s3://bucket/saved"})
    assert answer.status_code == 303 and system.triggered == [("run-clicks", "s3://bucket/saved")]
    assert "is being made" in client.get(answer.headers["location"]).text
    refused = client.post("/savepoints", data={**forms_of(client), "path": "relative/path"})
    assert refused.status_code == 400 and len(system.triggered) == 1


@pytest.mark.parametrize(
    ("headers", "changes"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, {}),
        ({"Sec-Fetch-Site": "same-site"}, {}),
        ({"Origin": "https://evil.example"}, {}),
        ({"Origin": "null"}, {}),
        ({}, {"form_token": ""}),
        ({}, {"form_token": form_token("another session")}),
    ],
)
def test_a_form_of_another_site_is_refused(headers: dict[str, str], changes: dict[str, str]) -> None:
    system = ModelSystem(healthy())
    client = browser(system=system)
    sign_in(client, ACT)
    fields = {**forms_of(client), "statement": "select 1", **changes}
    for path in (*POSTED, "/signout"):
        assert client.post(path, data=fields, headers=headers).status_code == 403, path
    assert system.triggered == [] and client.get("/").status_code == 200
    own = {"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/savepoints", data=forms_of(client), headers=own).status_code == 303


def test_signing_in_is_refused_from_another_site() -> None:
    client = browser()
    hidden = Forms(client.get("/signin").text).hidden
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert client.post("/signin", data={**hidden, "token": ACT}, headers=headers).status_code == 403
    assert browser().post("/signin", data={**hidden, "token": ACT}).status_code == 403  # the cookie is missing


def test_forms_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    client = browser()
    sign_in(client, ACT)
    large = client.post("/sql", data={"statement": "x" * 70_000})
    assert large.status_code == 413
    assert client.post("/sql", json={"statement": "select 1"}).status_code == 415
    monkeypatch.setattr(page_app, "MAX_PAGE_REQUESTS", 0)
    assert client.get("/").status_code == 429


# -- headers, and hostile input ----------------------------------------------------------------


def test_every_response_has_security_headers(look: Look) -> None:
    client = look(ModelSystem(in_trouble()))
    for path in (*SEEN, "/signin", "/static/page.css", "/static/page.js", "/nothing", "/static/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == POLICY and headers["x-content-type-options"] == "nosniff", path
        assert headers["cache-control"] == ("no-cache" if "static" in path else "no-store")
    assert "unsafe" not in POLICY and "default-src 'none'" in POLICY


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_parameters_are_escaped(text: str, look: Look) -> None:
    client = look(ModelSystem(healthy()))
    names = (
        "operator",
        "by",
        "sort",
        "table",
        "key.user",
        "versions",
        "request",
        "directory",
        "name",
        "x",
        "y",
        "column0",
    )
    for path in SEEN:
        for right in (
            {"query": "q-clicks", "operator": "totals"},
            {"query": "q-clicks"},
            {"query": text, "from": text},
        ):
            answer = client.get(path, params={**dict.fromkeys(names, text), **right})
            assert answer.status_code in (200, 400, 404), path
            assert Forms(answer.text).suspect == [], path
            assert not re.search(r"\b1337\b", answer.text)
    for path in POSTED:
        fields = {"form_token": form_token(ACT), "statement": text, "query": "q-clicks", "path": text, "name": text}
        answer = client.post(path, data=fields, follow_redirects=False)
        assert answer.status_code in (200, 303, 400, 404) and Forms(answer.text).suspect == []
        if answer.status_code == 303:
            assert answer.headers["location"].startswith("/savepoints?")


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.long
def test_the_page_of_a_checkpoint_is_served_by_the_command() -> None:
    checkpoint = str(Stored("file").checkpoint)
    command = [sys.executable, "-m", "ray_statestore", "ui", "--checkpoint", checkpoint, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told, token = process.stdout.readline(), process.stdout.readline().split()[-1]
            address = re.findall(r"http://\S+", told)[0]
            base = address.partition("/signin")[0]
            with httpx.Client(base_url=base, headers={"Accept": "text/html"}, follow_redirects=True) as browser:
                assert browser.get("/").status_code == 401
                assert "Nothing is wrong" in browser.get(address).text
                assert "server" not in browser.get("/").headers
            assert httpx.get(f"{base}/query", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        finally:
            process.terminate()
    assert process.returncode is not None


def test_location_without_state_is_rejected_before_serving() -> None:
    outcome = CliRunner().invoke(app, ["ui", "--checkpoint", str(ROOT / "docs")])
    assert outcome.exit_code == 2 and "query.json" in outcome.output


def test_a_wheel_carries_templates_and_static_files() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["spark_bridge"]
    package = ROOT / "spark_bridge"
    files = [
        p.relative_to(package).as_posix() for d in ("static", "templates") for p in (package / "ui" / d).rglob("*")
    ]
    assert len(files) > 15
    assert [name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in data)] == []
