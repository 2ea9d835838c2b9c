"""The benchmarks run and say what they measured; no time is looked at (method M7)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.errors import ConfigError
from orchestrator.bench.command import NAMES, run_benchmarks
from orchestrator.bench.driver import _train
from orchestrator.bench.figures import Options, figure, percentile, ratios
from orchestrator.bench.learner import skewed
from orchestrator.cli import app

OPTIONS = Options(repeat=1, config=Path("absent.yaml"))


def test_figures_have_median_spread_and_repetitions() -> None:
    packed, padded = figure("packed", "tokens/s", [300.0, 100.0, 200.0]), figure("padded", "tokens/s", [100.0] * 3)
    record = packed.record()
    assert (record["median"], record["min"], record["max"], record["repetitions"]) == (200.0, 100.0, 300.0, 3)
    assert ratios("r", packed, padded).values == (3.0, 1.0, 2.0)
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 3.0
    assert percentile([1.0], 0.95) == 1.0


def test_those_without_processes_run_and_are_written(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    names = ["driver", "ready-delay", "queues", "mixer"]
    run_benchmarks(names, OPTIONS, output)
    written = json.loads(output.read_text())["benchmarks"]
    assert list(written) == names
    for result in written.values():
        assert result["figures"]
        assert all(value > 0.0 for f in result["figures"] for value in f["values"])
    driver = [f["name"] for f in written["driver"]["figures"]]
    assert [name.endswith("with metrics, spans and the ledger's file") for name in driver[:3]] == [False, False, True]


def test_the_recorded_driver_writes_down_what_a_run_does(tmp_path: Path) -> None:
    _train(tmp_path, 8, 4, 3, recorded=True)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2, 3]
    spans = [json.loads(line).get("name") for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert spans.count("rollout") >= 3 * 8 * 4 and spans.count("grade") >= 3 * 6
    assert (tmp_path / "ledger.sqlite").stat().st_size > 0


def test_the_mix_of_lengths_is_skewed_and_the_same_each_time() -> None:
    lengths = skewed(100, 768)
    assert lengths == skewed(100, 768)
    assert max(lengths) == 768
    assert sorted(lengths)[50] < 768 / 3, "most are short"


def test_an_unknown_name_is_refused_and_the_help_names_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no benchmark is called sandboxes; there are driver, "):
        run_benchmarks(["sandboxes"], OPTIONS, None)
    text = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "300"}).output
    assert all(name in text for name in NAMES)
    assert "Example: gagar bench driver mixer" in text
