"""The names that users see are where they should be."""

from __future__ import annotations

import spark_bridge


def test_every_public_name_is_there() -> None:
    for name in spark_bridge.__all__:
        assert getattr(spark_bridge, name) is not None, name
