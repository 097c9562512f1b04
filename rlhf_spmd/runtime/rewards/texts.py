"""The input of a reward model that has another tokenizer than the responses: their text, in its own tokens."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.model.texts.tokenizer_files import has_chat_template
from rlhf_spmd.runtime.data.messages import ASSISTANT, Message, conversation_of
from rlhf_spmd.runtime.data.row_tokens import up_to_end
from rlhf_spmd.runtime.data.template_arguments import TOOLS, arguments_of

MARK = "\ue000"  # for private use, so no text has it; stands behind a response that was cut


class RewardTexts:
    """Makes the tokens that a reward model reads. A conversation is rendered by its own chat template, if it has one;
    any other text gets the special tokens that its tokenizer adds. An end of sequence stands only where the response
    ended: the one of its tokenizer, or else of its config.json."""

    def __init__(self, folder: str, shape: ModelConfig, key: str, role: str, *, started: str):
        """Loads the tokenizer of a reward model. Raises UserError, also for a tokenizer that makes tokens of a text
        that the model lacks.

        shape: of the reward model.
        key: the column of prompts.
        role: for messages.
        started: the time that its chat template writes.
        """
        self.folder, self.shape, self.key, self.role = folder, shape, key, role
        self.tokenizer = load_tokenizer(folder)
        own = self.tokenizer.eos_token_id
        self.ends = tuple(shape.eos_token_ids) if own is None else (own, *shape.eos_token_ids)
        self.template = ChatTemplate(folder, started=started) if has_chat_template(Path(folder)) else None
        beyond = [token for token in self.tokenizer.vocabulary().values() if token >= shape.vocab_size]
        self._check([token for token in beyond if token in self.ends or self.tokenizer.decode([token])])

    def tokens(self, prompt: str, response: str, *, ended: bool, columns: Mapping[str, Any]) -> list[int]:
        """Returns the tokens of a row; of a longer one than the model reads, the last. Raises UserError.

        ended: whether the response ended by itself.
        columns: of the data set, with the conversation, if the prompt is one.
        """
        messages = conversation_of(columns, self.key) if self.template else None
        if messages is None:
            tokens = self._closed(self.tokenizer.encode(prompt + response), ended, self.ends[:1])
        else:
            tokens = self._of_conversation(messages, response, ended, _tools_of(columns))
        self._check(tokens)
        return tokens[-self.shape.max_position_embeddings :]

    def _check(self, tokens: Sequence[int]) -> None:
        if max(tokens, default=0) >= self.shape.vocab_size:
            raise UserError(
                f"the tokenizer of the {self.role} has token {max(tokens)}, but the model has {self.shape.vocab_size} "
                f"tokens; give {self.folder} the tokenizer that belongs to it"
            )

    def _of_conversation(
        self, messages: list[Message], response: str, ended: bool, tools: Mapping[str, Any]
    ) -> list[int]:
        template = self.template
        assert template is not None  # else rows are read as text

        def rendered(response: str) -> str:
            answer: Message = {"role": ASSISTANT, "content": response}
            return template.render(self.folder, [*messages, answer], answers=False, **tools)

        text = rendered(response)
        if not ended:  # without what the template writes behind an answer
            text, mark, _ = rendered(response + MARK).rpartition(MARK)
            text = text if mark else template.render(self.folder, messages, **tools) + response
        tokens = up_to_end(self.tokenizer.encode(text, special=False), self.tokenizer, self.ends)
        return self._closed(tokens, ended, self.ends)

    def try_on(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raises UserError if the chat template refuses the roles of a row, or writes tokens that the model lacks.
        rows: columns of the data set."""
        tried: set[tuple[str, ...]] = set()
        for columns in rows if self.template else ():
            messages = conversation_of(columns, self.key)
            form = (*(message["role"] for message in messages or ()), *_tools_of(columns))
            if messages and form not in tried:
                self._check(self._of_conversation(messages, "Yes.", True, _tools_of(columns)))
                tried.add(form)

    def _closed(self, tokens: list[int], ended: bool, ends: tuple[int, ...]) -> list[int]:
        """Returns tokens with an end of sequence or, if the response did not end, without."""
        is_closed = bool(tokens) and tokens[-1] in ends
        if ended:
            return tokens if is_closed else [*tokens, *ends[:1]]
        return tokens[:-1] if is_closed else tokens


def _tools_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a row gives the chat template of another model: its tools, but not the arguments for the actor's."""
    return {name: value for name, value in arguments_of("the data set", dict(columns), {}).items() if name == TOOLS}
