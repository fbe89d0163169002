"""The directive ``metrics``: the metrics of one role, as ``coordinator_actor.metrics`` declares them.

```{metrics} coordinator
```
"""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from coordinator_actor.metrics import METRICS


def markdown(role: str) -> str:
    """Return the table of a role's metrics."""
    rows = [
        f"| `{m.exported}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |"
        for m in METRICS.values()
        if m.role == role
    ]
    return "\n".join(["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |", *rows])


class MetricsDirective(SphinxDirective):
    """Write the table of one role."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        return self.parse_text_to_nodes(markdown(self.arguments[0]))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("metrics", MetricsDirective)
    return {"parallel_read_safe": True}
