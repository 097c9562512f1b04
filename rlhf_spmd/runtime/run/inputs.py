"""The inputs of a run other than weights, checked before any model is loaded."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_spmd.config.options import Config, prompt_files, split_functions
from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import ChatTemplate
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.model.texts.turns import NO_END, TurnJoins
from rlhf_spmd.plan.runtime_words import PROMPTS
from rlhf_spmd.runtime.data.precomputed import with_logprobs
from rlhf_spmd.runtime.data.prompts import PromptSet, load_prompts
from rlhf_spmd.runtime.data.readers import SOURCE
from rlhf_spmd.runtime.rewards.function import source_file


def check_responses_end(config: Config, eos_ids: Sequence[int]) -> None:
    """Raises UserError if nothing can end a response although the algorithm wants that."""
    why = config.algorithm.refused(config.options, can_end=bool(eos_ids or config.generation.stop))
    if why:
        raise UserError(
            f"neither {config.main_folder} nor its tokenizer names an end of sequence (eos_token_id in config.json or "
            f"generation_config.json), so {why}, add it there, or give generation.stop=TEXT"
        )


def load_rendered(
    path: Path | Sequence[str],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    template_kwargs: Mapping[str, Any],
    *,
    stop: Sequence[str] = (),
    **options: Any,
) -> PromptSet:
    """Calls load_prompts with a chat template for conversations. Raises UserError.

    template_kwargs: data.chat_template_kwargs.
    stop: texts that end a response, beside options["eos_ids"].
    """
    how: dict[str, Any] = {"render": template.render, "check": template.check, "template_kwargs": template_kwargs}
    found = load_prompts(path, tokenizer, **how, **options)
    ends = _ends_of_turns(tokenizer, template, options.get("eos_ids", ()), stop)
    remarks = (*found.remarks, *template.remarks(template_kwargs), *ends)
    return replace(found, remarks=remarks)


def _ends_of_turns(
    tokenizer: Tokenizer, template: ChatTemplate, eos_ids: Sequence[int], stop: Sequence[str]
) -> list[str]:
    """Returns notes about ends that do not end a response: the tokenizer's, and what the template writes after a
    turn, if it has been used."""
    if not eos_ids:
        return []
    own, found = tokenizer.eos_token_id, []
    if own is not None and own not in eos_ids:
        found.append(NO_END.format("eos_token of the tokenizer", tokenizer.decode([own], special=True)))
    if template.is_used:
        with suppress(UserError):  # of a template that refuses the roles, or does not write the answer
            joins = TurnJoins(
                lambda messages, answers: template.render("", messages, answers=answers),
                lambda text: tokenizer.encode(text, special=False),
                frozenset(eos_ids),
                str(template.folder),
            )
            found.append(joins.unended(stop))
    return [*filter(None, found)]


def read_prompts(config: Config, tokenizer: Tokenizer, known: KnownTokens, eos_ids: Sequence[int] = ()) -> PromptSet:
    """Reads the data set of a run, tokenised. Raises UserError.

    known: the tokens that all models know.
    eos_ids: the first one ends the responses that the set has, if there are any.
    """
    template = ChatTemplate(config.files().tokenizer, config.data.chat_template, started=config.started)
    prompts = load_rendered(
        prompt_files(config),
        tokenizer,
        template,
        config.data.chat_template_kwargs,
        stop=config.generation.stop,
        max_prompt_tokens=config.data.max_prompt,
        key=config.data.key or config.algorithm.prompts,
        long_prompts=config.data.long_prompts,
        seed=config.seed,
        weights=config.data.weights,
        shuffle=config.data.shuffle,
        columns=config.algorithm.responses,
        numbers={key: (one.column, one.default) for key, one in config.algorithm.row_numbers.items()},
        marks=config.algorithm.assistant_tokens,
        turns=config.data.turns,
        max_response_tokens=config.generation.max_new_tokens,
        eos_ids=tuple(eos_ids),
    )
    for key, rows in {PROMPTS: prompts.prompts, **prompts.responses}.items():
        unknown = rows.first_above(known.stop - 1)
        if unknown is not None:
            what = "the prompt" if key == PROMPTS else f"{key} of the prompt"
            text, token = prompts.texts[unknown], max(rows[unknown])
            raise UserError(
                f"{what} {text[:60]!r} has token {token}, but the models have {known.stop} tokens (vocab_size "
                f"in config.json); use the tokenizer that belongs to {config.main_folder}"
            )
    is_computed = config.data.precompute or config.data.precomputed_logprobs
    return with_logprobs(config, prompts, known) if is_computed else prompts


def functions_fingerprints(config: Config) -> dict[str, str]:
    """Returns hashes of the files of the user's reward functions and environment, by name."""
    specs = [("reward function", spec) for spec in split_functions(config.reward_function)]
    if config.eval.prompts:
        specs += [("reward function", spec) for spec in split_functions(config.eval.reward_function)]
    found = {}
    for name, spec in [*specs, ("environment", config.environment)]:
        path = None if not spec or spec.startswith("rlhf_spmd.") else source_file(spec)
        if path is not None:
            found[f"{name} in {path}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def sources_of(prompts: PromptSet, num: int) -> list[str]:
    """Returns where each of the first prompts is from, by its column data_source; empty where it has none."""
    found = (record.get(SOURCE) for record in prompts.records(range(num)))
    return ["" if source is None else str(source) for source in found]


def check_best(config: Config, prompts: PromptSet, num: int) -> None:
    """Raises UserError if checkpoint.best names a source that the prompts of the evaluation do not have. num: of
    them."""
    _, slash, source = config.checkpoint.best.partition("@")[2].partition("/")
    sources = {*sources_of(prompts, num)}
    if slash and (len(sources) < 2 or source not in sources):
        raise UserError(
            f"checkpoint.best={config.checkpoint.best}: the column {SOURCE} of {config.eval.prompts} names "
            f"{', '.join(sorted(sources - {''})) or 'none'}; choose one of several"
        )


def check_context(config: Config, model: ModelConfig, option: str = "generation.max_new_tokens") -> None:
    """Raises UserError if prompts and responses together may be longer than the context of the first role's model.
    option: that says how long responses may be."""
    longest = config.data.max_prompt + config.row_tokens
    option = "episode.max_row_tokens" if config.episode.max_row_tokens else option
    if longest > model.max_position_embeddings:
        raise UserError(
            f"data.max_prompt + {option} = {longest} tokens, but {config.main_folder} "
            f"has a context of {model.max_position_embeddings}; lower one of them"
        )
