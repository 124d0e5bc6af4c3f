"""Renders chat templates with transformers' own renderer: the golden file of crates/model-files/tests/chat_templates.rs.

    python3 integration-tests/python/make_chat_templates.py

It needs transformers 5.24.0 and jinja2 3.1.6 (no torch), and writes integration-tests/data/chat-templates/golden.json. The
templates of the families are the *.jinja files beside that file; the small ones are in CONSTRUCTS here. All of them were
written for this repository.

The file has `templates` and `conversations` by name, and `cases`: a template, a conversation, further variables, whether the
assistant's turn is opened at the end, and the outcome. That is `text`, or `refused` (the message of raise_exception), or
`fails` (Python's own error).
"""

import datetime
import json
from pathlib import Path

import jinja2
from transformers.utils import chat_template_utils

FOLDER = Path(__file__).resolve().parent.parent / "data" / "chat-templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# The test in Rust sets its clock to the same moment.
NOW = datetime.datetime(2000, 2, 29, 13, 5, 9)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a \"place\", <now> & later",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Köln, 東京 …"},
                "days": {"type": "integer", "minimum": 0, "default": 1.0, "enum": [1, 2.5, None, True]},
                "nothing": {},
                "list": [],
            },
            "required": ["place"],
        },
        "return": {"type": "number"},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"place": "Köln's \"Dom\"", "days": 2}}}
CALL_TEXT = {"id": "call00002", "type": "function", "function": {"name": "clock", "arguments": "{\"zone\": \"CET\"}"}}


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CONVERSATIONS = {
    "question": [turn("user", "  Hello, wörld! 'one' \"two\" <b>&amp;</b> \\n 🦑\n\tline \u00a0\u2028end  ")],
    "system": [
        turn("system", " Be brief.\n"),
        turn("user", "One?"),
        turn("assistant", " Two. "),
        turn("user", "日本語 & {{ not_a_template }} {% if %}"),
    ],
    "long": [turn("user" if i % 2 == 0 else "assistant", f"Turn {i}\n") for i in range(5)],
    "empty texts": [turn("system", ""), turn("user", ""), turn("assistant", ""), turn("user", "\n")],
    "no message": [],
    "assistant first": [turn("assistant", "I go first"), turn("user", "Well")],
    "twice the user": [turn("user", "One"), turn("user", "Two"), turn("assistant", "Three")],
    "unknown role": [turn("user", "Hi"), turn("critic", "Hm")],
    "call": [
        turn("system", "Use tools."),
        turn("user", "How is the weather?"),
        {"role": "assistant", "tool_calls": [CALL]},
        turn("tool", "{\"degrees\": 21.5}", tool_call_id="call00001", name="weather"),
        turn("assistant", "It is <warm>."),
        turn("user", "Thanks"),
    ],
    "two calls": [
        turn("user", "Weather and time?"),
        turn("assistant", "I look.", tool_calls=[CALL, CALL_TEXT]),
        turn("tool", "sun", tool_call_id="call00001"),
        turn("tool", "noon", tool_call_id="call00002"),
    ],
    "structured result": [
        turn("user", "Weather?"),
        {"role": "assistant", "tool_calls": [CALL]},
        turn("tool", {"content": {"degrees": 21.5, "sky": None}}, tool_call_id="call00001"),
    ],
    "thoughts": [
        turn("user", "1 + 1?"),
        turn("assistant", "<think>\nOne and\none.\n</think>\n\nTwo."),
        turn("user", "And 2 + 2?"),
        turn("assistant", "Four.", reasoning_content="\nTwo and two.\n"),
    ],
    "parts": [
        turn("system", [{"type": "text", "text": " Look. "}]),
        turn("user", [{"type": "image", "url": "x"}, {"type": "text", "text": " What is it? "}]),
    ],
}
FAMILIES = {
    "llama-2": [{}],
    "llama-3": [
        {},
        {"today": "26 Jul 2024"},
        {"tools": [WEATHER, CLOCK]},
        {"tools": [WEATHER], "tools_with_question": False},
        {"tools": [CLOCK], "builtin_tools": ["weather", "interpreter"]},
    ],
    "mistral": [{}, {"tools": [WEATHER, CLOCK]}],
    "qwen2.5": [{}, {"tools": [WEATHER, CLOCK]}],
    "qwen3": [{}, {"tools": [CLOCK]}, {"enable_thinking": False}, {"enable_thinking": True}],
    "gemma": [{}],
    "gemma-3": [{}],
    "phi-3": [{}],
    "smollm2": [{}],
    "deepseek-like": [{}],
}
# Each on one conversation, "system" where none is named.
CONSTRUCTS = {
    # Blocks, white space, comments.
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}",
    "trimmed blocks": "Head\n  {% for m in messages %}\n    {% if m.role == 'user' %}\n  user: {{ m.content }}\n    {% else %}\n  {{ m.role }}\n    {% endif %}\n  {% endfor %}\ntail\n",
    "kept white space": "a \n {%+ if true %} b {%+ endif +%} \n {{- ' c ' -}} \n d {#- gone -#} e\n\n",
    "final newline": "text\n",
    "final newlines": "text\n\n",
    "comment lines": "a\n{# one #}\nb {# two\n lines #} c\n  {#- three -#}  \nd",
    "raw": "{% raw %}{{ not }} {% this %}{% endraw %} {{ '{{' }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "generation trimmed": "{%- generation -%} x {%- endgeneration %} y {% generation %}\n  z\n{% endgeneration %}\n",
    "crlf": "a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc",
    "if elif else": "{% for m in messages %}{% if loop.first %}first{% elif m.role == 'user' and not loop.last %}user{% elif loop.last %}last{% else %}other{% endif %} {% endfor %}",
    "inline if without else": "[{{ 'x' if false }}] [{{ 'y' if messages }}]",
    "for else": "{% for x in [] %}{{ x }}{% else %}none{% endfor %} {% for x in [1] %}{{ x }}{% else %}none{% endfor %}",
    "for filtered": "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}:{{ m.content }};{% endfor %}",
    "for unpacked": "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }}{{ ', ' if not loop.last }}{% endfor %} {% for (a, b), c in [((1, 2), 3)] %}{{ a + b + c }}{% endfor %}",
    "for over mapping": "{% for k in messages[0] %}{{ k }} {% endfor %}{% for c in 'añb' %}{{ c }}.{% endfor %}",
    "loop fields": "{% for m in messages %}{{ loop.index }} {{ loop.index0 }} {{ loop.revindex }} {{ loop.revindex0 }} {{ loop.first }} {{ loop.last }} {{ loop.length }} {{ loop.depth }} {{ loop.cycle('a', 'b', 'c') }} {{ loop.previtem.role if loop.previtem is defined else '-' }} {{ loop.nextitem.role if loop.nextitem is defined else '-' }} {{ loop.changed(m.role) }}\n{% endfor %}",
    "break and continue": "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.role }}{% if loop.index > 3 %}{% break %}{% endif %} {% endfor %}",
    "nested loops": "{% for m in messages %}{% set outer = loop %}{% for i in range(2) %}{{ outer.index }}.{{ loop.index }} {% endfor %}{% endfor %}",
    "recursive loop": "{% for n in [{'v': 1, 'c': [{'v': 2, 'c': []}]}] recursive %}{{ n.v }}({{ loop(n.c) }}){% endfor %}",
    "scope of set": "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}",
    "set several": "{% set a, b = 1, 'two' %}{{ a }} {{ b }}",
    "set block": "{% set x %}<{{ messages[1].content }}>{% endset %}{{ x }}{{ x | length }} {% set y | upper %}up{% endset %}{{ y }}",
    "with": "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}",
    "filter block": "{% filter upper %}a{{ messages[1].content }}{% endfilter %}",
    "namespace": "{% set ns = namespace(count=0, last='') %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{% set ns.last = m['content'] %}{% endfor %}{{ ns.count }} {{ ns.last }} {{ ns['count'] }} {{ ns.absent is defined }}",
    "namespace of mapping": "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a + ns.b }}",
    "macro": "{% macro turn(m, end='!', n=1) %}<{{ m.role }}{{ end * n }}>{% endmacro %}{% for m in messages %}{{ turn(m) }}{{ turn(m, n=2, end='?') }}{% endfor %}",
    "macro with rest": "{% macro f(a, b=2) %}{{ a }} {{ b }} {{ varargs }} {{ kwargs }}{% endmacro %}{{ f(1, 3, 4, c=5) }}",
    "macro undefined argument": "{% macro f(a) %}[{{ a }}]{{ a is defined }}{% endmacro %}{{ f() }}",
    "macro recursive": "{% macro f(n) %}{{ n }}{% if n > 0 %},{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "macro sees globals": "{% set x = 'outer' %}{% macro f() %}{{ x }} {{ messages | length }}{% endmacro %}{{ f() }}",
    "caller": "{% macro box(t) %}[{{ t }}:{{ caller() }}]{% endmacro %}{% call box('a') %}body{% endcall %}",
    "caller with arguments": "{% macro each(l) %}{% for x in l %}{{ caller(x, loop.index) }};{% endfor %}{% endmacro %}{% call(x, i) each(['a', 'b']) %}{{ i }}{{ x }}{% endcall %}",
    # Values and how they print.
    "literals": "{{ true }} {{ True }} {{ false }} {{ none }} {{ None }} {{ 1 }} {{ -2 }} {{ 1.0 }} {{ 'a' 'b' }} {{ [] }} {{ {} }} {{ () }} {{ (1,) }} {{ (1, 'a') }} {{ 1_000 }}",
    "lists and mappings": "{{ {'a': 1.0, 'b': none, 'c': true, 'd': [1, 'x', \"it's\"], 2: '\\'\"'} }} {{ ['a\nb', 'tab\t', '\\\\', 'ü', '\u200b', '🦑', '\x07'] }}",
    "floats": "{{ 1e20 }} {{ 1e15 }} {{ 1e16 }} {{ 123456789012345678.0 }} {{ 0.1 }} {{ 1e-4 }} {{ 1e-5 }} {{ 0.1 + 0.2 }} {{ 1.5e300 }} {{ 100.0 }} {{ 1e22 }} {{ 1 / 3 }} {{ 2 / 1 }} {{ -0.0 }} {{ [1e20, 1e-7] }} {{ 1.0 ~ '' }}",
    "special floats": "{{ 1e999 }} {{ -1e999 }} {{ 'nan' | float }} {{ [1e999] }}",
    "large integers": "{{ 9007199254740993 }} {{ 2 ** 62 }} {{ 2 ** 100 }} {{ 18446744073709551615 }} {{ 10 ** 20 + 1 }}",
    "arithmetic": "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 4 }} {{ -7 % 4 }} {{ 7.5 // 2 }} {{ 7.5 % 2 }} {{ 2 ** 3 }} {{ 2 ** -1 }} {{ 2 ** 0.5 }} {{ 6 / 4 }} {{ 1 + 2 * 3 - 4 }} {{ (1 + 2) * 3 }} {{ - 3 + 1 }} {{ -2 ** 2 }} {{ true + 1 }} {{ 2.0 * 3 }} {{ 4 / 2 * 3 }} {{ true * 2 }}",
    "unary plus": "{{ +3 }}",
    "precedence": "{{ 1 + 2 ~ 3 + 4 }} {{ 'a' ~ 1 * 2 }} {{ 1 + 1 == 2 and not false }} {{ 2 * 3 | string }} {{ -1 | abs }} {{ 'a' + 'b' | upper }} {{ 1 + 2 is odd }} {{ not 1 == 2 }} {{ 1 if 0 else 2 if 0 else 3 }} {{ 'a' in 'ab' and 'c' not in 'ab' }}",
    "comparisons": "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ [1, 2] == [1, 2] }} {{ [1, 2] < [1, 3] }} {{ {'a': 1} == {'a': 1.0} }} {{ none == false }} {{ true == 1 }} {{ '1' == 1 }} {{ 1 != 2 }} {{ 2 >= 2 }}",
    "and or": "{{ '' or 'default' }} {{ 'a' and 'b' }} {{ none or 0 }} {{ [] and 1 }} {{ nothing or 'x' }} {{ not [] }} {{ not 'a' }}",
    "membership": "{{ 'a' in ['a'] }} {{ 'role' in messages[0] }} {{ 'tool_calls' in messages[0] }} {{ 'Be' in messages[0].content }} {{ 1 in (1, 2) }} {{ 'x' not in {'x': 1} }} {{ 3 in range(5) }} {{ '' in 'a' }}",
    "string multiplication": "{{ 'ab' * 3 }} {{ 3 * '-' }}[{{ 'x' * 0 }}] {{ [1, 2] * 2 }}",
    "multiplication by less than none": "[{{ 'x' * -1 }}]",
    "concatenation": "{{ 'A' ~ 1 ~ none ~ 1.0 ~ true ~ [1] }} {{ 'a' + 'b' }} {{ [1] + [2, 3] }} {{ (1,) + (2,) }}",
    "percent": "{{ '%s' % 'x' }} {{ '%s and %d, %5.2f|%-5s|%05d|%x|%%' % ('a', 3, 2.5, 'l', 42, 255) }} {{ '%(a)s' % {'a': 1} }} {{ '%r' % 'q' }} {{ '%s' % messages[0].role }} {{ '%s' % none }} {{ '%s' % [1, 'a'] }} {{ '%3d|%+d|% d|%e|%g' % (5, 5, 5, 1234.5, 0.0001) }}",
    "percent of expression": "{{ ('%s' + '-%s') % (1, 2) }} {% set f = '<%s>' %}{{ f % f }} {{ '%s' % ('a' if true else 'b') }} {{ '%s' % 'a' | upper }} {{ '%.3s|%c|%i' % ('abcdef', 'z', 7.9) }}",
    "slices": "{{ messages[1:] | length }} {{ messages[:-1] | length }} {{ messages[::-1][0].content }} {{ 'abcdef'[1:4] }} {{ 'abcdef'[-2:] }} {{ 'abcdef'[::2] }} {{ 'abcdef'[::-1] }} {{ [1, 2, 3, 4][1:3] }} {{ 'abc'[5:] }}| {{ (1, 2, 3)[:2] }} {{ [1, 2, 3][::-2] }} {{ 'añb'[1] }} {{ 'abc'[-1] }} {{ [1, 2, 3][4:1:-1] }} {{ 'abcdef'[4:1:-1] }} {{ 'abc'[-5:2] }}",
    "index": "{{ messages[-1].role }} {{ messages[0]['role'] }} {{ [1, 2][5] is defined }} {{ {'a': {'b': 1}}.a.b }} {{ {'a': 1}['x'] is defined }} {{ messages[0].absent is defined }} {{ {1: 'one'}[1] }} {{ ['a', 'b'].0 }}",
    "undefined": "[{{ nothing }}] {{ nothing is defined }} {{ nothing is undefined }} {{ nothing | default('d') }} {{ '' | default('d', true) }} {{ none | default('d') }} {{ messages[0].absent | default('x') }} {{ [nothing] | length }} {% for x in nothing %}x{% endfor %} {{ nothing ~ 'a' }} {{ nothing == nothing }} {{ nothing | length }} {{ nothing | list }} {{ nothing | string }}",
    "string escapes": r"""{{ 'a\nb\t\\ \' \x41 \u00e9 "' }}{{ "it's \"q\"" }}{{ '\q' }}""",
    "escape of eight digits": r"{{ '\U0001F991' }}",
    # Tests.
    "is": "{% for x in [1, 1.5, 'a', none, true, [1], {'a': 1}, (1,), nothing, range(2)] %}{{ x is string }} {{ x is mapping }} {{ x is iterable }} {{ x is sequence }} {{ x is number }} {{ x is integer }} {{ x is float }} {{ x is boolean }} {{ x is none }} {{ x is defined }} {{ x is true }} {{ x is false }} {{ x is callable }}\n{% endfor %}",
    "is compared": "{{ 3 is odd }} {{ 4 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(4) }} {{ 1 is eq 1 }} {{ 1 is equalto 2 }} {{ 2 is gt 1 }} {{ 1 is in [1] }} {{ none is sameas none }} {{ 'a' is lower }} {{ 'A' is upper }} {{ 1 is not string }} {{ 2 is ge 2 }} {{ 1 is lt 2 }} {{ 1 is ne 1 }} {{ 'upper' is filter }} {{ 'odd' is test }}",
    "is tools": "{{ tools is none }} {{ tools is defined and tools }} {{ documents is none }} {{ tools is not none and tools is iterable }} {{ add_generation_prompt is true }} {{ bos_token is string }} {{ sep_token is defined }} {{ pad_token }}",
    # Methods.
    "split": "{{ 'a,b,c'.split(',')[-1] }} {{ 'a.b.c'.rsplit('.', 1) }} {{ ' x  y z '.rsplit(none, 1) }} {{ 'a b'.rsplit() }} {{ ' a  b '.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a'.split('x') }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a--b'.split('-') }} {{ 'a b c'.split(' ', maxsplit=1) }} {{ 'abc'.partition('b') }} {{ 'abcbd'.rpartition('b') }} {{ 'a'.partition('x') }} {{ 'a\nb\r\nc\n'.splitlines() }} {{ 'a\nb'.splitlines(true) }}",
    "strip": "[{{ ' x '.strip() }}] [{{ 'xxaxx'.strip('x') }}] [{{ '\n\n a\n'.lstrip('\n') }}] [{{ 'ab\n '.rstrip() }}] [{{ 'abc'.strip('ca') }}] [{{ '\u00a0\u2003a\u200b'.strip() }}] [{{ '\x1ca\x1f'.strip() }}]",
    "affixes": "{{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.txt'.removesuffix('.txt') }} {{ 'x'.removesuffix('') }} {{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('b', 'c')) }} {{ 'abc'.startswith('b', 1) }} {{ 'abc'.endswith('b', 0, 2) }}",
    "case": "{{ 'hELLO wORLD'.upper() }} {{ 'HeLLo'.lower() }} {{ 'hello wORLD'.title() }} {{ 'hELLO wORLD'.capitalize() }} {{ \"they're x1y-z\".title() }} {{ 'straße'.upper() }}",
    "find": "{{ 'abcabc'.find('c') }} {{ 'abc'.find('x') }} {{ 'añcabc'.rfind('c') }} {{ 'abab'.count('ab') }} {{ 'aaa'.count('aa') }} {{ 'abc'.index('b') }} {{ 'aba'.find('a', 1) }} {{ 'abc'.count('') }} {{ [1, 2, 1].count(1) }} {{ [1, 2].index(2) }}",
    "replace": "{{ 'aXbX'.replace('X', '-') }} {{ 'aXbX'.replace('X', '-', 1) }} {{ 'abc'.replace('', '.') }} {{ 'a\nb'.replace('\n', '\\n') }} {{ 'ab' | replace('a', 'x') }} {{ 'aab' | replace('a', 'x', 1) }}",
    "pad": "{{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} {{ 'x'.zfill(0) }} [{{ 'a'.ljust(3) }}] [{{ 'a'.rjust(3, '.') }}] [{{ 'ab'.center(5, '*') }}] [{{ 'abc'.center(6) }}] [{{ 'a' | center(4) }}]",
    "is methods": "{{ '12'.isdigit() }} {{ 'a1'.isalnum() }} {{ 'ab'.isalpha() }} {{ ' '.isspace() }} {{ 'AB'.isupper() }} {{ 'ab'.islower() }} {{ ''.isdigit() }} {{ '1.5'.isnumeric() }} {{ '²'.isdigit() }} {{ '½'.isnumeric() }} {{ 'é'.isascii() }}",
    "rare methods": "{{ 'aB'.swapcase() }} {{ 'ß'.casefold() }} {{ 'a\tb'.expandtabs(4) }} {{ 'Ab Cd'.istitle() }} {{ '½'.isdigit() }} {{ '١'.isdecimal() }} {{ 'a_1'.isidentifier() }} {{ 'a\n'.isprintable() }}",
    "join method": "{{ ', '.join(['a', 'b']) }} {{ ''.join([]) }} {{ '-'.join('abc') }} {{ '/'.join({'a': 1, 'b': 2}) }}",
    "format method": "{{ '{} and {}'.format('a', 1) }} {{ '{0}{1}{0}'.format('a', 'b') }} {{ '{name}: {x:.2f}'.format(name='n', x=1.239) }} {{ '{:>5}|{:<4}|{:^5}|{:05d}|{:,}'.format('a', 'b', 'c', 42, 1234567) }} {{ '{{}}'.format() }} {{ '{:x}'.format(255) }} {{ '{:.3}'.format('abcdef') }}",
    "format method with repr": "{{ '{!r}'.format('q') }}",
    "mapping methods": "{{ messages[0].items() | list }} {{ messages[0].get('absent', 'default') }} {{ messages[0].get('absent') }} {{ messages[0].keys() | list }} {{ messages[0].values() | list }} {% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %} {{ {'a': 1}.copy() }} {{ {'items': 5}['items'] }} {{ {'items': 5}.items() | list }}",
    "dict function": "{{ dict(a=1, b=2) }} {{ dict({'a': 1}, b=3) }} {{ dict() }} {{ dict([('x', 1)]) }}",
    "mapping views": "{{ 'a' in {'a': 1}.keys() }} {% for v in {'a': 1}.values() %}{{ v }}{% endfor %}",
    "views printed": "{{ {'a': 1}.keys() }} {{ {'a': 1}.items() }} {{ {'a': 1}.values() }} {{ range(3) }}",
    # Filters.
    "tojson": "{{ messages | tojson }}",
    "tojson indented": "{{ {'a': [1, {'b': none}], 'c': {}, 'd': []} | tojson(indent=2) }} {{ [1, 'ü'] | tojson(indent=4) }} {{ {'a': 1} | tojson(indent=0) }}",
    "tojson values": "{{ [1.0, 1e20, 1e-7, 0.1, true, none, 'q\"\\\\\n\t\x07\x7f', '<&>\\'', '🦑', 2 ** 70, 1e999, (1, 2)] | tojson }} {{ 'a' | tojson }} {{ none | tojson }} {{ {2: 'a', 1.5: 'b', true: 'c', none: 'd'} | tojson }}",
    "equal keys": "{{ {1: 'a', true: 'c'} | tojson }}",
    "tojson keywords": "{{ {'b': 'ü', 'a': 1} | tojson(ensure_ascii=true) }} {{ {'b': 1, 'a': {'d': 1, 'c': 2}} | tojson(sort_keys=true) }} {{ {'b': [1, 2]} | tojson(separators=(',', ':')) }} {{ [1, 2] | tojson(indent=1, separators=(',', ': ')) }} {{ '🦑\x7f' | tojson(ensure_ascii=True) }} {{ {'a': 1} | tojson(false, 2) }}",
    "string filters": "{{ ' a ' | trim }}| {{ 'xxa' | trim('x') }} {{ 'aB c' | upper }} {{ 'aB c' | lower }} {{ 'ab cd-ef' | title }} {{ 'aB' | capitalize }} {{ 'a b  c' | wordcount }} {{ 'abc' | length }} {{ 'abc' | count }} {{ 'abc' | reverse }} {{ 'abc' | first }} {{ 'abc' | last }} {{ 5 | string + 'x' }} {{ 'abc' | list }} {{ '<b>' | e }} {{ '<b>' | safe }} {{ 'a' | string is string }}",
    "truncate": "{{ 'The quick brown fox jumps' | truncate(14) }} {{ 'The quick brown fox' | truncate(9, true, '…') }} {{ 'The quick' | truncate(5) }} {{ 'TheQuickBrownFox' | truncate(8, leeway=0) }}",
    "indent": "{{ 'a\nb\n\nc\n' | indent }}| {{ 'a\nb' | indent(2, true) }} {{ 'a\n\nb' | indent(width=1, blank=true) }} {{ 'a\nb' | indent('> ') }} {{ 'a\n' | indent(2, first=true) }}|",
    "join filter": "{{ [1, 'a', none] | join(', ') }} {{ messages | map(attribute='role') | join('-') }} {{ messages | join(',', attribute='role') }} {{ 'abc' | join('.') }} {{ [] | join }}",
    "select filters": "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | list }} {{ [1, 2, 3] | select('odd') | list }} {{ [1, 2, 3] | reject('gt', 1) | list }} {{ [0, 1, '', 'a'] | select | list }} {{ messages | selectattr('tool_calls', 'defined') | list }} {{ messages | selectattr('content') | list | length }} {{ messages | selectattr('role', 'in', ['user', 'system']) | list | length }}",
    "map": "{{ ['a', 'b'] | map('upper') | list }} {{ [' a', 'b '] | map('trim') | join }} {{ [{'a': 1}, {}] | map(attribute='a', default='x') | list }} {{ [[1, 2], [3]] | map('length') | list }} {{ ['a', 'b'] | map('replace', 'a', 'x') | list }} {{ [{'a': {'b': 1}}] | map(attribute='a.b') | list }}",
    "sort filters": "{{ [3, 1, 2] | sort }} {{ ['b', 'A', 'c'] | sort }} {{ ['b', 'A'] | sort(case_sensitive=true) }} {{ [1, 2] | sort(reverse=true) }} {{ messages | sort(attribute='role') | map(attribute='role') | list }} {{ {'b': 1, 'a': 2} | dictsort }} {{ {'b': 1, 'a': 2} | dictsort(by='value') }} {{ {'b': 1, 'A': 2} | dictsort(true) }} {{ [3, 1] | max }} {{ [3, 1] | min }} {{ ['b', 'a'] | min }} {{ [1, 2] | sum }} {{ [{'a': 1}, {'a': 2}] | sum(attribute='a') }} {{ [] | sum }}",
    "unique and group": "{{ ['a', 'A', 'b'] | unique | list }} {{ [1, 1, 2] | unique | list }} {% for g, l in messages | groupby('role') %}{{ g }}:{{ l | length }} {% endfor %}{% for g in messages | groupby('role') %}{{ g.grouper }}={{ g.list | length }} {% endfor %}",
    "batch and slice": "{{ [1, 2, 3, 4, 5] | batch(2) | list }} {{ [1, 2, 3] | batch(2, 'x') | list }} {{ [1, 2, 3, 4, 5] | slice(2) | list }} {{ [1, 2, 3] | slice(2, 'x') | list }}",
    "number filters": "{{ 1.25 | round(1) }} {{ 2.5 | round }} {{ 3.7 | round(0, 'floor') }} {{ 3.2 | round(method='ceil') }} {{ '5' | int }} {{ 'x' | int }} {{ 'x' | int(7) }} {{ 3.9 | int }} {{ '3.9' | int }} {{ '2.5' | float }} {{ 'x' | float }} {{ 3 | float }} {{ -3 | abs }} {{ 1234 | round(-2) }} {{ 'ff' | int(0, 16) }} {{ 2.675 | round(2) }} {{ 5 | round }}",
    "list filters": "{{ [1, 2] | first }} {{ [1, 2] | last }} {{ [] | first is defined }} {{ [1, 2] | reverse | list }} {{ [1, 2] | length }} {{ {'a': 1} | length }} {{ {'a': 1} | items | list }} {{ {'a': 1} | list }} {{ (1, 2) | list }} {{ range(3) | list }} {{ range(1, 10, 3) | list }} {{ range(3, 0, -1) | list }} {{ nothing | items | list }}",
    "format filter": "{{ '%s' | format('x') }} {{ '%s-%s' | format(1, none) }} {{ '%(a)s' | format(a=1) }} {{ '%d%%' | format(5) }}",
    "other filters": "{{ 'a' | forceescape }}",
    "attr and pprint": "{{ {'a': 1} | attr('a') is defined }} {{ [1, [2]] | pprint }}",
    "strftime": "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ strftime_now('%d %B %Y, %A %a %b %j %I %p %y %%') }} {{ strftime_now('%-d %-m %e') }} {{ strftime_now('%D %T %R %F') }}",
    "mutation refused": "{% set l = [] %}{% set _ = l.append(1) %}{{ l }}",
    "do": "{% do messages %}x",
    "thinking split": "{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}{% set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{% set c = c.split('</think>')[-1].lstrip('\n') %}({{ r }}){% endif %}{{ c }}|{% endfor %}",
    "reasoning fields": "{% for m in messages %}{{ m.reasoning_content }} {{ m.thinking }};{% endfor %}",
    "tool arguments": "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.function.arguments }} {{ c['function'] | tojson }}\n{% endfor %}{% endfor %}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p['text'] | trim }}{% elif p['type'] == 'image' %}<image {{ loop.index }}>{% endif %}{% endfor %}{% endif %}\n{% endfor %}{{ messages[1] }}",
    "messages printed": "{{ messages }}",
    "documents": "{% for d in documents %}{{ loop.index }}. {{ d.title }}: {{ d['text'] | truncate(20) }}\n{% endfor %}",
    "markup": "{{ '<b>&\"\\'' }} {{ messages[0].content | upper }} {{ messages | length }}",
    "raise": "{{ raise_exception('no ' + messages[0].role) }}",
    "raise in macro": "{% macro f(m) %}{% if m.role == 'user' %}{{ raise_exception('deep: ' ~ m.content) }}{% endif %}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "raise number": "{{ raise_exception(5) }}",
    # Errors of Python.
    "undefined attribute": "{{ nothing.more }}",
    "undefined call": "{{ nothing() }}",
    "add text and number": "{{ 'a' + 1 }}",
    "add text and none": "{{ 'a' + none }}",
    "unknown filter": "{% if false %}{{ 'a' | no_such_filter }}{% endif %}",
    "unknown method": "{{ 'a'.no_such_method() }}",
    "division by zero": "{{ 1 / 0 }}",
    "undefined in arithmetic": "{{ nothing + 'a' }}",
    "private name": "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    "sandbox": "{{ ''.__class__.__mro__ }}",
    "large range": "{{ range(1000000) | list | length }}",
}
CONVERSATION_OF = {
    "thinking split": "thoughts",
    "reasoning fields": "thoughts",
    "tool arguments": "two calls",
    "parts": "parts",
    "markup": "question",
    "tojson": "question",
    "messages printed": "question",
}
VARIABLES_OF = {"documents": {"documents": [{"title": "One", "text": "A text that is longer than twenty"}, {"title": "2", "text": "short"}]}}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def outcome(source, messages, variables, generate):
    """As `apply_chat_template` does it, after it has looked at the tokenizer."""
    messages = chat_template_utils._normalize_chat_messages(messages)
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            conversations=[messages], chat_template=source, add_generation_prompt=generate, **{**SPECIAL, **variables}
        )
        return {"text": texts[0]}
    except jinja2.exceptions.TemplateError as error:
        # A subclass is jinja2's own complaint; the class itself is what raise_exception raises.
        return {"refused": str(error)} if type(error) is jinja2.exceptions.TemplateError else {"fails": repr(error)}
    except (TypeError, ValueError, KeyError, ZeroDivisionError, OverflowError, AttributeError, IndexError) as error:
        return {"fails": repr(error)}


def main():
    chat_template_utils.datetime = Clock
    templates = {name: (FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in FAMILIES}
    cases = []
    for name, settings in FAMILIES.items():
        for variables in settings:
            for conversation, messages in CONVERSATIONS.items():
                for generate in (True, False):
                    result = outcome(templates[name], messages, variables, generate)
                    cases.append({"template": name, "conversation": conversation, "variables": variables, "generate": generate, **result})
    for name, source in CONSTRUCTS.items():
        conversation, variables = CONVERSATION_OF.get(name, "system"), VARIABLES_OF.get(name, {})
        result = outcome(source, CONVERSATIONS[conversation], variables, True)
        cases.append({"template": name, "conversation": conversation, "variables": variables, "generate": True, **result})
    line = lambda value: json.dumps(value, ensure_ascii=False)
    pairs = lambda table: "{\n" + ",\n".join(f"{line(key)}: {line(value)}" for key, value in table.items()) + "\n}"
    with open(FOLDER / "golden.json", "w", encoding="utf-8") as file:
        file.write(f'{{"special": {line(SPECIAL)},\n"constructs": {pairs(CONSTRUCTS)},\n"conversations": {pairs(CONVERSATIONS)},\n')
        file.write('"cases": [\n' + ",\n".join(map(line, cases)) + "\n]}\n")
    outcomes = [next(key for key in ("text", "refused", "fails") if key in case) for case in cases]
    print(f"{len(CONSTRUCTS)} constructs, {len(FAMILIES)} families, {len(cases)} cases:", {key: outcomes.count(key) for key in set(outcomes)})


if __name__ == "__main__":
    main()
