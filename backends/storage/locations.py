"""Addresses of state: a directory as Spark names it, as obstore's store and options; and references to files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import xxhash
from msgspec import Struct

from backends.exceptions import InvalidStateStoreArgument, UnsupportedLocationError

REMEDY = (
    "Keep Spark's checkpoint where it is and put the state elsewhere with state_location=, at one of: "
    "a local path, file:, hdfs://, s3://, s3a://, gs://, abfss://, memory://."
)
_CLOUD = {"s3": "s3", "s3a": "s3", "gs": "gs", "abfss": "abfss", "abfs": "abfss"}
_SPARK_PREFIXES = ("spark.hadoop.fs.", "fs.")


@dataclass(frozen=True)
class Location:
    """A parsed address. ``kind`` is "local", "memory", "hdfs", "s3", "gs" or "abfss".

    ``text`` is the normalised address; ``container`` a bucket, container or memory store's name, or the NameNode or
    nameservice of HDFS, which may be empty;
    ``prefix`` the directory in it, without slashes at its ends (for "local": the absolute path).
    """

    kind: str
    text: str
    container: str
    prefix: str


@dataclass(frozen=True)
class StoreOptions:
    """The ``config`` and ``client_options`` of obstore for one cloud store."""

    config: dict[str, str | bool] = field(default_factory=dict)
    client: dict[str, bool] = field(default_factory=dict)


def parse_location(location: str) -> Location:
    """Parse an address as Spark writes it. Raises ``UnsupportedLocationError`` with the remedy.

    As in Hadoop's ``Path``, a ``file:`` address is taken literally: ``%20`` in it is not decoded.
    """
    if not isinstance(location, str) or not location.strip():
        raise InvalidStateStoreArgument(f"{location!r} is not a location: give the directory to keep the state in.")
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return _local(location)
    scheme = scheme.lower()
    if scheme == "file":
        return _local(_without_host(location, rest))
    parts = urlsplit(location)
    container = parts.netloc
    # Not parts.path: '?' and '#' are letters like any other in a Hadoop path.
    prefix = rest.removeprefix("//")[len(container) :].strip("/") if rest.startswith("//") else ""
    if scheme == "memory":
        return Location("memory", _join(f"memory://{container}", prefix), container, prefix)
    if scheme == "hdfs":
        prefix = prefix if rest.startswith("//") else rest.strip("/")
        return Location("hdfs", _join(f"hdfs://{container}", prefix), container, prefix)
    if scheme not in _CLOUD:
        raise UnsupportedLocationError(f"State cannot be kept at {location!r}: {scheme}: is not supported. {REMEDY}")
    if not container:
        raise UnsupportedLocationError(f"{location!r} names no bucket or container. {REMEDY}")
    kind = _CLOUD[scheme]
    return Location(kind, _join(f"{kind}://{container}", prefix), container, prefix)


def _local(path: str) -> Location:
    absolute = str(Path(path).expanduser().absolute())
    return Location("local", absolute, "", absolute)


def _without_host(location: str, rest: str) -> str:
    if not rest.startswith("//"):
        return rest
    host, slash, path = rest[2:].partition("/")
    if host not in ("", "localhost"):
        raise UnsupportedLocationError(f"{location!r} names the host {host!r}; a file: address has none. {REMEDY}")
    return slash + path


def _join(base: str, prefix: str) -> str:
    return f"{base}/{prefix}" if prefix else base


def store_options(location: Location, options: Mapping[str, str]) -> StoreOptions:
    """Return obstore's options for a cloud location, from Spark's and obstore's own.

    Spark's are recognised as ``spark.hadoop.fs.s3a.*`` and ``fs.s3a.*``, per bucket as well
    (``fs.s3a.bucket.<name>.*``, which wins). Keys without such a prefix are passed to obstore unchanged and win over
    Spark's. Other settings of Spark and Hadoop do not concern storage and are left out.
    """
    own = {k: v for k, v in options.items() if not k.startswith(("spark.", "fs."))}
    result = _s3_options(location.container, options) if location.kind == "s3" else StoreOptions()
    result.config.update(own)
    if str(result.config.get("endpoint", "")).startswith("http://"):
        result.client["allow_http"] = True
    return result


def _s3_options(bucket: str, options: Mapping[str, str]) -> StoreOptions:
    settings: dict[str, str] = {}
    per_bucket: dict[str, str] = {}
    for key, value in options.items():
        for prefix in _SPARK_PREFIXES:
            if key.startswith(f"{prefix}s3a.bucket.{bucket}."):
                per_bucket[key.removeprefix(f"{prefix}s3a.bucket.{bucket}.")] = value
            elif key.startswith(f"{prefix}s3a."):
                settings[key.removeprefix(f"{prefix}s3a.")] = value
    settings.update(per_bucket)
    copied = {
        "access.key": "access_key_id",
        "secret.key": "secret_access_key",
        "session.token": "session_token",
        "endpoint.region": "region",
    }
    config: dict[str, str | bool] = {theirs: settings[name] for name, theirs in copied.items() if settings.get(name)}
    if "AnonymousAWSCredentialsProvider" in settings.get("aws.credentials.provider", ""):
        config["skip_signature"] = True
    path_style = _flag("path.style.access", settings.get("path.style.access", "false"))
    endpoint = settings.get("endpoint", "")
    if endpoint:
        config["endpoint"] = _endpoint(bucket, endpoint, settings, path_style)
        config.setdefault("region", "us-east-1")
    config["virtual_hosted_style_request"] = not path_style
    return StoreOptions(config)


def _endpoint(bucket: str, endpoint: str, settings: Mapping[str, str], path_style: bool) -> str:
    scheme, separator, host = endpoint.partition("://")
    if not separator:
        secure = _flag("connection.ssl.enabled", settings.get("connection.ssl.enabled", "true"))
        scheme, host = ("https" if secure else "http"), endpoint
    host = host.rstrip("/")
    # For virtual-hosted requests, obstore needs the bucket in the endpoint; Hadoop puts the bucket there itself.
    return f"{scheme}://{host}" if path_style else f"{scheme}://{bucket}.{host}"


def _flag(name: str, value: str) -> bool:
    lowered = str(value).strip().lower()
    if lowered not in ("true", "false"):
        raise InvalidStateStoreArgument(f"fs.s3a.{name}={value!r} must be true or false.")
    return lowered == "true"


def hdfs_options(location: Location, options: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of an HDFS client, from Spark's and Hadoop's own; they win over those in HADOOP_CONF_DIR.

    Spark's are ``spark.hadoop.<setting>``. Raises ``InvalidStateStoreArgument`` for what is not a setting of Hadoop.
    """
    settings: dict[str, str] = {}
    for key, value in options.items():
        name = key.removeprefix("spark.hadoop.")
        if name.startswith(("dfs.", "hadoop.", "ipc.", "fs.")):
            settings[name] = value
        elif not key.startswith("spark."):
            raise InvalidStateStoreArgument(
                f"{key!r} is not an option for {location.text}: use settings of Hadoop, as dfs.ha.namenodes.<name>."
            )
    return settings


# The reference to a file of the state: path, size and digest; and digests.


_CHUNK_BYTES = 4 << 20


class FileRef(Struct, frozen=True, omit_defaults=True):
    """A file below the state location: its relative path, size in bytes, and xxh3-128 hex digest.

    ``within`` None: the file is at ``path``. Otherwise its bytes are a part of the object ``within``, from ``offset``
    on, and ``path`` is only the name of the content.
    """

    path: str
    size: int
    digest: str
    within: str | None = None
    offset: int = 0

    @property
    def stored_in(self) -> str:
        """The path of the object that has the bytes."""
        return self.path if self.within is None else self.within

    def is_in(self, sizes: Mapping[str, int]) -> bool:
        """Return whether all bytes exist, by the sizes of all stored objects; a truncated object does not have them."""
        size = sizes.get(self.stored_in, -1)
        return size == self.size if self.within is None else size >= self.offset + self.size


def digest(data: bytes) -> str:
    """Return the digest that ``FileRef`` carries: xxh3-128, hex."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """Return the digest of a local file's content."""
    hashed = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()
