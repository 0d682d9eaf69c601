"""The model out of the package: converted once, whole or not at all."""

# transformers and safetensors are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from aworld_runtime.errors import ConfigError
from aworld_runtime.training.smollm2 import resolve_model


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_model()


@pytest.mark.timeout(120)
def test_parallel_callers_replace_an_older_conversion_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "aworld.json").write_text('{"converter": 0}')
    (folder / "left-over").touch()
    lines: list[str] = []
    found: list[Path] = []
    callers = [
        threading.Thread(
            target=lambda: found.append(resolve_model(folder=folder, report=lines.append))
        )
        for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [folder, folder]
    assert [line for line in lines if line.startswith("Converting")] == [
        "Converting the model to safetensors, once"
    ]
    assert "Waiting for another process that prepares the model" in lines
    assert sorted(file.name for file in folder.iterdir()) == [
        "aworld.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "model.lock"]


def test_a_converted_model_is_returned_at_once(model_folder: Path) -> None:
    lines: list[str] = []
    assert resolve_model("smollm2", report=lines.append) == model_folder
    assert lines == []


def test_a_folder_of_the_right_kind_is_a_model(model_folder: Path) -> None:
    assert resolve_model(model_folder) == model_folder


def test_what_is_no_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gpt-17' is neither 'smollm2' nor a folder"):
        resolve_model("gpt-17")
    (tmp_path / "config.json").touch()
    with pytest.raises(
        ConfigError, match=r"is no model: it lacks tokenizer\.json, \*\.safetensors"
    ):
        resolve_model(tmp_path)


def test_it_answers_in_english_and_ends_its_turn(model_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    assert model.dtype == torch.bfloat16
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert (
        answer[-1]
        == json.loads((model_folder / "generation_config.json").read_text())["eos_token_id"]
    )
