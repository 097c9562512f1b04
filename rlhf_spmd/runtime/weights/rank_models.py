"""The weights that a rank holds: an engine for each model that trains here, a frozen copy of every other model.

A copy is a frozen model (reference, reward) or a *shadow*: the second copy of a model that trains on other ranks, or
here in a different split.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_spmd.config.model_folders import same_tokenizer
from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels import one_shot
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.model.adapters.uniform import has_own_head
from rlhf_spmd.model.adapters.unmerged import take_adapter
from rlhf_spmd.model.hf import load_model, load_tokenizer, read_config
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.model.random_weights import is_random
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.model.texts.tokenizer_files import Texts, read_template
from rlhf_spmd.model.transformer import Head, Transformer
from rlhf_spmd.plan.calls import Generate, ModelCall, Train
from rlhf_spmd.plan.layout import COLLECTIVES, STAGES, Layout, group_name
from rlhf_spmd.plan.placement import leaves_device
from rlhf_spmd.plan.program.instructions import BUCKET_BYTES, Program
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.runtime.engines.adamw import EngineOptions
from rlhf_spmd.runtime.engines.flat_engine import Groups
from rlhf_spmd.runtime.engines.train_engine import TrainEngine, make_engine
from rlhf_spmd.runtime.weights.frozen_weights import OffloadedCopy, ShardedCopy
from rlhf_spmd.runtime.weights.shared_memory import Arena
from rlhf_spmd.runtime.weights.weight_mover import slot_bytes
from rlhf_spmd.runtime.world.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shared_vocabulary(config: Config, tokenizer: Tokenizer) -> KnownTokens:
    """Returns the tokens of the first role, whose tokenizer is given: those that may be drawn, and that all models
    know.

    All models read them but a judge with another tokenizer, which reads text. Embeddings are often padded to more rows
    than there are tokens, differently in each model, so all models need to know only the tokenizer's own ids. Raises
    UserError for a model that does not, or whose tokenizer has other tokens for them.
    """
    roles, main, folder_of_main = config.algorithm.roles, config.main_role, config.main_folder
    known = tokenizer.known(read_config(folder_of_main).vocab_size)
    for name in sorted(roles, key=lambda name: not config.models[name]):  # those with a folder of their own first
        folder = config.files(name).folder
        if folder in ("", folder_of_main) or (roles[name].judge and not same_tokenizer(folder, folder_of_main)):
            continue
        of_main = config.files().tokenizer
        own = (Path(folder) / "tokenizer.json").is_file() and not same_tokenizer(folder, of_main)
        if own and load_tokenizer(folder).vocabulary() != tokenizer.vocabulary():
            raise UserError(
                f"the {name} {folder} has another tokenizer than the {main} {folder_of_main}, so the {main}'s token "
                f"ids mean other tokens to it; give a {name} with the {main}'s tokenizer"
            )
        num_known = read_config(folder).vocab_size
        if num_known < known.stop:
            raise UserError(
                f"the {name} {folder} has a vocabulary of {num_known} tokens, but the {main} {folder_of_main} samples "
                f"from {known.stop}; give a {name} with as many, e.g. by transformers' resize_token_embeddings"
                f"({known.stop})"
            )
    return known


def _texts(config: Config, role: str) -> Texts:
    """Returns what belongs to the model of a role beside its weights, as the run has it. Raises UserError."""
    files, template = config.files(role).texts, config.data.chat_template
    source, generation = (Path(folder).absolute() for folder in (files.source, files.generation))
    return Texts(source, generation, read_template(template) if template else "", stop=config.generation.stop)


class RankModels:
    """This rank's models. Loading is local; `start` is collective, in workflow order on all ranks.

    engines: models that train here. copies: all other models that calls here use, by model and shard; those also in
    `sharded` are empty until gathered, those also in `offloaded` until loaded. Models with a base in common have the
    weights of a shard of it in common, but those that are sharded or offloaded, which leave the device.
    """

    def __init__(self, program: Program, config: Config, world: World):
        self.program, self.config, self.world = program, config, world
        # absolute, since user code may change the working folder before a model is written with files of its first one
        folders = {name: config.files(name).folder for name in config.algorithm.roles}
        self.folders = {name: Path(folder).absolute() for name, folder in folders.items() if folder}
        self.are_random = any(map(is_random, self.folders.values()))  # of a run that only measures
        self.texts = {name: _texts(config, name) for name in self.folders}
        self.engines: dict[str, TrainEngine] = {}
        self.copies: dict[tuple[str, Shard], Transformer] = {}
        self.sharded: dict[tuple[str, Shard], ShardedCopy] = {}
        self.offloaded: dict[tuple[str, Shard], OffloadedCopy] = {}
        self.arena: Arena | None = None
        self._to_train: dict[str, Transformer] = {}
        self._bases: dict[tuple[str, Shard], Transformer] = {}
        layouts, copies = program.placement.layouts, program.copies(world.rank)
        training = {call.model: layouts[call.name] for call in program.workload.workflow.train_calls}
        here = {name: layout for name, layout in training.items() if world.rank in layout.ranks}
        kept = {key: layouts[calls[0]] for key, calls in copies.items() if folders[key[0]]}
        self._heads = self._heads_of_bases([*here.items(), *((name, layout) for (name, _), layout in kept.items())])
        for name, layout in here.items():
            self._to_train[name] = self._model(name, layout)
        for (name, shard), layout in kept.items():
            self.copies[name, shard] = self._model(name, layout).eval().requires_grad_(False)
            if layout.offload:
                self.offloaded[name, shard] = OffloadedCopy(self.copies[name, shard])
        for model in (*self._to_train.values(), *self.copies.values()):
            model.ropes.longest = config.data.max_prompt + config.row_tokens

    def _heads_of_bases(self, held: Iterable[tuple[str, Layout]]) -> dict[tuple[str, Shard], Head]:
        """Returns the head with which each base is loaded: that of a language model if a model on it here has one."""
        bases, roles, found = self.program.workload.bases, self.config.algorithm.roles, dict[tuple[str, Shard], Head]()
        for name, layout in held:
            if name in bases and not leaves_device(layout):
                key = bases[name], layout.shard(self.world.rank)
                found[key] = "lm" if "lm" in (roles[name].head, found.get(key)) else "scalar"
        return found

    def _model(self, name: str, layout: Layout) -> Transformer:
        """Returns this rank's shard of a model in a layout, on weights that it may have in common with other models."""
        workload, head = self.program.workload, self.config.algorithm.roles[name].head
        base, shard = workload.bases.get(name), layout.shard(self.world.rank)
        if base is None or leaves_device(layout):
            return self._load(name, layout, head)
        if (base, shard) not in self._bases:
            self._bases[base, shard] = self._load(name, layout, self._heads[base, shard])
        adapters, parallel = workload.shape(name).adapters, self._parallel(layout)
        made = self._bases[base, shard].with_adapters(adapters, self.config.seed, parallel=parallel, head=head)
        if folder := self.config.files(name).adapter:
            take_adapter(made, folder)
        return made

    def _load(self, name: str, layout: Layout, head: Head) -> Transformer:
        """Loads this rank's shard of a model in a layout from its folder, without adapters."""
        workload, roles = self.program.workload, self.config.algorithm.roles
        same = [other for other, base in workload.bases.items() if base == workload.bases.get(name)] or [name]
        same = [other for other in same if roles[other].head == "scalar"]
        fresh_head = all(workload.workflow.train_call(one) or has_own_head(self.config.files(one)) for one in same)
        # a frozen reward model needs a head in its folder, and a language model none: one of the two is refused
        heads: tuple[Head, ...] = (head,) if fresh_head or head == "scalar" else ("scalar", "lm")
        *_, model = (
            load_model(
                self.config.files(name).folder,
                head=one,
                fresh_head=fresh_head,
                dtype=DTYPES[self.config.dtype],
                device=self.world.device,
                parallel=self._parallel(layout),
            )
            for one in heads
        )
        return model

    def _group(self, ranks: tuple[int, ...], purpose: str = COLLECTIVES) -> dist.ProcessGroup | None:
        """Returns the process group of these ranks; None for a single rank."""
        return self.world.group(group_name(ranks, purpose)) if len(ranks) > 1 else None

    def _parallel(self, layout: Layout) -> Parallel:
        """Returns this rank's place in a layout."""
        rank, stages = self.world.rank, layout.stage_ranks(self.world.rank)
        stage = layout.shard(rank).stage
        return Parallel(
            layout.shard(rank),
            group=self._group(layout.tensor_ranks(rank)),
            stages=self._group(stages, STAGES),
            previous=stages[stage - 1] if stage else None,
            next=stages[stage + 1] if stage + 1 < layout.pp else None,
            copy=self._group(layout.model_ranks(rank)),
        )

    def start(self) -> None:
        """Makes engines for the models that train on this rank, shards frozen models with ZeRO 3, connects ranks that
        generate together, and reserves memory for weight transfers."""
        rank, optimizer = self.world.rank, self.config.optimizer
        for call in self.program.workload.workflow.placed_calls:
            layout = self.program.placement.layouts[call.name]
            if rank not in layout.ranks:
                continue
            key = call.model, layout.shard(rank)
            if isinstance(call, Generate):
                one_shot.connect(self._group(layout.tensor_ranks(rank)))  # now, while no message waits
            if isinstance(call, Train):
                model = self._to_train.pop(call.model).train()
                trained = model.trained_names()
                for name, weight in model.named_parameters():
                    weight.requires_grad_(name in trained)
                model.recompute = layout.recompute
                tied = model.head == "lm" and model.config.tie_embeddings
                sums = layout.sum_ranks(rank, self.program.cluster.node_of)
                self.engines[call.model] = make_engine(
                    model,
                    groups=Groups(
                        data=self._group(layout.data_ranks(rank)),
                        sums=tuple(group for ranks in sums if (group := self._group(ranks)) is not None),
                        tensor=self._group(layout.tensor_ranks(rank)),
                        model=self._group(layout.model_ranks(rank)),
                        tied=self._group(layout.tied_ranks(rank)) if tied else None,
                        tp_index=layout.shard(rank).tp_index,
                        stage=layout.shard(rank).stage,
                    ),
                    options=EngineOptions(
                        layout.zero if model.adapters is None else min(layout.zero, 1),
                        next(p.dtype for p in model.parameters() if p.requires_grad),
                        (optimizer.beta1, optimizer.beta2),
                        optimizer.eps,
                        optimizer.weight_decay,
                        optimizer.weight_decay_on,
                        optimizer.max_grad_norm,
                        optimizer.sum_each_pass,
                        layout.offload,
                    ),
                )
            elif layout.zero == 3 and layout.dp > 1 and key in self.copies and key not in self.sharded:
                self.sharded[key] = ShardedCopy(self.copies[key], group=self._group(layout.data_ranks(rank)))

        plans = [transfer.reallocation for transfer in self.program.transfers if transfer.reallocation is not None]
        if plans:
            self.arena = Arena.make(self.world, max(slot_bytes(plan, rank, BUCKET_BYTES) for plan in plans))

    def key(self, call: ModelCall) -> tuple[str, Shard] | None:
        """Returns the copy that a call uses on this rank; None: the engine's weights, or a reward function."""
        key = call.model, self.program.placement.layouts[call.name].shard(self.world.rank)
        return key if key in self.copies and call.name in self.program.copies(self.world.rank)[key] else None

    @contextmanager
    def weights(self, call: ModelCall) -> Iterator[Transformer]:
        """Gives the model on which a call runs forwards, without gradients; collective if ZeRO 3 shards it."""
        key = self.key(call)
        holder = self.engines[call.model] if key is None else self.sharded.get(key) or self.offloaded.get(key)
        whole = nullcontext() if holder is None else holder.gathered()
        with torch.no_grad(), whole:
            yield self.model(call)

    def model(self, call: ModelCall) -> Transformer:
        """Returns the model of a call, whose weights may be elsewhere."""
        key = self.key(call)
        return self.engines[call.model].model if key is None else self.copies[key]

    def sharded_by_zero(self, call: ModelCall) -> ShardedCopy | TrainEngine | None:
        """Returns what gathers the weights of a call if ZeRO 3 shards them; None if it does not."""
        key = self.key(call)
        if key is not None:
            return self.sharded.get(key)
        engine = self.engines[call.model]
        return engine if engine.shards_weights else None

    def offloaded_copies(self, name: str) -> list[OffloadedCopy]:
        """Returns the copies of a model whose weights are kept in host memory."""
        return [copy for (model, _), copy in self.offloaded.items() if model == name]
