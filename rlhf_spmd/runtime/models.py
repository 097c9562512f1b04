"""The weights that a rank holds: an engine for each model that trains here, a plain copy for every other one.

A copy is a frozen model (reference, reward) or a *shadow*: the second copy of a model that trains elsewhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlhf_spmd.config import Config, critic_folder, same_tokenizer
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import load_model, load_tokenizer, read_config
from rlhf_spmd.model.tokenizer import Tokenizer
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.program import Program
from rlhf_spmd.runtime.sharded import ShardedCopy
from rlhf_spmd.runtime.train_engine import TrainEngine, make_engine
from rlhf_spmd.runtime.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_folders(config: Config) -> dict[str, str]:
    """Checkpoint folder of each model; empty for a reward that is a function."""
    models = config.models
    only_function = config.reward_function and config.reward_function_mode == "replace"
    return {
        "actor": models.actor,
        "critic": critic_folder(config),
        "reference": models.reference or models.actor,
        "reward": "" if only_function else models.reward,
    }


def shared_vocabulary(config: Config, tokenizer: Tokenizer) -> int:
    """How many token ids all models know that read the tokens which the actor draws; `tokenizer` is the actor's.

    Those are the reference, the critic and a reward model of the same tokenizer; one of another reads text. Embeddings
    are often padded to more rows than there are tokens, to another number in each model, so only the tokenizer's own
    ids must be known to all. Raises UserError where they are not, or where they mean other tokens.
    """
    folders = model_folders(config)
    actor, fewest = folders["actor"], read_config(folders["actor"]).vocab_size
    num_tokens = min(fewest, 1 + max(tokenizer.vocabulary().values(), default=-1))
    for name in ("reference", "reward", "critic"):
        folder = folders[name]
        if folder in ("", actor) or (name == "reward" and not same_tokenizer(folder, actor)):
            continue
        own = (Path(folder) / "tokenizer.json").is_file() and not same_tokenizer(folder, actor)
        if own and load_tokenizer(folder).vocabulary() != tokenizer.vocabulary():
            raise UserError(
                f"the {name} {folder} has another tokenizer than the actor {actor}, so the actor's token ids mean "
                f"other tokens to it; give a {name} with the actor's tokenizer"
            )
        num_known = read_config(folder).vocab_size
        if num_known < num_tokens:
            raise UserError(
                f"the {name} {folder} has a vocabulary of {num_known} tokens, but the actor {actor} draws from "
                f"{num_tokens}; give a {name} with as many, e.g. by transformers' resize_token_embeddings({num_tokens})"
            )
        fewest = min(fewest, num_known)
    return fewest


class Models:
    """This rank's models. Loading is local; `start` enters collectives, in workflow order on all ranks.

    copies: models that this rank holds without training them; those that are also in `sharded` are empty until they
    are gathered. engines: those that it trains.
    """

    def __init__(self, program: Program, config: Config, world: World):
        self.program, self.config, self.world = program, config, world
        self.engines: dict[str, TrainEngine] = {}
        self.copies: dict[str, Transformer] = {}
        self.sharded: dict[str, ShardedCopy] = {}
        folders, dtype = model_folders(config), DTYPES[config.dtype]
        for name in program.copies(world.rank):
            if folders[name]:
                head = "scalar" if name in ("critic", "reward") else "lm"
                model = load_model(
                    folders[name], head=head, fresh_head=name == "critic", dtype=dtype, device=world.device
                )
                self.copies[name] = model.eval().requires_grad_(False)

    def start(self) -> None:
        """Turns the copies of models that train on this rank into engines, and shards the others where ZeRO 3 does."""
        optimizer = self.config.optimizer
        for call in self.program.workload.workflow.placed_calls:
            layout = self.program.placement.layouts[call.name]
            if self.world.rank not in layout.ranks:
                continue
            if call.kind != "train":
                frozen = self.program.workload.workflow.train_call(call.model) is None
                if (
                    frozen
                    and layout.zero == 3
                    and layout.dp > 1
                    and call.model in self.copies.keys() - self.sharded.keys()
                ):
                    group = self.world.group(layout.group)
                    self.sharded[call.model] = ShardedCopy(self.copies[call.model], group=group)
                continue
            self.engines[call.model] = make_engine(
                self.copies.pop(call.model).train().requires_grad_(True),
                group=self.world.group(layout.group) if layout.dp > 1 else None,
                ranks=tuple(sorted(layout.ranks)),
                zero=layout.zero,
                dtype=DTYPES[self.config.dtype],
                betas=(optimizer.beta1, optimizer.beta2),
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                max_grad_norm=optimizer.max_grad_norm,
            )

    @contextmanager
    def weights(self, name: str) -> Iterator[Transformer]:
        """A model with its full weights, to run forwards on without gradients; collective where ZeRO 3 shards it."""
        with torch.no_grad():
            if name in self.sharded:
                with self.sharded[name].gathered():
                    yield self.copies[name]
            elif name in self.copies:
                yield self.copies[name]
            else:
                engine = self.engines[name]
                with engine.gathered():
                    yield engine.model

    def tensors(self, name: str) -> list[torch.Tensor]:
        """The weight tensors of a model that this rank holds in full, in one order on every rank."""
        model = self.copies[name] if name in self.copies else self.engines[name].model
        return [parameter.data for parameter in model.parameters()]
