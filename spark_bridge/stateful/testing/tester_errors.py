"""Errors of ``ProcessorTester`` that are also of the class that PySpark's ``TwsTester`` raises in their place.

So a test that was written for ``TwsTester`` catches them. All are ``ProcessorTesterError``.
"""

from __future__ import annotations

from pyspark.errors import IllegalArgumentException, PySparkValueError
from pyspark.errors.exceptions.base import PySparkAssertionError

from spark_bridge.exceptions import ProcessorTesterError


class TesterValueError(PySparkValueError, ProcessorTesterError):  # type: ignore[misc]
    """An argument is missing, or a call does not go with the time mode."""


class TesterTimeError(IllegalArgumentException, ProcessorTesterError):  # type: ignore[misc]
    """Time does not move forward."""


class TesterAssertionError(PySparkAssertionError, ProcessorTesterError):  # type: ignore[misc]
    """There is no such state variable, time mode or output mode, or two kinds of initial state."""
