"""The prompts of offline generation: reads them with their sampling parameters and checks the model's context.

A row of JSON may set the sampling parameters of its prompt: max_new_tokens, min_new_tokens, temperature,
top_k, top_p, min_p, stop (a list of texts). Other keys are ignored.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import files_of, kind_of_file
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import ChatTemplate
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.pages.option_values import parse_value
from rlhf_spmd.runtime.data.prompts import LOST, PromptSet, load_prompts
from rlhf_spmd.runtime.data.readers import read_records
from rlhf_spmd.runtime.data.shared_prompts import once_per_node
from rlhf_spmd.runtime.generation.requests import SAMPLING_KEYS, Sampling
from rlhf_spmd.runtime.offline.options import OPTIONS, GenerateOptions, OfflineGeneration
from rlhf_spmd.runtime.run.inputs import load_rendered
from rlhf_spmd.runtime.world.world import World

JSON_KINDS = (".jsonl", ".json")  # whose rows may set sampling parameters, if all files are such


@dataclass(frozen=True, slots=True)
class Prompt:
    """An entry of the file.

    index: its place in the file, from 0, counting dropped prompts.
    columns: its others.
    """

    index: int
    text: str
    tokens: list[int]
    sampling: Sampling
    columns: Mapping[str, Any] = field(default_factory=dict, repr=False)


def sampling_of(generation: OfflineGeneration, own: Mapping[str, Any] | None = None) -> Sampling:
    """Returns the sampling parameters of a prompt: the run's options, overridden by the prompt's own (null is
    ignored)."""
    values = {name: getattr(generation, name) for name in SAMPLING_KEYS}
    for name, value in (own or {}).items():
        if name not in SAMPLING_KEYS or value is None:
            continue
        if name == "stop":
            value = [value] if isinstance(value, str) else value  # a single text, even with commas
        elif isinstance(value, bool) or not isinstance(value, int | float):  # unlike on the command line, "1" is wrong
            raise UserError(f"{name}={json.dumps(value)} is not a number")
        values[name] = parse_value(OPTIONS[f"generation.{name}"].annotation, value, name)
    return Sampling(**values)


def _samplings(path: Path, key: str, generation: OfflineGeneration, prompts: PromptSet) -> list[Sampling]:
    """Returns the sampling parameters of every entry. Raises UserError naming file and line."""
    common = sampling_of(generation)  # its errors are about options, not about a line
    if not {*map(kind_of_file, files_of(path))} <= {*JSON_KINDS}:
        return [common] * len(prompts)
    samplings = []
    for index, record in enumerate(prompts.records(range(len(prompts)))):
        try:
            samplings.append(sampling_of(generation, record))
        except UserError as error:
            raise UserError(f"{_place(path, key, index)}: {error}") from None
    return samplings


def _place(path: Path, key: str, index: int) -> str:
    """Returns file and place of an entry, for messages."""
    places = (f"{file}, {place}" for file in files_of(path) for place, _ in read_records(file, key))
    return next(islice(places, index, None))


def read_offline_prompts(
    path: Path,
    tokenizer: Tokenizer,
    model: ModelConfig,
    options: GenerateOptions,
    world: World | None = None,
    template: ChatTemplate | None = None,
) -> list[Prompt]:
    """Reads the prompts to answer. Raises UserError naming file and line for a prompt that exceeds the model's context.

    world: if given, one rank of each node tokenises for the node; collective, in a block of World.together.
    template: of conversations; None: there are none.
    """
    data, context, key = options.data, model.max_position_embeddings, options.data.key or "prompt"
    room = data.max_prompt or context - options.generation.max_new_tokens
    if room < 1:
        raise UserError(
            f"generation.max_new_tokens={options.generation.max_new_tokens} leaves no room for a prompt: the model "
            f"has a context of {context} tokens; lower it"
        )
    refuses = data.long_prompts == "error" and data.max_prompt > 0  # without max_prompt the sum counts, see below

    def load() -> PromptSet:
        how: dict[str, Any] = {
            "max_prompt_tokens": room if refuses or data.long_prompts == "truncate" else sys.maxsize,
            "key": key,
            "long_prompts": "truncate" if data.long_prompts == "truncate" else "error",
        }
        if template is None:
            return load_prompts(path, tokenizer, **how)
        how["eos_ids"] = tokenizer.eos_ids(model)
        return load_rendered(path, tokenizer, template, data.chat_template_kwargs, stop=options.generation.stop, **how)

    loaded = load() if world is None else once_per_node(world, load)
    samplings, prompts = _samplings(path, key, options.generation, loaded), []
    for index, (text, tokens, sampling) in enumerate(zip(loaded.texts, loaded.prompts, samplings, strict=True)):
        if data.long_prompts == "drop" and len(tokens) > room:
            continue
        if len(tokens) + sampling.max_new_tokens > context:
            where = _place(path, key, index)
            raise UserError(
                f"{where}: the prompt has {len(tokens)} tokens and may get {sampling.max_new_tokens} new ones, but the "
                f"model has a context of {context}; lower max_new_tokens, or set data.long_prompts=truncate (or drop) "
                f"and data.max_prompt={max(context - sampling.max_new_tokens, 1)}"
            )
        if max(tokens) >= model.vocab_size:
            where = _place(path, key, index)
            raise UserError(
                f"{where}: the prompt has token {max(tokens)}, but the model has {model.vocab_size} tokens "
                "(vocab_size in config.json); use the tokenizer that belongs to it"
            )
        (columns,) = loaded.whole_records([index]) if options.best_of else ({},)
        prompts.append(Prompt(index, text, tokens, sampling, columns))
    if not prompts:
        raise UserError(
            f"{path}: data.long_prompts=drop leaves no prompt of at most {room} tokens; raise data.max_prompt"
        )
    dropped = [f"{num} {LOST['dropped']}"] if (num := len(loaded) - len(prompts)) else []
    for text in (*loaded.lost, *dropped) if world is None or world.rank == 0 else ():
        print(f"rlhf_spmd: note: {path}: {text}", file=sys.stderr)
    return prompts
