"""Conversations of several users, each about a long document of their own.

The documents are pieces of the Python language reference that comes with every interpreter
(`pydoc_data`). So the text is real, long, and present on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

QUESTIONS = (
    "In one sentence, what is this text about?",
    "Name one rule it states.",
    "Give one example from it.",
    "Who would need to know this?",
)


@dataclass(frozen=True)
class Turn:
    """One prompt of one user: the conversation so far in the model's chat template."""

    user: int
    turn: int
    token_ids: list[int]

    @property
    def name(self) -> str:
        return f"user {self.user + 1}, turn {self.turn + 1}"


class Conversations:
    """A source of prompts. A user's next turn contains the answer given to the last one.

    Args:
        tokenizer: the model's Hugging Face tokenizer, with or without a chat template.
        users: number of users; each reads different text.
        tokens: length of each document in tokens, without the template and the question.
    """

    def __init__(self, tokenizer: Any, users: int, tokens: int) -> None:
        self._tokenizer = tokenizer
        texts = _documents(tokenizer, tokens)
        self._messages = [
            [{"role": "user", "content": f"{next(texts)}\n\n{QUESTIONS[0]}"}] for _ in range(users)
        ]

    def first(self, user: int) -> Turn:
        """Return a user's first prompt: the document and the first question."""
        return Turn(user, 0, self._encode(self._text(self._messages[user])))

    def following(self, last: Turn, answer_ids: list[int]) -> Turn:
        """Return the next prompt: the conversation, the answer `answer_ids` and a new question.

        The answer keeps its own tokens, because its KV was computed from them. Only the text that
        the template adds is encoded. If the template rewrites earlier text, the whole conversation
        is encoded anew.
        """
        messages = self._messages[last.user]
        before = self._text(messages)
        answer = self._tokenizer.decode(answer_ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        question = QUESTIONS[(last.turn + 1) % len(QUESTIONS)]
        messages.append({"role": "user", "content": question})
        after = self._text(messages)
        said = before + answer
        if after.startswith(said):
            token_ids = last.token_ids + answer_ids + self._encode(after[len(said) :])
        else:
            token_ids = self._encode(after)
        return Turn(last.user, last.turn + 1, token_ids)

    def _text(self, messages: list[dict[str, str]]) -> str:
        if not self._tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in messages) + "\n\n"
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _documents(tokenizer: Any, tokens: int) -> Iterator[str]:
    """Yield documents of `tokens` tokens. No two begin alike until all text is used up."""
    pages = sorted(topics.items(), key=lambda item: len(item[1]), reverse=True)
    text: list[int] = []
    for edition in range(1, 1000):
        for title, body in pages:
            text += tokenizer.encode(f"{title} ({edition})\n\n{body}\n", add_special_tokens=False)
            while len(text) >= tokens:
                yield tokenizer.decode(text[:tokens])
                text = text[tokens:]
