r"""The text side of the tiny random checkpoint: a byte-level tokenizer, a chat template, the generation config.

The tokenizer knows the 256 bytes, without merges, and the family's 26 control tokens at their usual distances from
<|endoftext|>. The template is written anew and behaves as Qwen3.5's does: turns between <|im_start|> and <|im_end|>, an
answer that begins inside <think>, old reasoning dropped, tool calls in the XML form, a pad token for each picture.
"""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["FIRST_SPECIAL_TOKEN", "PADDED_VOCAB_SIZE", "text_files"]

FIRST_SPECIAL_TOKEN = 256
PADDED_VOCAB_SIZE = 384

# In the order of their ids. The last ones are ordinary text to a decoder: a reader of the output must see them.
_CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_VISIBLE = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

_TEMPLATE = r"""
{%- macro text_of(message) -%}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- elif message.content -%}
        {%- for part in message.content -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type in ('image', 'video') and message.role != 'system' -%}
                {{- '<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>' -}}
            {%- else -%}
                {{- raise_exception('A ' ~ message.role ~ ' message cannot hold a part of type ' ~ part.type ~ '.') -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro written_call(function) -%}
    {{- '<tool_call>\n<function=' ~ function.name ~ '>\n' -}}
    {%- for key, value in (function.arguments or {}) | items -%}
        {%- set is_plain = value is string or value is not sequence and value is not mapping -%}
        {{- '<parameter=' ~ key ~ '>\n' ~ (value if is_plain else value | tojson) ~ '\n</parameter>\n' -}}
    {%- endfor -%}
    {{- '</function>\n</tool_call>' -}}
{%- endmacro -%}
{%- set turns = namespace(last_query=-1) -%}
{%- for message in messages -%}
    {%- set content = text_of(message) | trim -%}
    {%- set is_result = content.startswith('<tool_response>') and content.endswith('</tool_response>') -%}
    {%- if message.role == 'system' and not loop.first -%}
        {{- raise_exception('A system message can only be the first message.') -}}
    {%- elif message.role == 'user' and not is_result -%}
        {%- set turns.last_query = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- if turns.last_query < 0 -%}
    {{- raise_exception('The conversation holds no question of a user.') -}}
{%- endif -%}
{%- set has_system = messages[0].role == 'system' -%}
{%- set system = text_of(messages[0]) | trim if has_system else '' -%}
{%- if tools -%}
    {{- '<|im_start|>system\n# Tools\n\nThese functions can be called:\n\n<tools>' -}}
    {%- for tool in tools -%}
        {{- '\n' ~ (tool | tojson) -}}
    {%- endfor -%}
    {{- '\n</tools>\n\nA call is written like this, with nothing after it:\n\n<tool_call>\n<function=NAME>\n' -}}
    {{- '<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>' -}}
    {{- ('\n\n' ~ system if system else '') ~ '<|im_end|>\n' -}}
{%- elif has_system -%}
    {{- '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = text_of(message) | trim -%}
    {%- if message.role == 'user' -%}
        {{- '<|im_start|>user\n' ~ content ~ '<|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set is_split = message.reasoning_content is string or '</think>' not in content -%}
        {%- set answer = content if is_split else content.split('</think>')[-1].lstrip('\n') -%}
        {%- set thought = (message.reasoning_content or '') if is_split
            else content.split('</think>')[0].split('<think>')[-1] -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if loop.index0 > turns.last_query -%}
            {{- '<think>\n' ~ (thought | trim) ~ '\n</think>\n\n' -}}
        {%- endif -%}
        {{- answer -}}
        {%- for call in message.tool_calls or [] -%}
            {{- ('' if loop.first and not answer | trim else '\n\n' if loop.first else '\n') -}}
            {{- written_call(call.function or call) -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {{- '<|im_end|>\n' -}}
        {%- endif -%}
    {%- elif message.role != 'system' -%}
        {{- raise_exception('The role ' ~ message.role ~ ' is not one of system, user, assistant and tool.') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n<think>\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '\n</think>\n\n' -}}
    {%- endif -%}
{%- endif -%}
"""


def text_files() -> dict[str, str]:
    """The checkpoint's text files by name."""
    end, message_end = FIRST_SPECIAL_TOKEN, FIRST_SPECIAL_TOKEN + _CONTROL.index("<|im_end|>")
    generation = {
        "bos_token_id": end,
        "do_sample": True,
        "eos_token_id": [message_end, end],
        "pad_token_id": end,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
    tokenizer_config = {
        "add_prefix_space": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    return {
        "chat_template.jinja": _TEMPLATE.lstrip("\n"),
        "generation_config.json": _json(generation),
        "tokenizer.json": _tokenizer().to_str(pretty=True) + "\n",
        "tokenizer_config.json": _json(tokenizer_config),
    }


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in _CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _VISIBLE])
    return tokenizer


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
