"""Models with adapters on one rank: their memory, and the adapters that a run saves and begins with."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.unmerged import save_adapter
from rlhf_spmd.model.hf import load_model
from rlhf_spmd.plan.adapters import is_factor
from rlhf_spmd.plan.cost.memory import num_params, num_trained, static_bytes
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.runtime.checkpoint.checkpoint_files import Checkpoint
from rlhf_spmd.runtime.checkpoint.resume import Resumed, refuse_other_inputs
from rlhf_spmd.runtime.run.recorded import base_sums, inputs
from rlhf_spmd.runtime.weights.rank_models import RankModels
from rlhf_spmd.runtime.weights.weight_sync import whole_state
from tests.folders import write_all, write_model
from tests.mpi.test_allocations import tensor_bytes
from tests.runs import OneRank, RunOf, compiled, load
from tests.unit.model.adapters.test_files import change
from tests.unit.model.adapters.test_merge import make_adapter

WORDS = ["rollout_batch=8", "mini_batch=4", "ppo.epochs=1", "generation.max_new_tokens=4", "lora.rank=4"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_bases_that_models_have_in_common(root, dtype):
    run = RunOf(load(write_all(root), *WORDS, f"dtype={dtype}"))
    models, wide = run.job.models, getattr(torch, dtype)
    copies = {name: dict(copy.named_parameters()) for (name, _), copy in models.copies.items()}
    engines = {name: dict(engine.model.named_parameters()) for name, engine in models.engines.items()}
    for name, base in (("reference", "actor"), ("reward", "critic")):
        for key, one in copies[name].items():
            assert one.dtype == wide
            assert (engines[base][key].data_ptr() == one.data_ptr()) == (key != "score.weight"), key
    before = {key: one.clone() for key, one in copies["reference"].items()}
    run.iteration()
    assert all(torch.equal(before[key], one) for key, one in copies["reference"].items())
    for train in run.program.workload.workflow.train_calls:
        state = whole_state(models, train)
        assert {one.dtype for one in state.values()} == {torch.float32}
        assert any(one.any() for key, one in state.items() if key.endswith("lora_B"))


def test_a_run_goes_on_from_the_adapters_of_another(root, tmp_path):
    """Its reference begins with them, too, frozen on the base that both have in common. Fingerprints are of adapters
    and bases."""
    words = write_all(root)
    run = RunOf(load(words, *WORDS, "lora.alpha=8", "lora.rslora=true"))
    run.iteration()
    models, states = run.job.models, {}
    for train in run.program.workload.workflow.train_calls:
        states[train.model] = whole_state(models, train)
        folder, trained = tmp_path / train.model, models.engines[train.model].model
        save_adapter(states[train.model], trained, folder, models.texts[train.model], base=models.folders[train.model])
    given = [f"models.{role}={tmp_path / role}" for role in states]
    plain = [word for word in WORDS if "lora" not in word]
    again = RunOf(load(words, *plain, *given))
    for train in again.program.workload.workflow.train_calls:
        state = whole_state(again.job.models, train)
        assert state.keys() == states[train.model].keys()
        assert all(torch.equal(one, states[train.model][key]) for key, one in state.items())
    ((_, reference),) = [(key, copy) for key, copy in again.job.models.copies.items() if key[0] == "reference"]
    actor = dict(again.job.models.engines["actor"].model.named_parameters())
    for key, one in reference.named_parameters():
        assert (actor[key].data_ptr() == one.data_ptr()) == (not is_factor(key)), key
    before = {key: one.clone() for key, one in reference.named_parameters() if is_factor(key)}
    assert all(torch.equal(one, states["actor"][key]) for key, one in before.items())
    again.iteration()
    assert all(torch.equal(one, dict(reference.named_parameters())[key]) for key, one in before.items())
    read = {name for name in inputs(again.prepared) if name.startswith("model")}
    assert read == {f"model in {tmp_path / role}" for role in states} | {f"model in {root / 'actor'}"} | {
        f"model in {root / 'reward'}"
    }


@pytest.mark.parametrize("tied", [False, True])
def test_critic_and_reward_model_are_adapters_on_the_base_of_the_actor(root, tied, tmp_path):
    """All four roles have one copy of the base, and heads of their own; they compute what they do on own bases."""
    words, base = write_all(root), write_model(tmp_path / "base", seed=1, num_layers=2, tie_embeddings=tied)
    make_adapter(tmp_path / "reward", base, task="SEQ_CLS")
    change(tmp_path / "reward", base_model_name_or_path="../base")
    given = [f"models.actor={base}", f"models.reward={tmp_path / 'reward'}", f"models.critic={base}/../base"]
    run = RunOf(load(words, *WORDS, *given))
    assert dict(run.program.workload.bases) == dict.fromkeys(("actor", "critic", "reference", "reward"), "actor")
    plain = [word for word in WORDS if "lora" not in word]
    started = load(words, *plain, "lora.actor.rank=4", *given[:2])  # the critic begins with the adapter of the reward
    assert make_workload(started).bases == run.program.workload.bases and started.adapters("critic").rank == 3
    models = run.job.models
    own = {name: dict(one.model.named_parameters()) for name, one in models.engines.items()}
    own |= {name: dict(one.named_parameters()) for (name, _), one in models.copies.items()}
    plain = load_model(base, head="lm").state_dict()
    for name, weights in own.items():
        for key, one in weights.items():
            if key in plain:
                assert one.data_ptr() == own["actor"][key].data_ptr() and torch.equal(one, plain[key]), (name, key)
            else:
                assert is_factor(key) or key == "score.weight", (name, key)
    assert not own["critic"]["score.weight"].any() and own["reward"]["score.weight"].any()
    run.iterations()
    assert own["critic"]["score.weight"].any()
    assert all(torch.equal(own["actor"][key], one) for key, one in plain.items())
    apart = write_model(tmp_path / "copy", seed=1, num_layers=2, tie_embeddings=tied)
    config = load(words, *WORDS, *given[:2], f"models.critic={apart}")
    assert make_workload(config).bases == run.program.workload.bases  # an equal copy is the same base
    file = apart / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "made": "again"})  # the same weights in another file
    other = RunOf(config)
    assert set(other.program.workload.bases.values()) == {"actor", "critic"}
    other.iterations()
    assert other.responses == run.responses
    for key, one in other.job.models.engines["critic"].model.named_parameters():
        assert torch.equal(one, own["critic"][key]), key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_roles_hold_one_base(root, tmp_path, dtype):
    """On real allocations: at most 1.05 x base + adapters + gradients + optimizer state, and what `check` counts."""
    words = write_all(root)
    base = write_model(tmp_path / "base", seed=1, hidden_size=128, intermediate_size=512, num_layers=6)
    make_adapter(tmp_path / "reward", base, task="SEQ_CLS")
    folders = [f"models.actor={base}", f"models.critic={base}", f"models.reward={tmp_path / 'reward'}"]
    config = load(words, *WORDS, f"dtype={dtype}", *folders)
    program = compiled(config)
    before = tensor_bytes()
    models = RankModels(program, config, OneRank())
    models.start()
    held, counted = tensor_bytes() - before, static_bytes(program, 0)
    shapes, c = program.workload.models, program.workload.param_bytes
    whole = c * num_params(shapes["reference"], Shard())
    trained = [num_trained(shapes[role], Shard()) for role in ("actor", "critic")]
    adapters = 4 * (sum(trained) + num_trained(shapes["reward"], Shard()))
    assert counted == {
        "weights": whole + adapters,
        "kept gradients": 0,
        "optimizer": 8 * sum(trained),
        "offloaded": 0,
    }
    assert held <= 1.05 * whole + adapters + 12 * sum(trained)
    assert abs(held - sum(counted.values())) <= 0.002 * held
    assert adapters < whole / 4  # so a second copy of the base would not pass


def test_a_base_with_one_other_bit_is_refused_at_a_resume(root, tmp_path):
    run = RunOf(load(write_all(root), *WORDS, "lora.critic.rank=0"))
    assert base_sums(run.job).keys() == {"base below the adapters of the actor"}
    resumed = Resumed(
        tmp_path, run.config, "flattening", Checkpoint(tmp_path, 1, {}), {"inputs": inputs(run.prepared)}, ()
    )
    refuse_other_inputs(inputs(run.prepared), resumed)
    weight = run.job.models.engines["actor"].model.layers["0"].mlp.up_proj.weight
    weight.data.view(torch.int32)[3, 5] ^= 1
    with pytest.raises(UserError, match="the base below the adapters of the actor changed since"):
        refuse_other_inputs(inputs(run.prepared), resumed)
