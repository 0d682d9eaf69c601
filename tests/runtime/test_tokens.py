"""Token ids of conversations: as transformers renders them, and extended turn by turn."""

# transformers and safetensors are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aworld_runtime.errors import ConfigError, TemplateError
from aworld_runtime.models.tokens import ChatTokenizer
from aworld_runtime.training.smollm2 import resolve_model

SYSTEM = {"role": "system", "content": "Use the calculator. Answer in <answer> tags."}
QUESTION = {"role": "user", "content": "What is 47 + 1238?\nThink, naïve 猫 🙂!"}
CALL = {"role": "assistant", "content": '<tool_call>\n{"name": "calculator"}\n</tool_call>'}
RESULT = {"role": "tool", "content": "1285"}
FOLLOW_UP = {"role": "user", "content": "And twice that?"}

PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
LLAMA_3 = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{{ '<repo_name>' + m.role + '<file_sep>\n\n' + m.content | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<repo_name>assistant<file_sep>\n\n' }}{% endif %}"
)
STRIPS_REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENS_REASONING = STRIPS_REASONING.replace(
    "'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_model()


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> ChatTokenizer:
    return ChatTokenizer(model_folder)


def with_template(model_folder: Path, folder: Path, template: str) -> ChatTokenizer:
    """The real vocabulary under another template."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).symlink_to(model_folder / name)
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [[QUESTION], [SYSTEM, QUESTION], [SYSTEM, QUESTION, CALL, RESULT], [QUESTION, CALL, FOLLOW_UP]],
    ids=len,
)
def test_a_conversation_has_the_ids_that_transformers_gives(
    tokenizer: ChatTokenizer,
    model_folder: Path,
    messages: list[dict[str, str]],
    generation_prompt: bool,
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(model_folder)
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=generation_prompt, return_dict=False
    )
    assert tokenizer.render(messages, add_generation_prompt=generation_prompt) == expected


def test_digits_stand_alone(tokenizer: ChatTokenizer) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1285")] == ["1", "2", "8", "5"]


def test_decode_leaves_special_tokens_out(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("naïve 猫 🙂"), 2]) == "naïve 猫 🙂"
    assert tokenizer.eos_ids == {2}


def test_extending_equals_rendering_where_the_sampled_ids_are_the_usual_ones(
    tokenizer: ChatTokenizer,
) -> None:
    first = tokenizer.render([SYSTEM, QUESTION])
    previous = [*first, *tokenizer.encode(CALL["content"]), 2]
    conversation = [SYSTEM, QUESTION, CALL, RESULT, FOLLOW_UP]
    assert tokenizer.extend(previous, conversation, new_from=3) == tokenizer.render(conversation)


def test_sampled_ids_are_kept_where_tokenizing_again_would_change_them(
    tokenizer: ChatTokenizer,
) -> None:
    odd = [token for letter in "calculator" for token in tokenizer.encode(letter)]
    turn = {"role": "assistant", "content": tokenizer.decode(odd)}
    previous = [*tokenizer.render([QUESTION]), *odd, 2]
    longer = tokenizer.extend(previous, [QUESTION, turn, RESULT], new_from=2)
    assert longer[: len(previous)] == previous
    assert longer != tokenizer.render([QUESTION, turn, RESULT])
    assert tokenizer.decode(longer) == tokenizer.decode(tokenizer.render([QUESTION, turn, RESULT]))


def test_a_turn_cut_by_length_gets_its_end(tokenizer: ChatTokenizer) -> None:
    whole = [*tokenizer.render([QUESTION]), *tokenizer.encode(CALL["content"]), 2]
    conversation = [QUESTION, CALL, RESULT]
    ended = tokenizer.extend(whole, conversation, new_from=2)
    assert tokenizer.extend(whole[:-1], conversation, new_from=2) == ended


def test_an_empty_turn_can_be_extended(tokenizer: ChatTokenizer) -> None:
    empty = {"role": "assistant", "content": ""}
    previous = [*tokenizer.render([QUESTION]), 2]
    conversation = [QUESTION, empty, FOLLOW_UP]
    assert tokenizer.extend(previous, conversation, new_from=2) == tokenizer.render(conversation)


@pytest.mark.parametrize(
    "template", [PLAIN, LLAMA_3, STRIPS_REASONING], ids=["plain", "llama", "think"]
)
def test_other_templates_extend_too(model_folder: Path, tmp_path: Path, template: str) -> None:
    tokenizer = with_template(model_folder, tmp_path, template)
    turn = {"role": "assistant", "content": "It is 1285."}
    conversation = [SYSTEM, QUESTION, turn, FOLLOW_UP]
    sampled = tokenizer.encode(turn["content"])
    previous = [*tokenizer.render([SYSTEM, QUESTION]), *sampled]
    longer = tokenizer.extend(previous, conversation, new_from=3)
    assert longer[: len(previous)] == previous
    assert tokenizer.decode(longer) == tokenizer.decode(tokenizer.render(conversation))


def test_a_template_that_strips_reasoning_is_refused(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(model_folder, tmp_path, STRIPS_REASONING)
    turn = {"role": "assistant", "content": "<think>47 + 1238</think>1285"}
    previous = [*tokenizer.render([QUESTION]), *tokenizer.encode(turn["content"]), 2]
    with pytest.raises(TemplateError, match="rewrites earlier assistant turns"):
        tokenizer.extend(previous, [QUESTION, turn, FOLLOW_UP], new_from=2)


def test_a_template_whose_prompt_vanishes_is_refused(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(model_folder, tmp_path, OPENS_REASONING)
    turn = {"role": "assistant", "content": "1285"}
    with pytest.raises(TemplateError, match="prompt of an earlier turn differently"):
        tokenizer.extend([5, 6], [QUESTION, turn, FOLLOW_UP], new_from=2)


def test_a_template_that_refuses_a_role_is_a_typed_error(
    model_folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(model_folder, tmp_path, NO_TOOLS)
    with pytest.raises(TemplateError, match="unknown role tool"):
        tokenizer.render([QUESTION, CALL, RESULT])


def test_only_an_assistants_turn_can_be_extended(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(TemplateError, match="no assistant's turn"):
        tokenizer.extend([5], [QUESTION, FOLLOW_UP], new_from=1)


def test_a_template_inside_the_tokenizers_settings_is_found(
    model_folder: Path, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(model_folder / "tokenizer.json")
    settings = json.loads((model_folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (model_folder / "chat_template.jinja").read_text()
    settings["eos_token"] = {"content": "<|im_end|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    older = ChatTokenizer(tmp_path)
    assert older.render([QUESTION]) == tokenizer.render([QUESTION])
    assert older.eos_ids == {2}


def test_a_folder_without_tokenizer_or_template_is_a_clear_error(
    model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to(model_folder / "tokenizer.json")
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTokenizer(tmp_path).render([QUESTION])


def test_neither_transformers_nor_torch_is_loaded(model_folder: Path) -> None:
    code = (
        "import sys; from aworld_runtime.models.tokens import ChatTokenizer;"
        f"ChatTokenizer({str(model_folder)!r}).render([{{'role': 'user', 'content': 'hi'}}]);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
