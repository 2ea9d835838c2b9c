"""The configurations in configs/ and the page that explains every key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkpoint_folders import write_model
from pydantic import BaseModel

from configs import schema
from configs.check import load_run
from configs.problems import known_keys, sections_of
from configs.reference import field_documents, render
from configs.schema import AdvantageMode, ArithSource, DaytonaSandbox, DockerSandbox, RunConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
ARMS = sorted((CONFIGS / "arms").glob("*.yaml"))


@pytest.mark.parametrize("name", ["quickstart", "learn"])
def test_shipped_runs_pass_every_check(name: str) -> None:
    config = load_run(CONFIGS / f"{name}.yaml").config
    assert config.name == name
    assert config.algorithm.mode is AdvantageMode.REDISTRIBUTE
    assert {source.type for source in config.sources.values()} == {"minirepo", "files", "arith"}


def test_the_cluster_passes_once_its_folders_are_filled_in(tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", positions=32768, heads=32)
    config = load_run(CONFIGS / "cluster.yaml", [f"engine.model={policy}", f"learner.model={policy}"]).config
    engines = config.engine.replicas * config.engine.tensor_parallel_size
    assert engines + config.learner.world_size == 64
    grader = config.grader
    assert grader is not None
    assert (grader.mode, grader.backend.type, grader.timeout_s) == ("agent", "endpoint", 2400)
    assert grader.workers * grader.groups_per_worker == 64


def test_the_cluster_can_grade_on_engines_of_its_own(tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", positions=32768, heads=32)
    model = write_model(tmp_path / "grader", positions=131072, heads=64)
    engine = f"{{model: {model}, device: cuda, dtype: bfloat16, tensor_parallel_size: 4, max_model_len: 65536}}"
    overrides = [f"engine.model={policy}", f"learner.model={policy}", "grader.budget.tokens=65000"]
    backend = f"grader.backend={{type: vllm, engine: {engine}}}"
    config = load_run(CONFIGS / "cluster.yaml", [*overrides, backend]).config
    assert config.grader is not None and config.grader.backend.type == "vllm"


@pytest.mark.parametrize("overrides", [[], ["learner.lora={rank: 16, alpha: 32}", "learner.optimizer.lr=1e-4"]])
def test_the_pretrained_model_passes_once_it_is_there(tmp_path: Path, overrides: list[str]) -> None:
    policy = write_model(tmp_path / "policy", positions=8192, heads=9)
    models = [f"engine.model={policy}", f"learner.model={policy}"]
    config = load_run(CONFIGS / "smollm2.yaml", [*models, *overrides]).config
    assert config.algorithm.mode is AdvantageMode.REDISTRIBUTE
    assert (config.learner.lora is not None) == bool(overrides)


@pytest.mark.parametrize("arm", ARMS, ids=[arm.stem for arm in ARMS])
def test_each_arm_changes_the_mode_and_passes(arm: Path) -> None:
    config = load_run(CONFIGS / "learn.yaml", arms=[arm]).config
    assert config.algorithm.mode.value == arm.stem
    assert (config.grader is None) == (config.algorithm.mode is AdvantageMode.OUTCOME)


def test_there_is_an_arm_for_each_mode() -> None:
    assert {arm.stem for arm in ARMS} == {mode.value for mode in AdvantageMode}


def test_the_page_of_keys_is_what_the_schema_says() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == render(), "run `make docs`"


def test_every_key_is_explained() -> None:
    page = render()
    assert [key for key in known_keys(RunConfig) if f"| `{key.rsplit('.', 1)[-1]}` |" not in page] == []
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []


def test_inherited_docstrings_reach_the_page() -> None:
    assert field_documents(ArithSource)["groups_per_step"].startswith("B_i: groups of this source")
    docker, daytona = field_documents(DockerSandbox), field_documents(DaytonaSandbox)
    assert docker["start_timeout_s"] == daytona["start_timeout_s"], "another default keeps what the key means"
    assert "git, swe-rex" in daytona["image"] and "git, swe-rex" not in docker["image"]


def test_a_section_of_free_names_says_what_its_values_are() -> None:
    rows = {(key, kind) for key, kind in re.findall(r"^\| `(\w+)` \| (section of [^|]+?) \|", render(), flags=re.M)}
    assert rows == {
        ("sources", "section of sections"),
        ("custom", "section of numbers"),
        ("labels", "section of texts"),
        ("node_selector", "section of texts"),
    }


def test_a_section_names_each_of_its_places_once() -> None:
    for heading in re.findall(r"^## .*", render(), flags=re.M):
        places = re.findall(r"`([^`]+)`", heading)
        assert len(set(places)) == len(places), heading


def test_every_section_has_its_name_in_one_place() -> None:
    sections: set[type[BaseModel]] = {RunConfig}
    left = [*sections]
    while left:
        found = {s for field in left.pop().model_fields.values() for s in sections_of(field.annotation)} - sections
        sections |= found
        left += found
    assert len(sections) > 40
    assert {section.__name__ for section in sections} - set(schema.__all__) == set()
