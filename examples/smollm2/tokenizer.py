"""Byte-level BPE tokeniser and chat template, built from the data in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples.smollm2.weights import TokenizerData


class ChatTokenizer:
    """Text to token ids and back, for a model whose pre-tokeniser is the SmolLM one.

    Args:
        data: vocabulary, merges, control tokens and chat template.
    """

    def __init__(self, data: TokenizerData) -> None:
        vocabulary = {token: index for index, token in enumerate(data.tokens)}
        merges = [_split_merge(rule) for rule in data.merges]
        self._tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        # SmolLM splits every digit off first, then cuts words as GPT-2 does.
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(
            [AddedToken(data.tokens[index], special=True, normalized=False) for index in data.control]
        )
        # Block trimming as Hugging Face renders chat templates.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(data.chat_template)
        self.eos = data.eos

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; control tokens written in it are recognised."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def chat_prompt(self, user: str, *, system: str | None = None) -> str:
        """The conversation up to where the assistant's answer begins.

        Args:
            user: the user's one turn.
            system: system prompt; None leaves the template's own default.
        """
        return self.render([*_messages("system", system), *_messages("user", user)])

    def next_turn(self, user: str, answer: str, follow_up: str, *, system: str | None = None) -> str:
        """What the template puts between an answer and where the next answer begins.

        Args:
            user: the turn before the answer.
            answer: as it was generated.
            follow_up: the user's next turn.
            system: as for `chat_prompt`.
        """
        before = self.chat_prompt(user, system=system) + answer
        messages = [*_messages("system", system), *_messages("user", user)]
        messages += [*_messages("assistant", answer), *_messages("user", follow_up)]
        whole = self.render(messages)
        if not whole.startswith(before):
            raise ValueError("the chat template changes an answer that stands in a longer conversation")
        return whole[len(before) :]

    def render(self, messages: list[dict[str, str]]) -> str:
        """A conversation, by its turns, up to where the next answer begins."""
        return self._template.render(messages=messages, add_generation_prompt=True)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text of the tokens as it becomes known.

        A piece is held back until the bytes of its last character are complete. Bytes still incomplete
        at the end come out as U+FFFD, so the pieces together equal `decode` of all the ids.
        """
        seen: list[int] = []
        emitted = 0
        decoder = decoders.DecodeStream(skip_special_tokens=True)
        for index in ids:
            seen.append(index)
            piece = decoder.step(self._tokenizer, index)
            if piece:
                emitted += len(piece)
                yield piece
        rest = self.decode(seen)[emitted:]
        if rest:
            yield rest


def _messages(role: str, content: str | None) -> list[dict[str, str]]:
    return [] if content is None else [{"role": role, "content": content}]


def _split_merge(rule: str) -> tuple[str, str]:
    left, _, right = rule.partition(" ")
    return left, right
