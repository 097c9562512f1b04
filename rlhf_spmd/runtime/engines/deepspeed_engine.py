"""ZeRO 3 by DeepSpeed, over any group of ranks. The only file that imports DeepSpeed.

DeepSpeed assumes that it owns the whole world, but a strategy may give a model any subset of the ranks, and a rank
several models. `DeepSpeedEngine._as_world` contains the necessary adaptations.
"""

import io
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.parallel import all_reduced, is_split
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.cost.memory import REDUCE_NUMEL
from rlhf_spmd.runtime.engines.adamw import MOMENTS, EngineOptions, Interval, ReadState, Share, read_into, state_of
from rlhf_spmd.runtime.engines.flat_engine import Groups, Through


def _mpu(groups: Groups) -> SimpleNamespace:
    """Returns DeepSpeed's `mpu` interface: the data-parallel ranks, and the ranks that hold the slices of one model."""
    data, model = groups.data, groups.model
    assert data is not None
    return SimpleNamespace(
        get_data_parallel_group=lambda: data,
        get_data_parallel_group_ranks=lambda: dist.get_process_group_ranks(data),
        get_data_parallel_world_size=data.size,
        get_data_parallel_rank=data.rank,
        get_model_parallel_group=lambda: model,
        get_model_parallel_world_size=lambda: 1 if model is None else model.size(),
        get_model_parallel_rank=lambda: groups.tp_index,  # only rank 0 counts weights that are not split
    )


class _LossModule(nn.Module):
    """A pass as a module around the model, so that it can call any method of the model.

    Stage 3 gathers weights when a module's forward begins or reads one, but only inside the forward of the module that
    was passed to DeepSpeed; `model.logits(...)` after `model(...)` would see sharded weights.
    """

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model
        self.through: Through | None = None  # not an argument: DeepSpeed adds hooks to tensor arguments

    def forward(self) -> Tensor:
        assert self.through is not None
        return self.through(self.model)


class DeepSpeedEngine:
    """ZeRO 3 (optimizer state, gradients and weights sharded) over a subgroup of the world."""

    def __init__(
        self,
        model: Transformer,
        *,
        groups: Groups,
        options: EngineOptions,
        bare: Set[str],
    ):
        weights = [p for p in model.parameters() if p.requires_grad]
        self.model = model
        assert groups.data is not None, "ZeRO 3 shards over a group"
        self._group, self._mpu = groups.data, _mpu(groups)
        self._device = weights[0].device
        self._loss_module = _LossModule(model)
        self._deepspeed = _import_deepspeed(self._device)
        without = {id(p) for name, p in model.named_parameters() if name in bare}
        parts = [
            {
                "params": [p for p in weights if (id(p) in without) == is_bare],
                "weight_decay": 0.0 if is_bare else options.weight_decay,
            }
            for is_bare in (False, True)
        ]
        self.optimizer = torch.optim.AdamW(  # torch's, because DeepSpeed's compiles an operation
            [part for part in parts if part["params"]], lr=0.0, betas=options.betas, eps=options.eps, fused=True
        )
        if groups.tensor is not None:
            for name, p in model.named_parameters():
                p.model_parallel = is_split(name)  # each slice of it counts in the norm
                if not is_split(name):  # every slice has a partial sum
                    p.register_hook(lambda gradient: all_reduced(gradient, groups.tensor))
        with self._as_world(), redirect_stdout(io.StringIO()):  # BF16_Optimizer prints memory statistics
            self._agree_on_numbers()
            self.engine, *_ = self._deepspeed.initialize(
                model=self._loss_module,
                model_parameters=weights,
                optimizer=self.optimizer,
                config=_config(weights, options),
                mpu=self._mpu,
            )
        for number, module in enumerate(self._loss_module.modules()):
            module.ds_id = number  # see _agree_on_numbers; a module's number need be unique only in its engine
        # Stage 3 checks whether the replicas of a shard span the slices of the model. For the default group, which is
        # the replicas' group here, torch reports the ranks 0, 1, ..., so each slice would compute its own norm.
        self.engine.optimizer._global_ranks = dist.get_process_group_ranks

    @contextmanager
    def _as_world(self) -> Iterator[None]:
        """Makes the engine's group torch.distributed's default group, and so DeepSpeed's world, during a call.

        - Stage 3 waits at barriers of the default group, and other parts read their rank from it.
        - DeepSpeed stores the `mpu` of the newest engine in a module-global; with several engines it must be switched.
        - It requires LOCAL_RANK, which must be the index of the current device, and asserts that Open MPI's local rank
          is the same, which need not hold. On CPU it starts `numactl` at every reduction unless LOCAL_SIZE is set.
        """
        groups = self._deepspeed.utils.groups
        local_rank = str(torch.cuda.current_device() if self._device.type == "cuda" else 0)
        world, mpu = distributed_c10d._get_default_group(), groups.mpu
        with _environment({"LOCAL_RANK": local_rank, "LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": None}):
            distributed_c10d._update_default_pg(self._group)
            groups.mpu = self._mpu
            try:
                yield
            finally:
                groups.mpu = mpu
                distributed_c10d._update_default_pg(world)

    def _agree_on_numbers(self) -> None:
        """Makes all ranks of the group number their weights from the same number on.

        DeepSpeed numbers the weights (and modules) of all stage 3 engines of a process consecutively, and stage 3
        compares the numbers among the ranks. They differ if one rank has had more engines than another.
        """
        numbering = self._deepspeed.zero.partition_parameters.Init
        highest = torch.tensor(numbering.param_id, device=self._device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._group)
        numbering.param_id = int(highest)

    def begin(self) -> None:
        """Implements `TrainEngine.begin`; the last step has left no gradients."""

    def forward(self, through: Through) -> Tensor:
        """Implements `TrainEngine.forward`."""
        with self._as_world():
            self._loss_module.through = through
            value: Tensor = self.engine()
            self._loss_module.through = None
        assert value.requires_grad, "a rank without data must still run the model: return 0 * something"
        return value

    def backward(self, output: Tensor, gradient: Tensor | None = None, *, last: bool) -> None:
        """Implements `TrainEngine.backward`."""
        assert gradient is None, "ZeRO 3 has no stages"
        with self._as_world():
            self.engine.set_gradient_accumulation_boundary(last)
            # DeepSpeed averages over the ranks, but not over micro-batches, because it is configured for one.
            self.engine.backward(output * self._group.size())

    def update(self, *, lr: float) -> float:
        """Implements `TrainEngine.update`."""
        for settings in self.optimizer.param_groups:
            settings["lr"] = lr
        with self._as_world():
            self.engine.step()
            return float(self.engine.get_global_grad_norm())

    shards_weights = True

    @contextmanager
    def gathered(self, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Implements `TrainEngine.gathered`."""
        within = [m for module in modules or [self.model] for m in module.modules()]
        weights = dict.fromkeys(p for m in within for p in m.parameters(recurse=False))  # a tied one once
        whole = self._deepspeed.zero.GatheredParameters(list(weights))
        with self._as_world():
            whole.__enter__()
        # A module's hooks would shard its weights again after its forward. They are disabled rather than removed,
        # because re-registering makes DeepSpeed lose the order in which it prefetches weights.
        hooks = [hook for m in within for hook in (m._forward_hooks, m._forward_pre_hooks)]
        aside = [dict(hook) for hook in hooks]
        try:
            for hook in hooks:
                hook.clear()
            yield
        finally:
            for hook, entries in zip(hooks, aside, strict=True):
                hook.update(entries)
            with self._as_world():
                whole.__exit__(None, None, None)

    def held(self) -> dict[str, Tensor]:
        """Implements `TrainEngine.held`."""
        return {name: p.ds_tensor.detach() for name, p in self.model.named_parameters()}

    def optimizer_state(self) -> tuple[int, dict[Interval, dict[str, Tensor]]]:
        """Implements `TrainEngine.optimizer_state`."""
        if not self.optimizer.state:  # no step has been made
            self._begin(0)
        return max(int(state["step"]) for state in self.optimizer.state.values()), state_of(self._shares())

    @torch.no_grad()
    def load(self, num_steps: int, read: ReadState) -> None:
        """Implements `TrainEngine.load`."""
        self._begin(num_steps)
        read_into(self._shares(), read)

    def _begin(self, num_steps: int) -> None:
        """Sets the number of steps, and moments of zero."""
        for master in self.engine.optimizer.fp32_partitioned_groups_flat:
            step = torch.tensor(float(num_steps), dtype=torch.float32, device=master.device)
            zeros = {kind: torch.zeros_like(master, requires_grad=False) for kind in MOMENTS}
            self.optimizer.state[master] = {"step": step} | zeros

    def publish(self) -> None:
        """Implements `TrainEngine.publish`."""
        with self._as_world():
            publish_parts(self.engine.optimizer)

    def _shares(self) -> list[Share]:
        """Returns the intervals of weights that this rank updates, and where they are stored."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return shares_of_parts(self.engine.optimizer, self.optimizer.state, names, rank=self._group.rank())


@contextmanager
def _environment(values: dict[str, str | None]) -> Iterator[None]:
    """Sets environment variables (None: unset) and restores them afterwards."""
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed (takes seconds, so only if needed) for CPU or CUDA, without log messages and compilers."""
    if "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", device.type)  # else it uses CUDA if available
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise UserError(f"zero=3 needs the package deepspeed ({error}): install it or choose zero=0, 1 or 2") from error
    accelerator = deepspeed.accelerator.get_accelerator().device_name()
    assert accelerator == device.type, f"DeepSpeed is set to {accelerator}, the model is on {device}"
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)  # its calls
    # Else it compiles all compatible operations: on CPU a shared-memory all-reduce that spans the whole world.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _config(weights: list[Tensor], options: EngineOptions) -> dict[str, Any]:
    """Returns DeepSpeed's configuration. We manage batch sizes; DeepSpeed is configured for one micro-batch of size
    one."""
    numel, largest = sum(p.numel() for p in weights), max(p.numel() for p in weights)
    bucket = math.ceil(max(largest, min(numel, REDUCE_NUMEL)) / 2) * 2  # odd all-gather buckets are rejected
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.max_grad_norm or 0.0,  # 0: none
        "steps_per_print": sys.maxsize,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": options.dtype == torch.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": options.zero,
            "contiguous_gradients": True,
            "overlap_comm": options.zero == 3 and weights[0].is_cuda,  # else it gathers where it computes
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            # Stage 3 does not shard small weights, to save messages: norms in a real model, nothing in a tiny one.
            "stage3_param_persistence_threshold": min(100_000, numel // 10_000),
        },
    }


# ---- state by parameter ----------------------------------------------------------------------------------------------

States = Mapping[Tensor, Mapping[str, Tensor]]  # of the inner AdamW, by master


def shares_of_parts(zero: Any, states: States, names: Mapping[int, str], *, rank: int) -> list[Share]:
    """Returns the shares of this rank: a part of every weight.

    zero: DeepSpeed's optimizer.
    names: by id(weight).
    """
    shares = []
    for weights, master in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for p in weights:
            size = p.partition_numel()
            start, stop = rank * size, min((rank + 1) * size, p.ds_numel)
            if start < stop:
                shares.append(Share((names[id(p)], start, stop), _values(master, states), offset))
            offset += size
    return shares


def _values(master: Tensor, states: States) -> dict[str, Tensor]:
    return {"master": master} | {kind: states[master][kind] for kind in MOMENTS}


def publish_parts(zero: Any) -> None:
    """Copies masters to the weights in the compute dtype, and gathers small weights everywhere.
    Collective."""
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
