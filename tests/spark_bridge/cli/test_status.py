"""What ``statestore status`` prints, from the descriptions that coordinator and hosts give."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from spark_bridge.cli.status import render

QUERY: dict[str, Any] = {
    "query_id": "q-1",
    "run_id": "r-1",
    "name": "flights",
    "completed_version": 7,
    "prepared_version": 8,
    "pending_partitions": 1,
    "epoch": 2,
    "retired_by": None,
    "operators": {"aircraft": 2},
}
COORDINATOR: dict[str, Any] = {
    "node_ip": "192.0.2.1",
    "pid": 11,
    "namespace": "statestore",
    "queries": [QUERY],
    "problems": ["Hosts stand on 192.0.2.9, where no executor runs [any more]."],
}
HOSTS: list[dict[str, Any]] = [
    {
        "host_id": "host-a-0",
        "address": "grpc://192.0.2.1:5",
        "query_address": "192.0.2.1:7005",
        "pid": 12,
        "instances": [
            {
                "operator": "aircraft",
                "partition": 0,
                "version": 7,
                "keys": 2_022,
                "last_commit": {"version": 7, "get_ms": 5.0, "changelog_ms": 7.4},
            },
            {"operator": "aircraft", "partition": 1, "version": 7, "keys": 0, "last_commit": None},
        ],
    },
    {
        "host_id": "host-a-1",
        "address": "grpc://192.0.2.1:6",
        "query_address": "192.0.2.1:7006",
        "pid": 13,
        "instances": [],
    },
]


def printed(coordinator: dict[str, Any] | None, hosts: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(render(coordinator, hosts))
    return out.getvalue()


def test_queries_and_hosts_are_shown() -> None:
    text = printed(COORDINATOR, HOSTS)
    for part in ("flights", "aircraft (2)", "1 partitions", "host-a-1", "aircraft / 0", "2,022", "12 "):
        assert part in text
    assert "192.0.2.1:7005" in text and "192.0.2.1:7006" in text, "what clients give as address="
    assert "grpc://" not in text
    assert "192.0.2.9, where no executor runs [any more]." in text


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    query = {**QUERY, "name": "flights[/b]", "operators": {"[red]x": 2}}
    text = printed({**COORDINATOR, "namespace": "n[/i]", "queries": [query]}, HOSTS)
    assert "flights[/b]" in text and "[red]x (2)" in text and "n[/i]" in text


def test_without_a_coordinator_it_says_so() -> None:
    assert "No coordinator" in printed(None, [])
