"""Chat templates by name, for models whose tokenizer has none: `model.chat_template: chatml`.

Each writes a conversation as the publication of its format says. A turn ends with a token of its
own or with EOS, so that a model learns to stop. Roles that a format has no place for are refused,
except that a system message goes before the first question where there is no other place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# the system message, and the turns without it
_APART = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}"
)
_NO_TOOLS = (
    "{%- if tools or messages | selectattr('role', 'equalto', 'tool') | list"
    " or messages | selectattr('tool_calls') | list -%}"
    "{{ raise_exception('this chat template has no place for tools') }}"
    "{%- endif -%}"
)
_ALTERNATES = (
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('turns of user and assistant must alternate') }}"
    "{%- endif -%}"
)


def _alternating(*, user: str, assistant: str, begin: str = "", end: str = "") -> str:
    """A template whose turns alternate; `system` is the system message before the first question,
    and "" elsewhere.
    """
    return (
        f"{_NO_TOOLS}{_APART}{begin}"
        f"{{%- for message in turns -%}}{_ALTERNATES}"
        "{%- set content = message.content | trim -%}"
        f"{{%- if message.role == 'user' -%}}{{{{ {user} }}}}"
        f"{{%- else -%}}{{{{ {assistant} }}}}{{%- endif -%}}"
        f"{{%- endfor -%}}{_answering(end) if end else ''}"
    )


def _answering(text: str) -> str:
    return f"{{%- if add_generation_prompt -%}}{{{{ {text} }}}}{{%- endif -%}}"


CHATML = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif -%}
# Tools

You may call these functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
</tools>

For each call write a JSON object with its name and arguments:
<tool_call>
{"name": <function-name>, "arguments": <arguments-object>}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first and tools -%}
{%- elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

LLAMA3 = (
    _NO_TOOLS + "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{- message.content | trim + '<|eot_id|>' -}}"
    "{%- endfor -%}" + _answering("'<|start_header_id|>assistant<|end_header_id|>\\n\\n'")
)

LLAMA2 = _alternating(
    user=(
        "bos_token + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and"
        " system else '') + content + ' [/INST]'"
    ),
    assistant="' ' + content + ' ' + eos_token",
)

MISTRAL = _alternating(
    begin="{{- bos_token -}}",
    user="'[INST] ' + (system + '\\n\\n' if loop.first and system else '') + content + ' [/INST]'",
    assistant="' ' + content + eos_token",
)

GEMMA = _alternating(
    begin="{{- bos_token -}}",
    user=(
        "'<start_of_turn>user\\n' + (system + '\\n\\n' if loop.first and system else '') + content"
        " + '<end_of_turn>\\n'"
    ),
    assistant="'<start_of_turn>model\\n' + content + '<end_of_turn>\\n'",
    end="'<start_of_turn>model\\n'",
)

PHI3 = (
    _NO_TOOLS + "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}"
    "{%- endfor -%}" + _answering("'<|assistant|>\\n'")
)

ZEPHYR = (
    _NO_TOOLS + "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}"
    "{%- endfor -%}" + _answering("'<|assistant|>\\n'")
)

VICUNA = _alternating(
    begin="{%- if system -%}{{ system + ' ' }}{%- endif -%}",
    user="'USER: ' + content + ' '",
    assistant="'ASSISTANT: ' + content + eos_token",
    end="'ASSISTANT:'",
)

ALPACA = _alternating(
    begin=(
        "{{- (system or 'Below is an instruction that describes a task. Write a response that"
        " appropriately completes the request.') + '\\n\\n' -}}"
    ),
    user="'### Instruction:\\n' + content + '\\n\\n'",
    assistant="'### Response:\\n' + content + eos_token + '\\n\\n'",
    end="'### Response:\\n'",
)


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A chat template, and the control tokens that a tokenizer must have for it: text in their
    place would be many tokens, none of which ends a turn.
    """

    source: str
    tokens: tuple[str, ...] = ()


CHAT_TEMPLATES: dict[str, NamedTemplate] = {
    "chatml": NamedTemplate(CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": NamedTemplate(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "llama2": NamedTemplate(LLAMA2),
    "mistral": NamedTemplate(MISTRAL),
    "gemma": NamedTemplate(GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "phi3": NamedTemplate(PHI3, ("<|user|>", "<|assistant|>", "<|end|>")),
    "zephyr": NamedTemplate(ZEPHYR),
    "vicuna": NamedTemplate(VICUNA),
    "alpaca": NamedTemplate(ALPACA),
}


def fitting(vocabulary: Collection[str]) -> list[str]:
    """The names of the templates whose control tokens are all there."""
    return [
        name
        for name, template in CHAT_TEMPLATES.items()
        if all(token in vocabulary for token in template.tokens)
    ]
