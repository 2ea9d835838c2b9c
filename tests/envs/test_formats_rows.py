"""Rows that do not come from JSON lines: parquet files, and data sets of the Hugging Face Hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.schema import SwebenchSource
from envs.formats.listing import make_listed, read_listing
from envs.formats.rows import read_rows
from envs.task import Image, Needs, Split

DATA = Path(__file__).resolve().parents[1] / "data" / "tasks" / "swebench.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]

HUB = f"""
import json

def load_dataset(path, name=None, *, revision=None, split=None):
    if path != "acme/tasks":
        raise ConnectionError(f"Couldn't reach {{path!r}} on the Hub")
    rows = [json.loads(line) for line in open({str(DATA)!r})]
    return {{"dev": rows[:1]}} if revision == "small" else {{"dev": rows[:1], "test": rows}}
"""


def source(path: str, **more: object) -> SwebenchSource:
    values = {"type": "swebench", "groups_per_step": 1, "path": path, "repos": str(DATA.parent / "repos"), **more}
    return SwebenchSource.model_validate(values)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package `datasets`: what it offers of it is as the real one's."""
    (tmp_path / "datasets.py").write_text(HUB)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("hub")
def test_a_data_set_of_the_hub_gives_the_same_records_as_its_rows_in_a_file() -> None:
    there, here = read_listing(source("hf://acme/tasks:test")), read_listing(source(str(DATA)))
    assert [record.task for record in there.records] == [record.task for record in here.records]
    assert there.records[0].place == "hf://acme/tasks:test:1"
    assert len(read_listing(source("hf://acme/tasks@small")).records) == 1


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("hf://acme/tasks", "has the splits dev, test; name one as hf://acme/tasks:dev"),
        ("hf://acme/tasks:train", "has the splits dev, test; name one"),
        (
            "hf://acme/others:test",
            "cannot be had (ConnectionError: Couldn't reach 'acme/others' on the Hub); where",
        ),
        ("hf://tasks", "is no data set; give hf://OWNER/NAME"),
    ],
)
def test_what_cannot_be_had_of_the_hub(place: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_listing(source(place))
    assert message in caught.value.message and place in caught.value.message


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package datasets.*requirements/tasks\.txt"):
        read_listing(source("hf://acme/tasks:test"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"parquet needs pyarrow.*requirements/tasks\.txt"):
        list(read_rows(file))


def test_a_parquet_file_gives_the_same_records_as_json_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="optional: requirements/tasks.txt")
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    columns = {key: None for row in ROWS for key in row}  # else pyarrow takes those of the first row
    flat = [{**columns, **{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()}} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(flat), file, row_group_size=2)
    there, here = read_listing(source(str(file))), read_listing(source(str(DATA)))
    assert [record.task for record in there.records] == [record.task for record in here.records]
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        read_listing(source(str(file)))


def test_a_place_on_the_hub_is_not_taken_for_a_folder_beside_the_configuration(tmp_path: Path) -> None:
    values = {"type": "swebench", "groups_per_step": 1, "path": "hf://acme/tasks:test", "repos": "repos"}
    found = SwebenchSource.model_validate(values, context={"folder": tmp_path})
    assert (found.path, found.repos) == ("hf://acme/tasks:test", str(tmp_path / "repos"))


def test_what_a_source_gives_its_sandboxes_is_on_every_task() -> None:
    tasks = make_listed("own", source(str(DATA), resources={"cpus": 2, "memory_mib": 900, "disk_mib": 4000}))
    task = tasks.task(Split.TRAIN, 0)
    assert task.needs == Needs(cpus=2.0, memory_mib=900, disk_mib=4000)
    assert task.image is None or isinstance(task.image, Image)
    assert make_listed("own", source(str(DATA))).task(Split.TRAIN, 0).needs == Needs()
