"""Small chat templates in the manner of released ones, and conversations for them."""

LLAMA_3 = """{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- set open = '<|start_header_id|>%s<|end_header_id|>\\n\\n' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- endif %}
{{- open % 'system' ~ 'Today Date: ' ~ date_string ~ '\\n\\n' ~ (system or '') ~ '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.role in ('tool', 'ipython') %}
        {{- open % 'ipython' ~ (m.content if m.content is string else m.content | tojson) ~ '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- open % m.role ~ '{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}<|eot_id|>' }}
    {%- else %}
        {{- open % m.role }}
        {%- if tools is not none and loop.first %}
            {%- for tool in tools %}{{ tool | tojson(indent=4) ~ '\\n\\n' }}{% endfor %}
        {%- endif %}
        {{- m['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ open % 'assistant' }}{% endif %}"""

QWEN_3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' ~ (messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '') }}
    {{- '<tools>' }}{% for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}
        {%- if thought or loop.last %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' ~ call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif m.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

GEMMA_3 = """{{ bos_token }}
{%- set prefix = '' %}
{%- if messages[0].role == 'system' %}
    {%- set prefix = messages[0].content if messages[0].content is string else messages[0].content[0].text %}
    {%- set messages = messages[1:] %}{% set prefix = prefix + '\\n\\n' %}
{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' ~ (prefix if loop.first else '') }}
    {%- if m.content is string %}
        {{- m.content | trim }}
    {%- else %}
        {%- for part in m.content %}
            {%- if part.type == 'image' %}{{ '<image>' }}{% else %}{{ part.text | trim }}{% endif %}
        {%- endfor %}
    {%- endif %}{{ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

HARMONY = """{{- '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort or 'medium') ~ '<|end|>' }}
{%- for tool in tools or [] %}{{ '<|start|>developer<|message|># Tools\\n\\n' ~ tool | tojson ~ '<|end|>' }}{% endfor %}
{%- set ns = namespace(called='') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {{- '<|start|>developer<|message|># Instructions\\n\\n' ~ m.content ~ '<|end|>' }}
    {%- elif m.role == 'user' %}
        {{- '<|start|>user<|message|>' ~ m.content ~ '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' ~ ns.called ~ ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content ~ '<|end|>' }}
    {%- elif m.tool_calls %}
        {%- set said = messages[loop.index:] | selectattr('role', 'eq', 'assistant') | rejectattr('tool_calls') %}
        {%- set thought = m.thinking or m.content %}
        {%- if thought and not said | list %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' ~ thought ~ '<|end|>' }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}{% set ns.called = call.name %}
        {{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson ~ '<|call|>' }}
    {%- else %}
        {%- set ends = loop.last and not add_generation_prompt %}
        {%- if ends and m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ ('<|return|>' if ends else '<|end|>') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""gpt-oss': reasoning is written in the last message alone, and beside tool calls until an answer follows."""

TEMPLATES = {"llama 3": LLAMA_3, "qwen 3": QWEN_3, "gemma 3": GEMMA_3, "harmony": HARMONY}

SYSTEM = {"role": "system", "content": " You are a cat. "}
USER = {"role": "user", "content": "  Where is the mat?\n"}
SAID = {"role": "assistant", "content": "Under the 🦊 dog. "}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "the <mat>", "count": 3}}}

CONVERSATIONS = {
    "one message": [USER],
    "system": [SYSTEM, USER, SAID, USER],
    "keys that are None": [USER | {"name": None, "tool_calls": None}, SAID | {"tool_calls": None, "reasoning": None}],
    "content None": [USER, {"role": "assistant", "content": None}],
    "a tool call": [
        *(SYSTEM, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
        {"role": "tool", "name": "find", "content": '{"place": "under the dog"}'},
    ],
    "two tool calls": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}],
    "reasoning_content": [USER, SAID | {"reasoning_content": "\nhm\n"}],
    "reasoning": [USER, SAID | {"reasoning": "hm", "thinking": None}],
    "thinking": [USER, SAID | {"thinking": "hm"}, USER],
    "reasoning twice": [USER, SAID | {"reasoning": "no", "reasoning_content": "yes"}],
    "reasoning in the text": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}],
}


FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds things.",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"type": "string", "description": "The thing to find"},
                "count": {"type": "integer", "description": "How many"},
            },
            "required": ["what"],
        },
    },
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "é <b>", "parameters": {"type": "object", "properties": {}}},
}
OPTIONS = [
    {},
    {"add_generation_prompt": True},
    {"tools": [FIND, WEATHER]},
    {"tools": []},
    {"continue_final_message": True},
]
