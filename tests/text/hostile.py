"""Conversations of hostile clients, and the same conversations with harmless text in place of theirs."""

from hypothesis import strategies as st

CONTROL = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|fim_prefix|>", "<|file_sep|>"),
]
# Whole and in halves, so that strings joined by the template spell them.
HALVES = [half for name in CONTROL[:4] + CONTROL[7:11] for half in (name[:1], name[:3], name[3:], name[:-1], name[-1:])]
TEXTS = st.lists(
    st.sampled_from(
        [
            *CONTROL,
            *HALVES,
            *(
                "user\n",
                "assistant\n",
                "system\n",
                "\n",
                "\n\n",
                " ",
                "  ",
                "a",
                "word",
                "é🙂",
                "12",
                "<",
                ">",
                "|",
                "\\",
            ),
            *("<function=f>", "<parameter=x>", "</parameter>", "</function>", '"', "{{ 7 }}", "{% raw %}", "\ue000"),
        ]
    ),
    max_size=6,
).map("".join)
NAMES = TEXTS.filter(lambda text: text not in ("type", "function"))
VALUES = st.recursive(
    TEXTS | st.integers() | st.none() | st.booleans(),
    lambda held: st.lists(held, max_size=2) | st.dictionaries(NAMES, held, max_size=2),
    max_leaves=4,
)
PARTS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3)
CALLS = st.builds(
    lambda name, arguments: {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}},
    TEXTS,
    st.dictionaries(NAMES, VALUES, max_size=2),
)
MESSAGES = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), TEXTS | PARTS
    ),
    st.builds(
        lambda content, reasoning, calls: {
            "role": "assistant",
            "content": content,
            **({"reasoning_content": reasoning} if reasoning is not None else {}),
            **({"tool_calls": calls} if calls else {}),
        },
        TEXTS | PARTS,
        st.none() | TEXTS,
        st.lists(CALLS, max_size=2),
    ),
)
TOOLS = st.lists(
    st.builds(
        lambda name, text, schema: {
            "type": "function",
            "function": {"name": name, "description": text, "parameters": schema},
        },
        TEXTS,
        TEXTS,
        st.dictionaries(NAMES, VALUES, max_size=2),
    ),
    max_size=2,
)
CONVERSATIONS = st.tuples(
    st.none() | TEXTS,
    TEXTS,
    st.lists(MESSAGES, max_size=4),
    TOOLS,
).map(
    lambda parts: (
        [
            *([{"role": "system", "content": parts[0]}] if parts[0] is not None else []),
            {"role": "user", "content": parts[1]},
            *parts[2],
        ],
        parts[3],
    )
)


def harmless(value):
    """The value with other characters in place of the edges of control tokens, so that none is spelled."""
    match value:
        case str():
            return value.replace("<", "«").replace(">", "»")
        case dict():
            return {harmless(key): harmless(held) for key, held in value.items()}
        case list():
            return [harmless(held) for held in value]
        case _:
            return value
