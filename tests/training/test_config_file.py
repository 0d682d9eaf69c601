"""Configuration: what wins, and what a mistake is called."""

from pathlib import Path

import pytest

from aworld_runtime.errors import ConfigError
from aworld_runtime.training.config_file import load_config


def test_flags_win_over_settings_and_settings_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3\ngroup_size: 4\nlearner:\n  lr: 1.0e-6\n")
    config = load_config(
        file=file, settings=["group_size=6", "learner.lr=2e-5"], given={"steps": 7}
    )
    assert (config.steps, config.group_size, config.learner.lr) == (7, 6, 2e-5)


def test_a_text_is_taken_as_it_stands() -> None:
    settings = ["out=/x/we #y/run: 1", "model=007", "bus=", "policy=no", "task=a: b"]
    config = load_config(file=None, settings=settings, given={})
    assert (config.out, config.model, config.bus) == (Path("/x/we #y/run: 1"), "007", None)
    assert (config.policy, config.task) == ("no", "a: b")


def test_an_unknown_key_names_its_line_and_the_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3\n\nlearner:\n  lrr: 1.0e-6\n")
    with pytest.raises(ConfigError, match=r"unknown key 'learner.lrr' .*line 4.*lr,"):
        load_config(file=file, settings=[], given={})


@pytest.mark.parametrize(
    "settings, message",
    [
        (["steps=0"], r"steps=0: .*greater than or equal to 1"),
        (["sampler=magic"], r"sampler='magic'.*vllm"),
        (["colour=red"], r"unknown key 'colour'; known keys: .*worker_num"),
        (["steps"], r"'steps': expected key=value"),
        (["steps=[1,2"], r"^'steps=\[1,2': while parsing .* expected [^\n]*$"),
        (["seed=2026-13-45"], r"^'seed=2026-13-45': month must be"),
        (["steps.more=1", "steps=2", "steps.more=3"], r"steps"),
    ],
)
def test_a_wrong_setting_is_named(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(file=None, settings=settings, given={})


def test_a_file_that_is_not_yaml_or_missing_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    for content in (b"steps: [1", b"\x7fELF\x02\xff"):
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match=r"is not YAML: [^\n]*$"):
            load_config(file=broken, settings=[], given={})
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(file=tmp_path / "absent.yaml", settings=[], given={})
