"""Chat templates against transformers' apply_chat_template."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import CHAT_TEMPLATE, make_tokenizer
from transformers import AutoTokenizer

from csps.models.network.checkpoint_json import CheckpointError, InvalidTextError
from csps.models.tokenizers.chat_template import ChatTemplate, read_chat_template

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "héllo\n", "name": None},
    {"role": "assistant", "content": "Hi", "tool_calls": None},
    {"role": "user", "content": "bye"},
]

LLAMA_2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = false %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

EVERYTHING = """
  {% set state = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set state.count = state.count + 1 %}
{{ message | tojson }} {{ message.name is defined }} {{ unk_token is defined }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{% endif %}
{% endfor %}
{{ state.count }} {{ strftime_now('%Y') }} {{ tools is none }} {{ documents is none }}
{{ {'b': 1, 'a': ['é', '<']} | tojson(indent=2, sort_keys=true) }}
{{ custom | default('none') }} {{ dict(a=1) }}{% if add_generation_prompt %} go{% endif %}
"""


def with_template(model_dir: Path, source: str) -> Path:
    make_tokenizer(model_dir)
    (model_dir / "chat_template.jinja").write_text(source)
    return model_dir


def read(model_dir: Path) -> ChatTemplate:
    template = read_chat_template(model_dir)
    assert template is not None
    return template


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("source", [CHAT_TEMPLATE, LLAMA_2, EVERYTHING])
@pytest.mark.parametrize("variables", [{}, {"custom": "value"}])
def test_prompts_are_those_of_transformers(
    tmp_path: Path, source: str, prompt: bool, variables: dict[str, Any]
) -> None:
    theirs = AutoTokenizer.from_pretrained(with_template(tmp_path, source))
    expected = theirs.apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=prompt, **variables
    )
    rendered = read(tmp_path).render(CONVERSATION, add_generation_prompt=prompt, **variables)
    assert rendered == expected


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    theirs = AutoTokenizer.from_pretrained(with_template(tmp_path, "{{ tools | tojson }}"))
    expected = theirs.apply_chat_template(CONVERSATION, tokenize=False, tools=tools)
    assert read(tmp_path).render(CONVERSATION, tools=tools) == expected


def configure(model_dir: Path, template: Any) -> None:
    """Store the template inside tokenizer_config.json, as older checkpoints do."""
    make_tokenizer(model_dir)
    (model_dir / "chat_template.jinja").unlink()
    path = model_dir / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))


def test_a_template_in_the_tokenizer_config(tmp_path: Path) -> None:
    configure(tmp_path, "{{ eos_token }}{{ messages | length }}")
    assert read(tmp_path).render(CONVERSATION) == "</s>4"


def test_the_default_of_several_named_templates(tmp_path: Path) -> None:
    configure(
        tmp_path,
        [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}],
    )
    assert read(tmp_path).render(CONVERSATION) == "yes"


def test_a_checkpoint_without_a_template(tmp_path: Path) -> None:
    configure(tmp_path, None)
    assert read_chat_template(tmp_path) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content | int / 0 if false else [][1] + 'x' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_refuses_the_messages(source: str) -> None:
    with pytest.raises(InvalidTextError, match="chat template rejects the messages"):
        ChatTemplate(source, {}).render(CONVERSATION)


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% for %}", {})
