"""The panels of the report and of the W&B workspace show metrics that exist: in the docs, and in a run's W&B file."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from run_folder import facts
from wandb.proto.wandb_internal_pb2 import Record

from configs.schema import WandbConfig
from infra.wandb_sink import WandbSink
from orchestrator.metrics import step_metrics
from orchestrator.panels import SECTIONS

ROOT = Path(__file__).parents[2]
KEYS = {panel.key for panels in SECTIONS.values() for panel in panels}


def test_each_panel_shows_a_documented_metric() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))
    assert KEYS - documented == set()
    assert len(KEYS) == sum(len(panels) for panels in SECTIONS.values()), "no metric is drawn twice"


def test_a_run_that_w_and_b_has_taken_in_offline_holds_every_panel(tmp_path: Path) -> None:
    metrics = step_metrics(facts())
    sink = WandbSink(tmp_path, WandbConfig(mode="offline"), mode="offline", run_config={})
    sink.log(3, metrics.scalars, metrics.histograms)
    sink.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    names = history_keys(file)
    assert KEYS - names == set()
    assert any(name.startswith("redistribution/lambda_histogram") for name in names) and "step" in names


def history_keys(file: Path) -> set[str]:
    """Names that were logged, from W&B's own file."""
    names: set[str] = set()
    for data in entries(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        names |= {item.key or ".".join(item.nested_key) for item in record.history.item}
    return names


def entries(data: bytes) -> Iterator[bytes]:
    """Of LevelDB's log format: blocks of 32 KiB, pieces with checksum (4), length (2) and kind (1: whole, 2: first,
    3: middle, 4: last), behind seven bytes of W&B's own."""
    at, entry = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield entry
            entry = b""
