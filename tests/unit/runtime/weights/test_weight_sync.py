"""Models with adapters on one rank: their memory, and the adapters that a run saves and begins with."""

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.unmerged import save_adapter
from rlhf_spmd.plan.adapters import is_factor
from rlhf_spmd.runtime.checkpoint.checkpoint_files import Checkpoint
from rlhf_spmd.runtime.checkpoint.resume import Resumed, refuse_other_inputs
from rlhf_spmd.runtime.run.recorded import base_sums, inputs
from rlhf_spmd.runtime.weights.weight_sync import whole_state
from tests.folders import write_all
from tests.runs import RunOf, load

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
        adapters, folder = run.program.workload.shape(train.model).adapters, tmp_path / train.model
        head = run.job.config.algorithm.roles[train.model].head
        save_adapter(states[train.model], adapters, head, folder, base=models.folders[train.model])
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
    read = {name for name in inputs(again.job) if name.startswith(("adapter", "model"))}
    assert read == {f"adapter in {tmp_path / role}" for role in states} | {f"model in {root / 'actor'}"} | {
        f"model in {root / 'reward'}"
    }


def test_a_base_with_one_other_bit_is_refused_at_a_resume(root, tmp_path):
    run = RunOf(load(write_all(root), *WORDS, "lora.critic.rank=0"))
    before = run.job.base_sums = base_sums(run.job)
    assert before.keys() == {"actor"}
    resumed = Resumed(
        tmp_path, run.config, "flattening", Checkpoint(tmp_path, 1, {}, 0), {"inputs": inputs(run.job)}, ()
    )
    refuse_other_inputs(inputs(run.job), resumed)
    weight = run.job.models.engines["actor"].model.layers["0"].mlp.up_proj.weight
    weight.data.view(torch.int32)[3, 5] ^= 1
    run.job.base_sums = base_sums(run.job)
    with pytest.raises(UserError, match="the base below the adapters of the actor changed since"):
        refuse_other_inputs(inputs(run.job), resumed)
