"""Renders templates with Python's jinja2 set up as Hugging Face's apply_chat_template does, for chat_template/tests.rs.

Run by hand when a case is added: python3 make_jinja_golden.py > jinja_golden.json (needs jinja2; made with 3.1.6).
"""

import json

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = """{%- if messages[0]['role'] == 'system' -%}
    {%- set system_message = messages[0]['content'] | trim + '\n\n' -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set system_message = '' -%}
{%- endif -%}
{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system_message if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TRIMMED = """Head
  {% for m in messages %}
    {% if m.role == 'user' %}
  user: {{ m.content }}
    {% else %}
  {{ m.role }}: {{ m.content }}
    {% endif %}
  {% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}
tail
"""
NAMESPACE = """{% set ns = namespace(count=0, last='') %}
{% for m in messages %}{% set ns.count = ns.count + 1 %}{% set ns.last = m['content'] %}{% endfor %}
{{ ns.count }} {{ ns.last }} {{ messages | length }} {{ messages[-1].role }} {{ messages[::-1][0].content }}
"""
EXPRESSIONS = [
    "{{ messages | tojson }}",
    "{{ messages[0] | tojson(indent=2) }}",
    "{{ messages | tojson(ensure_ascii=False) }}",
    "{{ {'a': 1.0, 'b': none, 'c': true, 'd': [1, 'x']} }} {{ {'a': 1.5, 'b': none} | tojson }}",
    "{{ 'a,b,c'.split(',')[-1] }} {{ 'a.b.c'.rsplit('.', 1) }} {{ ' x  y z '.rsplit(none, 1) }} {{ 'a b'.rsplit() }}",
    "{{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} {{ 'x'.zfill(0) }}",
    "{{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.txt'.removesuffix('.txt') }} {{ ' x '.strip() }}|",
    "{{ messages is iterable }} {{ messages[0] is mapping }} {{ messages[0].content is string }} {{ tools is none }}",
    "{{ tools is defined and tools }} {{ nothing is defined }} [{{ nothing }}]",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}:{{ m.content }};{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.role }}{% if loop.index > 3 %}{% break %}{% endif %} {% endfor %}",
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "{{ messages | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ '%s' | format('x') }} {{ 'A' ~ 1 ~ none }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }}",
    "{{ messages[0].items() | list }} {{ messages[0].get('absent', 'default') }}",
    "{{ raise_exception('no ' + messages[0].role) }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}|",
    "{%- generation -%} x {%- endgeneration %} y",
    "{{ '<b>&\"' }} {{ messages[0].content | upper }}",
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hello, wörld! <|im_end|> \"quoted\" \\ 🦑\n\tline"}],
    [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": " Two. "},
        {"role": "user", "content": ""},
    ],
    [{"role": "assistant", "content": "I go first"}, {"role": "assistant", "content": "again"}],
]


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_keep"), [], [], body).set_lineno(lineno)

    def _keep(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
environment.filters["tojson"] = tojson
environment.globals["raise_exception"] = raise_exception

cases = []
for template in [CHATML, BLOCKS, TRIMMED, NAMESPACE, *EXPRESSIONS]:
    for messages in CONVERSATIONS:
        for generate in (True, False) if "add_generation_prompt" in template else (True,):
            case = {"template": template, "messages": messages, "add_generation_prompt": generate}
            try:
                case["text"] = environment.from_string(template).render(
                    messages=messages, add_generation_prompt=generate, bos_token="<s>", eos_token="</s>", tools=None, documents=None
                )
            except jinja2.exceptions.TemplateError as error:
                case["refused"] = str(error)
            cases.append(case)
print("[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]")
