"""obstore's store for a location: which kind, with which options and credentials."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from backends.storage.locations import Location, store_options

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config, S3Credential, S3CredentialProvider

_MEMORY_STORES: dict[str, MemoryStore] = {}
_MEMORY_LOCK = threading.Lock()
# Retries are ours: obstore's know no clock that a test can turn, share no pace, and repeat no create.
_NO_RETRIES: RetryConfig = {"max_retries": 0}
# A part is tried again soon; the whole file is, if that does not help.
_RETRIES_OF_PARTS: RetryConfig = {
    "max_retries": 4,
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
    "retry_timeout": timedelta(seconds=60),
}


class ObjectStores:
    """obstore's stores of one location. Making one asks nobody. Many threads may share one.

    ``plain`` repeats nothing: that is the work of ``sending/sender.py``. ``in_parts`` is for large files that go up in
    parts, and repeats each part by itself. Raises obstore's errors, and ``ValueError``, for a wrong option.
    """

    def __init__(self, location: Location, options: Mapping[str, str]) -> None:
        self._location = location
        self._options = options
        self.plain = _make_store(location, options)
        self._in_parts: ObjectStore | None = None

    @property
    def in_parts(self) -> ObjectStore:
        """Return the store for large files."""
        if self._in_parts is None:
            self._in_parts = _make_store(self._location, self._options, _RETRIES_OF_PARTS)
        return self._in_parts

    @property
    def endpoint(self) -> str | None:
        """Return the endpoint of the service, if one was given."""
        config: Mapping[str, object] = getattr(self.plain, "config", None) or {}
        endpoint = config.get("endpoint")
        return None if endpoint is None else str(endpoint)

    @property
    def bucket(self) -> str:
        """Return the bucket with the service that has it: what is asked for fewer requests."""
        return f"{self._location.kind}://{self._location.container} {self.endpoint or ''}".strip()

    def renew(self) -> None:
        """Ask for credentials again with the next requests: those that stores have fetched go with the stores."""
        self.plain, self._in_parts = _make_store(self._location, self._options), None


def _make_store(location: Location, options: Mapping[str, str], retries: RetryConfig = _NO_RETRIES) -> ObjectStore:
    """Make the store of a location, rooted at its bucket, container or '/'. Stores in memory are shared by name."""
    if location.kind == "local":
        return LocalStore()
    if location.kind == "memory":
        with _MEMORY_LOCK:
            return _MEMORY_STORES.setdefault(location.container, MemoryStore())
    mapped = store_options(location, options)
    client = cast("ClientConfig", mapped.client)
    if location.kind == "s3":
        return S3Store(
            location.container,
            config=cast("S3Config", _above_environment(mapped.config)),
            client_options=client,
            retry_config=retries,
            credential_provider=_tokenless_credentials(mapped.config),
        )
    if location.kind == "gs":
        gcs: GCSStore = GCSStore.from_url(
            f"gs://{location.container}",
            config=mapped.config,  # type: ignore[arg-type]
            client_options=client,
            retry_config=retries,
        )
        return gcs
    azure: AzureStore = AzureStore.from_url(
        f"abfss://{location.container}",
        config=mapped.config,  # type: ignore[arg-type]
        client_options=client,
        retry_config=retries,
    )
    return azure


def _above_environment(config: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """Return obstore's configuration with the options above the ``AWS_*`` variables of the environment.

    obstore adds what the variables say, even if the options say otherwise.
    """
    own: dict[str, str | bool] = {"conditional_put": "etag", **config}
    if "access_key_id" in config:
        own.setdefault("skip_signature", False)
    if "endpoint" in config and "AWS_ENDPOINT_URL_S3" in os.environ:
        own.setdefault("aws_endpoint_url_s3", config["endpoint"])
    return own


def _tokenless_credentials(config: Mapping[str, str | bool]) -> S3CredentialProvider | None:
    """Return the given keys without a token, if the environment has a token; None otherwise.

    obstore would send the token, which belongs to other keys.
    """
    key, secret = config.get("access_key_id"), config.get("secret_access_key")
    has_token = not config.keys().isdisjoint(("session_token", "aws_session_token", "token"))
    if not key or not secret or has_token or "AWS_SESSION_TOKEN" not in os.environ:
        return None
    credential: S3Credential = {
        "access_key_id": str(key),
        "secret_access_key": str(secret),
        "token": None,
        "expires_at": None,
    }
    return lambda: credential
