"""The inputs of a run other than weights, checked before any model is loaded."""

from collections.abc import Sequence

from rlhf_spmd.config import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.tokenizer import Tokenizer
from rlhf_spmd.runtime.data.prompts import PromptSet, load_prompts


def check_responses_end(config: Config, eos_ids: Sequence[int]) -> None:
    """Raises UserError if no token or text can end a response, although truncated responses get no score."""
    if not eos_ids and not config.generation.stop and config.ppo.truncation != "score":
        raise UserError(
            f"neither {config.models.actor} nor its tokenizer names an end of sequence (eos_token_id in config.json or "
            "generation_config.json), so every response would be truncated and penalised; add it there, give "
            "generation.stop=TEXT, or choose ppo.truncation=score"
        )


def read_prompts(config: Config, tokenizer: Tokenizer, num_known: int) -> PromptSet:
    """The prompts of a run, tokenised. num_known: token ids that all models know. Raises UserError."""
    prompts = load_prompts(
        config.data.prompts,
        tokenizer,
        max_prompt_tokens=config.data.max_prompt,
        key=config.data.key,
        long_prompts=config.data.long_prompts,
        seed=config.seed,
    )
    unknown = prompts.prompts.first_above(num_known - 1)
    if unknown is not None:
        text, token = prompts.texts[unknown], max(prompts.prompts[unknown])
        raise UserError(
            f"the prompt {text[:60]!r} has token {token}, but the models have {num_known} tokens (vocab_size "
            f"in config.json); use the tokenizer that belongs to {config.models.actor}"
        )
    return prompts


def check_context(config: Config, actor: ModelConfig) -> None:
    """Raises UserError if prompt and response together may exceed the actor's context."""
    longest = config.data.max_prompt + config.generation.max_new_tokens
    if longest > actor.max_position_embeddings:
        raise UserError(
            f"data.max_prompt + generation.max_new_tokens = {longest} tokens, but {config.models.actor} "
            f"has a context of {actor.max_position_embeddings}; lower one of them"
        )
