"""What goes wrong with texts, a line each: a row is dropped, a run ends, a warning is printed."""

import json
import warnings
from string import ascii_letters

import pytest
from encoded import encode_pair, message

from runtime.chats import UnusableRow

CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}={% endif %}"
    "{% if m.role == 'assistant' %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
OPENING = CHAT.replace("m.content }}<", "m.content.split('>')[-1] }}<")
OPENING += "{% if add_generation_prompt %},+{% endif %}"
OTHERWISE = CHAT.replace("}}={%", "}}{{ '=' if loop.last else '+=' }}{%")  # once it is answered
NOTHING = "{% for m in messages if m.role == 'user' %}{{ m.content }}={% endfor %}"
ANY_ROLE = "{% for m in messages %}{{ m.role[:0] + m.content }}{% endfor %}"
NAMED = "{# renamed, trained #}{% for m in messages %}{{ m.content | trim }}{% endfor %}"
CALLS = CHAT.replace("m.content }}<", "m.tool_calls[0].function.arguments | tojson }}<")
ASKED = [message("user", "5+6")]
EMPTY = "with an empty prompt or completion"
ROLE = "every chat message needs a role and a content"
IMAGE = [{"type": "image", "url": "x.png"}]
CALL = {"function": {"name": "f", "arguments": '{"1": 2}'}}


def answer(content, **more):
    return [message("assistant", content, **more)]


TURN = {"role": "user", "content": "5+6"}
SAYS_A_CHAT = [json.dumps(says) for says in ([TURN], TURN, {"messages": [TURN]})]
SAYS_A_CHAT += [" " + json.dumps([{"from": "human", "value": "5+6"}]), str([TURN])]
SAYS_A_CHAT += [json.dumps(SAYS_A_CHAT[0]), str(SAYS_A_CHAT[4])]

CASES = [
    # template, prompt, completion, kind, what is said
    (None, "5+6=", "", UnusableRow, EMPTY),
    (None, " \n", "11", UnusableRow, EMPTY),
    (None, "5+6=", None, UnusableRow, EMPTY),
    (CHAT, [], answer("11"), UnusableRow, EMPTY),
    (CHAT, ASKED, answer(" "), UnusableRow, EMPTY),
    (CHAT, ASKED, answer([{"type": "text", "text": " "}]), UnusableRow, EMPTY),
    (None, 12, "11", ValueError, "expected a string or a list of chat messages, found 12"),
    (None, "5+6=", {"role": "user"}, ValueError, "expected a string or a list .*, found {'role'"),
    (CHAT, [{"content": "1+2"}], "3", ValueError, ROLE),
    (CHAT, ["1+2"], "3", ValueError, ROLE),
    (CHAT, [message("user", IMAGE)], "3", ValueError, "only parts of type `text`.*'image'"),
    (None, "<bos>1+2=", "3", ValueError, "two BOS"),
    (CHAT, [message("human", "5+6")], "3", ValueError, "knows no role 'human'"),
    (ANY_ROLE, ASKED, [message("gpt", "3")], ValueError, "knows no role 'gpt'"),
    (CHAT, ASKED, [message("tool", "4"), *answer("3")], UnusableRow, "several messages"),
    (CHAT, ASKED, [message("user", "11")], UnusableRow, "is not an assistant's turn"),
    (CHAT, ASKED, answer("11<eos>1"), UnusableRow, "a special token in the text of a message"),
    (CHAT, answer("1+2"), "3", UnusableRow, "prompt ends with an assistant's turn"),
    (CHAT, ASKED, answer(None, tool_calls=[1]), UnusableRow, "a tool call instead of a text"),
    (NOTHING, ASKED, answer("11"), UnusableRow, "whose completion the chat template leaves out"),
    (NOTHING, ASKED, answer("5"), UnusableRow, "whose completion the chat template leaves out"),
    (OTHERWISE, ASKED, answer("11"), UnusableRow, "prompt's last token changes"),
    (OPENING, ASKED, answer(",,1"), UnusableRow, "whose answer begins as"),
    (OPENING, ASKED, answer("1,#</think>"), UnusableRow, "whose answer begins as"),
    (CHAT, "5+6=", "11", UserWarning, "--chat: without it string prompts get no chat template"),
    *[(None, says, "11", ValueError, "a text that says a chat") for says in SAYS_A_CHAT],
    (None, "5+6=", SAYS_A_CHAT[0], UserWarning, "a text that says a chat"),
    (CHAT, [message("user", SAYS_A_CHAT[1])], "11", ValueError, "a text that says a chat"),
    (NAMED, ASKED, answer("  3"), UserWarning, "trims the white space before a text"),
    (NAMED, ASKED, answer("3", name="5"), UserWarning, "reads no 'name'"),
    (CALLS, ASKED, answer("", tool_calls=[CALL]), UserWarning, "of a call as a quoted text"),
    (NAMED, ASKED, answer("3", name="", train=None), None, None),
    (CHAT, "5+6=<pad>", "11", None, None),  # a template has written it
    (None, "5+6=", "11", None, None),
    (None, "[1,2,3]", "11", None, None),
    (None, '{"role":1}', "11", None, None),
    (None, '"11', "11", None, None),
]


@pytest.mark.parametrize(("template", "prompt", "completion", "kind", "said"), CASES)
def test_what_is_said_of_a_row(template, prompt, completion, kind, said, tokenizer):
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<think>", "</think>", *"\"'{}[]: \\", *ascii_letters])
    if kind is UserWarning:
        with pytest.warns(kind, match=said):
            encode_pair(tokenizer, prompt, completion, [2])
    elif kind:
        with pytest.raises(kind, match=said):
            encode_pair(tokenizer, prompt, completion, [2])
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            encode_pair(tokenizer, prompt, completion, [2])
