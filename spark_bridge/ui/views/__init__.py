"""The pages by their addresses: pages to show, forms that are sent, and forms that only administrators may send."""

from __future__ import annotations

from spark_bridge.ui.views import changes, hosts, keys, operator, overview, query, savepoints, scan, sql

SEEN = {
    "/": overview.overview,
    "/query": query.query,
    "/operator": operator.operator,
    "/operator/hottest": changes.hottest,
    "/hosts": hosts.hosts,
    "/keys": keys.keys,
    "/scan": scan.scan,
    "/scan.csv": scan.scan_csv,
    "/sql": sql.sql,
    "/savepoints": savepoints.savepoints_page,
    "/savepoint": savepoints.savepoint_page,
}
POSTED = {
    "/sql": sql.sql,
    "/sql.csv": sql.sql_csv,
    "/savepoints": savepoints.trigger,
    "/savepoint": savepoints.check,
}
ACTING = (savepoints.trigger, savepoints.check)
