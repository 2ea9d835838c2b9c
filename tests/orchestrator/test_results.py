"""Published tables are what an experiment or an audit wrote: docs/results/NAME.md is that of docs/results/NAME.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orchestrator import audit_table, experiment_table

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_a_published_table_is_that_of_its_result(result: Path) -> None:
    data = json.loads(result.read_text(encoding="utf-8"))
    table = result.with_suffix(".md").read_text(encoding="utf-8")
    if "judges" in data:
        assert table == audit_table.markdown(data)
        return
    assert table == experiment_table.markdown(data)
    assert {cell["state"] for cell in data["cells"] if cell["arm"] in data["arms"]} == {"done"}, "it is complete"


def test_every_published_table_has_its_result() -> None:
    tables = {path.stem for path in (ROOT / "docs" / "results").glob("*.md")}
    assert tables == {path.stem for path in RESULTS}


def test_numbers_that_other_pages_quote_stand_in_a_table() -> None:
    """A page quotes a table's row between the marks `<!-- from results/NAME.md -->` and `<!-- end -->`."""
    quoted = re.compile(r"<!-- from results/(\S+)\.md -->\n(.*?)<!-- end -->", flags=re.S)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for name, rows in quoted.findall(page.read_text(encoding="utf-8")):
            table = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8").splitlines()
            assert [row for row in rows.strip().splitlines() if row not in table] == [], page.name
