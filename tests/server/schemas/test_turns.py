"""Turns: what the assistant said in many parts is one message, joined once."""

from onebox.server.schemas.turns import Turns, text_part


class Unsummed(str):
    """A text that may be joined with others, and never added to one: each sum copies all that is there."""

    __slots__ = ()

    def __add__(self, other):
        raise AssertionError("texts are summed one by one")

    __radd__ = __add__


def test_a_turn_of_many_parts_is_joined_once():
    turns = Turns()
    for number in range(50):
        turns.add_reasoning(Unsummed(f"r{number} "))
        turns.add_content(Unsummed(f"c{number} "))
    turns.add_call("1", "act", "{}")
    turns.add_content(Unsummed("end"))
    (message,) = turns.messages
    assert message["content"] == "".join(f"c{number} " for number in range(50)) + "end"
    assert message["reasoning_content"] == "".join(f"r{number} " for number in range(50))
    assert [call["id"] for call in message["tool_calls"]] == ["1"]


def test_messages_may_be_read_while_turns_are_added():
    turns = Turns()
    turns.add_content("a")
    assert turns.messages[-1]["content"] == "a"
    turns.add_content("b")
    turns.add_message("user", [text_part("c")])
    turns.add_content("d")
    assert [message["content"] for message in turns.messages] == ["ab", [text_part("c")], "d"]
    assert "reasoning_content" not in turns.messages[0]
