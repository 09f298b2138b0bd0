"""Checkpoints whose chat templates know tools and reasoning, in the style of the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call them as <tool_call>
{"name": NAME, "arguments": JSON}
</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ "\\n" }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

THINKING_TEMPLATE = HERMES_TEMPLATE + (
    "{%- if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


def with_template(model_dir: Path, source: str) -> Path:
    """Give a checkpoint another chat template."""
    (model_dir / "chat_template.jinja").write_text(source, encoding="utf-8")
    return model_dir


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    """Return a function whose parameters are all required."""
    schema = {
        "type": "object",
        "properties": parameters,
        "required": list(parameters),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool("weather", city={"enum": ["Oslo", "Rome"]})
CLOCK = tool("clock", zone={"type": "integer", "minimum": -11, "maximum": 12})

HARMONY_TEMPLATE = """\
{%- for tool in tools or [] %}<|start|>developer<|message|>{{ tool | tojson }}<|end|>{% endfor %}
{%- for message in messages %}
{%- if message.thinking is defined %}<|start|>assistant<|channel|>analysis<|message|>
{{- message.thinking }}<|end|>{% endif %}
{%- for call in message.tool_calls or [] %}<|start|>assistant to=functions.{{ call.function.name -}}
<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}
{%- if message.content %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
