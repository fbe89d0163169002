"""``make reference``: write the generated blocks of the pages in docs/reference."""

from __future__ import annotations

from tests.docs.pages import ROOT
from tests.docs.reference import pages, rendered

for path in pages():
    page = path.read_text()
    new = rendered(page)
    if new != page:
        path.write_text(new)
        print(f"Wrote {path.relative_to(ROOT)}")
