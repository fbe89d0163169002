"""Access to the page: tokens in a header or in a cookie, and the tokens of forms."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

from starlette.datastructures import Headers

from spark_bridge.exceptions import AccessDeniedError
from spark_bridge.queryable.server.tokens.token_verifier import MAX_TOKEN, Grant, TokenVerifier

SESSION_COOKIE = "statestore_session"
VISIT_COOKIE = "statestore_visit"
"""A random number of a browser, by which the form to sign in is told from one of another site."""


class OwnToken:
    """A token that this process has made for the person who has started it, besides those that ``others`` know.

    It ends with the process. ``code`` may be exchanged for it once, so that an address can sign somebody in and is
    worth nothing afterwards.
    """

    def __init__(self, others: TokenVerifier | None, *, admin: bool) -> None:
        self.token = secrets.token_urlsafe(24)
        self._others = others
        self._grant = Grant("this page's own", read_only=True, admin=admin)
        self._code: str | None = secrets.token_urlsafe(18)

    @property
    def code(self) -> str | None:
        """The code, as long as nobody has used it."""
        return self._code

    def exchanged(self, code: str) -> str | None:
        """Return the token for the code, once; None for anything else."""
        if self._code is None or not _equal(code, self._code):
            return None
        self._code = None
        return self.token

    def verify(self, token: str) -> Grant:
        """See ``TokenVerifier``."""
        if _equal(token, self.token):
            return self._grant
        if self._others is None or not token:
            raise AccessDeniedError(
                "The token is unknown here; this page takes the one that was printed when it was started."
                if token
                else "No token was given."
            )
        return self._others.verify(token)


def token_of_request(headers: Headers, cookies: Mapping[str, str]) -> str:
    """Return the token of a request: that of ``Authorization: Bearer``, else the cookie's; "" if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    token = given.strip() if scheme.lower() == "bearer" else cookies.get(SESSION_COOKIE, "")
    return token if len(token) <= MAX_TOKEN else ""


def form_token(secret: str) -> str:
    """Return the token that a form of a page must send back: it follows from a cookie that no other site can read."""
    return hmac.digest(secret.encode(), b"form of the page", "sha256").hex()


def refusal_of_form(headers: Headers, secret: str, given: str) -> str | None:
    """Return why a form may come from another site; None if it comes from a page of ours.

    Three checks, of which each alone would do in a browser of today: where the browser says the request began
    (``Sec-Fetch-Site``), the ``Origin``, and the token of the form.
    """
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return "The form was sent by another site."
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return f"The form was sent by {origin[:100]!r}, not by this page."
    if not secret or not _equal(given, form_token(secret)):
        return "The form is of an earlier sign-in, or of another site. Load the page again, and send it once more."
    return None


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
