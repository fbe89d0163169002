"""The meaning of obstore's errors: may the request be repeated, must it slow down, does it need new credentials?

obstore gives HTTP statuses and the service's codes only in the texts of its errors.
"""

from __future__ import annotations

import errno
import re

from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, UnauthenticatedError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_OUT_OF_RANGE = re.compile(r"status code: 416|StartTooLarge")
_REFUSED = re.compile(r"request failed for key .*\(code: (\w+)\)")
"""S3's answer to a bulk removal says 200, and names those that it has not removed."""
_WORD = re.compile(r"\S+")
_THROTTLING = {"SlowDown", "ServiceUnavailable", "ServerBusy"}
_PASSING = {"InternalError", *_THROTTLING}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_TRANSIENT_ERRNOS = {errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT}


def is_transient(error: BaseError | OSError, *, is_local: bool) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, OSError):
        # A large file's last answer was lost, and obstore tried to take back what is complete already.
        if code(error) == "NoSuchUpload":
            return True
        return error.errno in _TRANSIENT_ERRNOS or isinstance(error, TimeoutError | ConnectionError)
    if is_local:
        return False
    if isinstance(error, AlreadyExistsError):
        return True
    refused = _REFUSED.search(str(error))
    if refused is not None:
        return refused[1] in _PASSING
    status = _status(error)
    if not status:
        return isinstance(error, GenericError) and "redirect" not in str(error)
    # S3 answers 400 to a request that arrived too slowly.
    return status[0] == "5" or status in ("408", "429") or code(error) == "RequestTimeout"


def is_throttling(error: BaseException) -> bool:
    """Return whether the service says that it gets too many requests: S3's SlowDown, or 503 or 429 without a body."""
    refused = _REFUSED.search(str(error))
    told = refused[1] if refused is not None else code(error)
    return told in _THROTTLING or (not told and _status(error) in ("503", "429"))


def is_expired(error: BaseException, *, has_body: bool) -> bool:
    """Return whether the credentials of a request were valid once and may be no longer.

    The answer to HEAD has no body with a code: S3 says 400 to one whose token has expired, and to hardly anything else.
    """
    if isinstance(error, UnauthenticatedError) or code(error) in _EXPIRED:
        return True
    return not has_body and _status(error) == "400"


def is_out_of_range(error: BaseException) -> bool:
    """Return whether a range begins after the end of the file; one that only ends there is cut short."""
    return _OUT_OF_RANGE.search(str(error)) is not None


def check_bucket(error: FileNotFoundError) -> None:
    """Raise the error again if the bucket is missing: then nothing is known of the file."""
    if code(error) == "NoSuchBucket":
        raise error


def code(error: BaseException) -> str:
    """Return the service's code of an error, "" if there is none."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def first_line(error: BaseException) -> str:
    """Return the text of an error, short enough for a message."""
    line = str(error).split("\n", 1)[0].split("<?xml", 1)[0].rstrip(": ")
    return f"{line}: {code(error)}" if code(error) else line


def for_people(text: str, most: int) -> str:
    """Return a text about storage as it may be shown: not longer than ``most``, and addresses without parameters.

    A signature may be among these. What is too long loses its middle: services say at the end what was wrong.
    """
    shown = _WORD.sub(lambda word: _without_parameters(word[0]), text)
    half = (most - 5) // 2
    return shown if len(shown) <= most else f"{shown[:half]} ... {shown[-half:]}"


def _without_parameters(word: str) -> str:
    address = word.find("://")
    at = word.find("?", address)
    return word if -1 in (address, at) else f"{word[:at]}?..."


def _status(error: BaseException) -> str:
    found = _STATUS.search(str(error))
    return found[1] if found else ""
