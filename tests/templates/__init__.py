"""Chat templates in the forms of several model families, and a tokenizer of bytes that has their special tokens.

granite and glm4 write calls as these models draw them, which their own templates do not.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.model.texts.turns import TurnJoins

HERE = Path(__file__).parent
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
SPECIAL += ("<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|start|>")
SPECIAL += ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<start_of_turn>", "<end_of_turn>", "<|eot|>", "<|python_tag|>")
ALL_SPECIAL = (
    *SPECIAL,
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<|end_of_text|>",
    "<|tool_call|>",
    "<|im_sep|>",
    "<|end|>",
)
ALL_SPECIAL += (
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|observation|>",
    "[gMASK]",
    "<sop>",
    "<seed:bos>",
    "<seed:eos>",
)
ALL_SPECIAL += ("<|begin_of_sentence|>", "<|end_of_sentence|>")
ENDS = {"chatml": "<|im_end|>", "qwen3_kept": "<|im_end|>", "qwen3_dropped": "<|im_end|>", "llama3": "<|eot_id|>"}
ENDS |= {"mistral": "</s>", "gemma": "<end_of_turn>", "pythonic": "<|eot|>", "smollm3": "<|im_end|>"}
ENDS |= {"phi4_mini": "<|end|>", "phi4": "<|im_end|>", "granite": "<|end_of_text|>", "olmo2": "</s>"}
ENDS |= {"olmo3": "<|im_end|>", "seed_oss": "<seed:eos>", "ernie4_5": "<|end_of_sentence|>"}
ENDS |= {"glm4": "<|user|>"}  # which begins the next turn
STARTED = "2026-02-03T23:59:58+02:00"


def write_bytes_tokenizer(folder: Path, *texts: str, special: Sequence[str] = SPECIAL) -> Path:
    """Writes a tokenizer whose tokens are bytes and, with texts, what is frequent in them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return folder


def renderer(folder: Path, name: str, tools: list[dict[str, Any]] | None = None) -> Callable[[list, bool], str]:
    template = ChatTemplate(folder, str(HERE / f"{name}.jinja"), started=STARTED)
    return lambda messages, answers: template.render(name, messages, answers=answers, tools=tools)


def joins_of(folder: Path, name: str, tools: list[dict[str, Any]] | None = None) -> tuple[TurnJoins, Tokenizer]:
    """Returns what joins turns by one of these templates."""
    tokenizer = load_tokenizer(folder)
    stop = tokenizer.vocabulary()[ENDS[name]]
    encode = lambda text: tokenizer.encode(text, special=False)  # noqa: E731
    return TurnJoins(renderer(folder, name, tools), encode, frozenset({stop}), name), tokenizer
