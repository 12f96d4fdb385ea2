"""Chat templates that came with a hostile model: each would take the memory or the time of whoever
renders it.

None of them raises on its own; rendered without bounds each makes gigabytes, or runs on. And
templates in the manner of honest ones, which must render to the very bytes that transformers makes
of them.
"""

from __future__ import annotations

BIG = "3000000000"
DOUBLED = (
    "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x OP ns.x %}{%"
    " endfor %}"
)
SHARED = (
    "{% set ns = namespace(x=['a']) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{%"
    " endfor %}"
)
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"

HOSTILE: list[str] = [
    # one value that is too large
    "{{ 'x'.ljust(" + BIG + ") }}",
    "{{ 'x'.rjust(" + BIG + ") }}",
    "{{ 'x'.center(" + BIG + ") }}",
    "{{ 'x'.zfill(" + BIG + ") }}",
    "{{ ('x\\t' * 9).expandtabs(" + BIG + ") }}",
    "{{ 'x' * " + BIG + " }}",
    "{{ " + BIG + " * 'x' }}",
    "{{ [0] * " + BIG + " }}",
    "{{ (0, 1) * " + BIG + " }}",
    "{{ 'x' | center(" + BIG + ") }}",
    "{{ 'x' | indent(" + BIG + ", true) }}",
    "{{ 'x\n' | indent('y' * 900000, true, true) | indent('y' * 900000, true, true) }}",
    "{{ ['x'] | batch(" + BIG + ", 'y') | list }}",
    "{{ ['x'] | slice(" + BIG + ") | list }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ '%*d' % (" + BIG + ", 1) }}",
    "{{ '%.3000000000f' % 1.5 }}",
    "{{ '%3000000000d' | format(1) }}",
    "{{ '{:3000000000}'.format(1) }}",
    "{{ '{0:{1}}'.format(1, " + BIG + ") }}",
    "{{ '{a:>3000000000}'.format_map({'a': 1}) }}",
    "{{ ('{0}' * 100000).format('x' * 900000) }}",
    "{{ ('x' * 900000).replace('x', 'y' * 900000) }}",
    "{{ ('x' * 900000) | replace('x', 'y' * 900000) }}",
    "{{ 'y' * 900000 | replace('', 'y' * 900000) }}",
    "{{ ('y' * 900000).join(['x'] * 90000) }}",
    "{{ (['x'] * 90000) | join('y' * 900000) }}",
    "{{ ('x' * 900000).translate({120: 'y' * 900000}) }}",
    "{{ {'a': [1]} | tojson(indent=" + BIG + ") }}",
    "{{ (['x'] * 90000) | tojson(indent='y' * 900000) }}",
    "{{ 9 ** (9 ** (9 ** 9)) }}",
    "{{ 2 ** " + BIG + " }}",
    "{{ (1).to_bytes(" + BIG + ", 'big') }}",
    "{{ 1.5 | round(" + BIG + ", 'ceil') }}",
    "{{ lipsum(n=" + BIG + ") }}",
    "{{ ('x ' * 400000) | wordwrap(1, wrapstring='y' * 900000) }}",
    "{{ ('http://x.y ' * 80000) | urlize(target='y' * 900000) }}",
    "{{ ('<!---->' * 140000) | striptags }}",
    "{% filter center(" + BIG + ") %}x{% endfilter %}",
    "{{ ['x'] | map('center', " + BIG + ") | list }}",
    # values that grow
    DOUBLED.replace("OP", "~") + "{{ ns.x }}",
    DOUBLED.replace("OP", "+") + "{{ ns.x }}",
    DOUBLED.replace("'ab'", "['a']").replace("OP", "+") + "{{ ns.x | length }}",
    DOUBLED.replace("'ab'", "3").replace("OP", "*") + "{{ ns.x }}",
    (
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set y %}{{ ns.x }}{{ ns.x }}{%"
        " endset %}{% set ns.x = y %}{% endfor %}"
    ),
    (
        "{% macro m(n, x) %}{% if n %}{{ m(n - 1, x ~ x) }}{% else %}{{ x }}{% endif %}{% endmacro"
        " %}{{ m(60, 'ab') }}"
    ),
    SHARED + "{{ ns.x }}",
    SHARED + "{{ ns.x | string }}",
    SHARED + "{{ ns.x | tojson }}",
    SHARED + "{{ ns.x | join }}",
    SHARED + "{{ ns.x ~ '' }}",
    SHARED + "{{ '%s' % [ns.x] }}",
    SHARED + "{{ '{}'.format(ns.x) }}",
    SHARED + "{{ ns }}",
    SHARED
    + "{% set o = namespace(x=['a']) %}{% for i in range(64) %}{% set o.x = [o.x, o.x] %}{% endfor"
    " %}{{ ns.x == o.x }}",
    SHARED
    + "{% set o = namespace(x=['a']) %}{% for i in range(64) %}{% set o.x = [o.x, o.x] %}{% endfor"
    " %}{{ ns.x is eq o.x }}",
    SHARED
    + "{% set o = namespace(x=['a']) %}{% for i in range(64) %}{% set o.x = [o.x, o.x] %}{% endfor"
    " %}{{ [ns.x, o.x] | sort }}",
    "{% set x = 'y' * 900000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    (
        "{% set x = 'y' * 900000 %}{% macro m() %}{% for i in range(99999) %}{{ x }}{% endfor %}{%"
        " endmacro %}{% set z = m() %}"
    ),
    (
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l, 'y' *"
        " 900000] %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(l=[]) %}{% set x = [0] * 90000 %}{% for i in range(99999) %}{% set"
        " ns.l = [ns.l, x[:]] %}{% endfor %}"
    ),
    "{% for i in range(99999) %}" + "text " * 20_000 + "{% endfor %}",
    # that runs on
    LOOPS.replace("BODY", ""),
    LOOPS.replace("BODY", "x"),
    LOOPS.replace("BODY", "{% continue %}"),
    LOOPS.replace("BODY", "{% if a == b %}{% endif %}"),
    LOOPS.replace("BODY", "{% generation %}{% endgeneration %}"),
    "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) recursive %}{{ loop(range(99999)) if a < 9 }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    (
        "{% set x = 'a' * 900000 %}{% for i in range(99999) %}{% if (x ~ 'b') in (x ~ 'c') %}{%"
        " endif %}{% endfor %}"
    ),
    "{% for i in range(99999) %}{{ (range(99999) | list | sort | length) }}{% endfor %}",
    "{% for i in range(99999) %}{{ ('a b ' * 200000).split(' ') | length }}{% endfor %}",
    "{% for i in range(99999) %}{{ [[0]] * 900 | sum(start=[]) }}{% endfor %}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "x" * 2_000_000,
]

CHATML = """{%- if messages[0]['role'] == 'system' -%}\
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' -}}\
{%- endif -%}
{% for message in messages if message.role != 'system' %}
{{ '<|im_start|>' ~ message.role ~ '\\n' }}{% if message.role == 'assistant' %}\
{% generation %}{{ message['content'] | trim }}\
{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\
{{ '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TOOLS = """{{- bos_token }}
{%- macro shown(schema, depth=0) -%}
    {%- for name, value in schema | dictsort recursive %}
{{ '  ' * depth }}{{ name | e }}: \
{% if value is mapping %}{{ shown(value, depth + 1) }}\
{% else %}{{ value | tojson(indent=2) }}{% endif %}
    {%- endfor %}
{%- endmacro %}
{%- if tools %}{% for tool in tools %}{{ shown(tool) | indent(2, true) }}\
{{ loop.index0 }}/{{ tools | length }}\
{% if not loop.last %}, {% endif %}{% endfor %}{% endif %}
{%- set ns = namespace(last=-1, text='') %}
{%- for m in messages[::-1] %}\
{% if ns.last < 0 and m.role == 'user' %}{% set ns.last = messages | length - loop.index %}\
{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else \
m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('') %}
    {%- if '</think>' in content and loop.index0 < ns.last %}\
{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
    {%- set ns.text = ns.text ~ '[' ~ m['role'].upper().ljust(10) ~ ']' %}
{{ '%s|%5d|%-8s' % (m.role, loop.index, content[:8]) }} \
{{ content.replace('a', 'b').strip() ~ none }} {{ '{:>6}'.format(loop.revindex) }}
    {%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}\
{{ call.missing }}{% else %}-{% endfor %}
{%- endfor %}
{{ ns.text }}{{ [1, 2] + [3] }}{{ {'a': (1, 2)} }}{{ 7 // 2 * 3 ** 2 % 5 }}\
{{ 'ab' * 3 }}{{ ns.last | default('x') }}{{ 1.25 | round(1) }}
{% if add_generation_prompt %}{{ 'assistant' | center(20) }}{% endif %}"""
HONEST: list[str] = [
    CHATML,
    TOOLS,
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "plain text",
    "",
]

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "a <b>",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"x": "ü"}}}
CONVERSATIONS: list[list[dict[str, object]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "  hi ü\n"},
        {"role": "assistant", "content": "<think>\na\n</think>\n\nyes"},
    ]
    + [{"role": "user", "content": "again"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "out"},
    ],
    [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "one"},
                {"type": "image"},
                {"type": "text", "text": "two"},
            ],
        }
    ],
    [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i} " * 40}
        for i in range(400)
    ],
]
