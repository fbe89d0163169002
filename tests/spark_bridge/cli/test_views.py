"""What ``status`` and its like print of an overview."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from backends.storage.requests import Prices
from spark_bridge.cli import overview
from spark_bridge.overview.model import CoordinatorInfo, Overview
from tests.spark_bridge.cli.overviews import CHECKPOINT, FAULT, OVERVIEW, QUERY, printed


def test_queries_hosts_and_faults_are_shown() -> None:
    text = printed(overview.status_view(OVERVIEW))
    for part in ("flights", "aircraft (2)", "1 partitions", "host-a-1", "no answer", "512.0 MiB of 1.0 GiB", "300 ms"):
        assert part in text
    assert "192.0.2.1:7005" in text, "what clients give as address="
    assert text.index("192.0.2.1 ") < text.index("host-a-0")
    assert "ERROR host-silent: host host-a-1: Nothing was heard.\n    Look at its machine." in text
    assert "Nothing is wrong." in printed(overview.status_view(replace(OVERVIEW, faults=())))


def test_loads_under_way_are_shown_with_their_progress() -> None:
    first, *others = OVERVIEW.hosts
    loads = tuple(f"version 7 of partition {p}: 3 of 12 files" for p in range(22))
    shown = replace(OVERVIEW, hosts=(replace(first, loading=loads), *others))
    for view in (overview.status_view, overview.top_view):
        text = printed(view(shown))
        assert f"{first.host_id} loads version 7 of partition 19: 3 of 12 files" in text
        assert "partition 20" not in text and "and 2 more loads" in text
        assert "more loads" not in printed(view(OVERVIEW))


def test_a_checkpoint_has_no_hosts() -> None:
    text = printed(overview.status_view(replace(OVERVIEW, source="storage", coordinator=None, hosts=())))
    assert "Hosts" not in text and "flights" in text


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    query = replace(QUERY, name="flights[/b]", operators=(replace(QUERY.operators[0], name="[red]x"),))
    coordinator = replace(OVERVIEW.coordinator or CoordinatorInfo("", ""), namespace="n[/i]")
    fault = replace(FAULT, subject="query a[/b]")
    text = printed(overview.status_view(replace(OVERVIEW, queries=(query,), coordinator=coordinator, faults=(fault,))))
    assert "flights[/b]" in text and "[red]x (2)" in text and "n[/i]" in text and "query a[/b]" in text
    text = printed(overview.partitions_view(query, None)) + printed(overview.checkpoints_view(query, 5, Prices()))
    assert "[red]x of flights[/b]" in text and "Checkpoints of flights[/b]" in text


def test_missing_coordinator_is_shown() -> None:
    assert "No coordinator" in printed(overview.status_view(Overview("cluster", 0)))


def test_a_checkpoint_shows_where_its_time_went() -> None:
    (line,) = (x for x in printed(overview.checkpoints_view(QUERY, 5, Prices())).splitlines() if "12,345" in x)
    assert line.split("  ")[1:] and "1.2 s" in line and "900 ms" in line and "34 ms" in line and "2.0 KiB" in line
    assert "2023-11-14 22:13:20" in line


def test_checkpoints_show_requests_by_kind_bytes_and_cost() -> None:
    used = {"put": 20, "get": 10, "list": 1, "delete": 3, "sent_bytes": 3 << 20, "received_bytes": 2048}
    made = [structs.replace(CHECKPOINT, id=i, completed_ms=i * 2_000, requests=34, storage=used) for i in range(1, 4)]
    query = replace(QUERY, checkpoints=(CHECKPOINT, *made))
    text = printed(overview.requests_view(query, 9, Prices()))
    rows = [line.split() for line in text.splitlines() if "34" in line]
    # 21 at 5 dollars a million, 10 at 0.4; a batch in two seconds for 730 hours.
    expected = ["34", "20", "10", "0", "1", "3", "3.0", "MiB", "2.0", "KiB", "$0.000109"]
    assert [row[3:] for row in rows] == [expected] * 3
    cost = "about $0.000109 a batch, $143.23 a month at a batch in 2.0 s"
    for view in (overview.requests_view, overview.checkpoints_view):
        text = " ".join(printed(view(query, 9, Prices())).split())
        assert cost in text and "those of S3 standard" in text
    text = " ".join(printed(overview.requests_view(query, 9, Prices(put=1.0))).split())
    assert "about $0.020009 a batch" in text and "put=1,get=0.0004" in text and "S3 standard" not in text
    text = printed(overview.requests_view(QUERY, 9, Prices()))
    assert "cost about" not in text and "Nothing is known" in text, "of checkpoints of earlier releases"


def test_partitions_show_owner_size_and_lag() -> None:
    text = printed(overview.partitions_view(QUERY, "aircraft"))
    (line,) = (x for x in text.splitlines() if "2,022" in x)
    assert line.split() == ["0", "host-a-0", "7", "2,022", "3.0", "MiB", "5", "2", "12", "ms"]
    assert "2.5 times" in text
