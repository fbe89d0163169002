"""Switches tracing on in a process: the setting ``STATESTORE_TRACING`` of the driver, which is passed to all others.

The setting is the address of a collector (``http://jaeger:4318``: OTLP over HTTP), ``otlp`` (a collector that the
standard variables ``OTEL_EXPORTER_OTLP_...`` of each process name), or ``module:function``, which sets the provider, as
the function of Ray's ``--tracing-startup-hook`` does.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
from collections.abc import Mapping
from importlib.util import find_spec

from backends import spans
from backends.exceptions import InvalidStateStoreArgument

log = logging.getLogger(__name__)

TRACING_VARIABLE = "STATESTORE_TRACING"
OTLP = "otlp"
_URL = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_lock = threading.Lock()
_done: str | None = None
"""The setting that this process makes spans with."""
_tried: str | None = None
"""The setting that ``try_set_up`` was given last."""


def setting_of_environment() -> str | None:
    """Return the value of ``STATESTORE_TRACING``; None: no traces. Raises ``InvalidStateStoreArgument``."""
    return checked_setting(os.environ.get(TRACING_VARIABLE) or None)


def checked_setting(setting: str | None) -> str | None:
    """Return the setting. Raises ``InvalidStateStoreArgument`` for an invalid one."""
    if setting is None or setting == OTLP or _URL.fullmatch(setting) or _FUNCTION.fullmatch(setting):
        return setting
    raise InvalidStateStoreArgument(
        f"tracing={setting!r} is not valid: give the address of a collector without a user ('http://collector:4318'), "
        f"{OTLP!r} for the variables OTEL_EXPORTER_OTLP_..., or 'module:function' ({TRACING_VARIABLE})."
    )


def set_up(setting: str | None, who: Mapping[str, str]) -> None:
    """Make spans in this process from now on, unless the setting is None. The first setting of a process counts.

    ``who`` is added to the attributes of all spans. A provider that the process already has stays, such as that of
    Ray's hook. Raises ``InvalidStateStoreArgument`` if OpenTelemetry or the function is missing, and the errors that
    the function raises.
    """
    global _done
    if setting is None or setting == _done:
        return
    with _lock:
        if _done is not None:
            if _done != setting:
                log.warning("Tracing stays set to %r, not %r: the first setting of a process counts", _done, setting)
            return
        _begin(setting, who)
        _done = setting


def try_set_up(setting: str | None, who: Mapping[str, str]) -> None:
    """Do the same as ``set_up``, but log an error instead of raising it, once and not for each task of a worker."""
    global _tried
    if setting == _tried:
        return
    _tried = setting
    try:
        set_up(setting, who)
    except Exception:  # the work of the process continues without traces
        log.exception("Tracing with the setting %r is off in this process", setting)


def _begin(setting: str, who: Mapping[str, str]) -> None:
    checked_setting(setting)
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise InvalidStateStoreArgument(
            f"tracing={setting!r} needs OpenTelemetry: pip install 'ray-statestore[tracing]' on every machine."
        )
    from opentelemetry import trace as api
    from opentelemetry.sdk.trace import Tracer, TracerProvider

    from backends.open_telemetry import INSTRUMENTATION, OpenTelemetryTracer

    if not isinstance(api.get_tracer_provider(), TracerProvider):
        _set_provider(setting)
    provider = api.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        raise InvalidStateStoreArgument(
            f"tracing={setting!r} has set no provider: the function must call opentelemetry.trace.set_tracer_provider "
            f"with a TracerProvider of opentelemetry.sdk, and the provider is {type(provider).__name__}."
        )
    if not isinstance(provider.get_tracer(INSTRUMENTATION), Tracer):
        log.info("OTEL_SDK_DISABLED is set: no spans are made")
        return
    spans.set_tracer(OpenTelemetryTracer(provider, who))


def _set_provider(setting: str) -> None:
    """Set the provider. Raises ``InvalidStateStoreArgument`` for an unknown setting."""
    if setting == OTLP or _URL.fullmatch(setting):
        try:
            from backends.open_telemetry import set_provider
        except ImportError as error:
            raise InvalidStateStoreArgument(
                f"tracing={setting!r} cannot be exported: {error}. pip install 'ray-statestore[tracing]' on every "
                "machine."
            ) from error
        set_provider(None if setting == OTLP else setting)
        return
    module, _, name = setting.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidStateStoreArgument(
            f"tracing={setting!r} names no function of this process: {error}. The module must be importable in the "
            "driver, in Ray's workers and in Spark's executors."
        ) from error
    if not callable(function):
        raise InvalidStateStoreArgument(f"tracing={setting!r} names {function!r}, which is not a function.")
    function()
