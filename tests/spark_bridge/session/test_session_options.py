"""The options of a session are checked when they are given, before anything is started."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from spark_bridge.exceptions import SessionError, TlsError
from spark_bridge.host_actor import SessionOptions
from spark_bridge.session.lifecycle import attach, init_spark
from spark_bridge.transport.tls import TlsConf


@pytest.mark.parametrize("start", [lambda **given: init_spark("app", **given), lambda **given: attach(None, **given)])
def test_wrong_options_are_refused_before_anything_is_started(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SessionError, match=r"num_hosts=0: give at least 1"):
        start(num_hosts=0)
    with pytest.raises(SessionError, match=r"keep_serving=-1: give seconds"):
        start(keep_serving=-1)
    with pytest.raises(SessionError, match="keep_serving=nan"):
        start(keep_serving=float("nan"))
    nowhere = str(tmp_path / "none.pem")
    with pytest.raises(TlsError):
        start(tls=TlsConf(nowhere, nowhere, nowhere))


def test_a_host_gets_the_options_as_the_driver_has_made_them() -> None:
    options = SessionOptions(num_hosts=2, keep_serving=0.0)
    assert pickle.loads(pickle.dumps(options)) == options
