"""Runs with adapters before they start: options, learning rates, what is refused, bytes and seconds."""

import json
from dataclasses import replace

import pytest

from rlhf_spmd.command_line.checks import tokenizer_findings
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.adapters import Adapters
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.memory import (
    num_frozen,
    num_params,
    num_trained,
    static_bytes,
)
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import SHAPES
from rlhf_spmd.strategies import flattening
from tests.folders import write_all, write_model, write_tokenizer
from tests.runs import load as load_run
from tests.unit.model.adapters.test_files import change
from tests.unit.model.adapters.test_merge import make_adapter

WHOLE = Shard()


def program_of(
    *words: str, place=flattening.place, layout: str = "1x1", preset: str = "llama-7b", **options
) -> Program:
    workload, cluster = make_workload(load(preset, words)), Cluster.parse(layout, "a100-80g")
    return compile_program(workload, place(workload, cluster, **options), cluster)


def test_options_of_all_models_and_of_one():
    lora = load_run(["lora.rank=8", "lora.actor.targets=v_proj,q_proj", "lora.critic.rank=0"]).lora
    assert lora.of("actor") == Adapters(8, 32.0, ("q_proj", "v_proj"))
    assert lora.of("critic") is None
    lora = load_run(["lora.actor.rank=4", "lora.actor.alpha=8", "lora.actor.rslora=true"]).lora
    assert lora.of("actor") == Adapters(4, 8.0, rslora=True)
    assert lora.of("critic") is None


def test_mixtures_have_no_adapters(monkeypatch):
    """A router is no layer that adapters are for, either."""
    shape = replace(SHAPES["llama-15m"], num_experts=4, experts_per_token=2, expert_size=8)
    monkeypatch.setitem(SHAPES, "llama-15m", shape)
    with pytest.raises(UserError, match="the actor is a mixture of experts, which cannot have .*: lora.rank=0"):
        make_workload(load("tiny", ["models.actor=", "shape=llama-15m", "lora.actor.rank=2"]))
    with pytest.raises(UserError, match="lora.targets=gate: choose from all-linear, q_proj"):
        load("tiny", ["lora.rank=2", "lora.targets=gate"])


def test_rates_are_ten_times_those_of_full_training_unless_they_are_given():
    usual = load("tiny").optimizer.lr
    config = load("tiny", ["lora.rank=8", f"optimizer.critic_lr={usual['critic']}"])
    assert config.optimizer.lr == {"actor": 0.003, "critic": usual["critic"]}
    assert load("tiny", ["lora.critic.rank=8"]).optimizer.lr == usual | {"critic": 0.0015}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["lora.rank=4", "lora.targets=q_prj"],
            "lora.targets=q_prj: choose from .* q_proj",
        ),
        (
            ["lora.actor.rank=4", "lora.actor.targets=lm_head"],
            "lora.actor.targets=lm_head: choose from .* q_proj",
        ),
        (["lora.rank=65"], "lora.actor.rank=65: .* of the actor has a side of .* lower the rank to .*, or leave"),
        (["lora.reference.rank=4"], "unknown option 'lora.reference.rank'"),
        (["lora.alpha=16"], "^lora.alpha=16.0: it has no effect without lora.rank=16"),
        (
            ["lora.actor.rank=4", "lora.critic.alpha=8"],
            "^lora.critic.alpha=8.0: it has no effect without lora.critic.rank=16; give that, or drop the option$",
        ),
        (["lora.rank=4", "lora.generate=merged"], "lora.generate=merged: .*apart.*joined"),
        (
            ["lora.generate=joined"],
            "^lora.generate=joined: no model with adapters generates responses; drop",
        ),
        (["lora.critic.rank=4", "lora.generate=joined"], "no model with adapters generates"),
    ],
)
def test_refused_options(words, said):
    with pytest.raises(UserError, match=said):
        make_workload(load("tiny", words))


def test_zero_3_is_refused_and_2_means_1():
    with pytest.raises(UserError, match="actor_train.*ZeRO 3 .by DeepSpeed.*adapters.*use ZeRO 0 or 1.*lora.rank"):
        program_of("lora.actor.rank=8", layout="1x2", zero=3)
    one, two = (program_of("lora.rank=8", layout="1x2", zero=stage) for stage in (1, 2))
    assert static_bytes(one, 0) == static_bytes(two, 0)
    said = [finding.message for finding in check(two) if "ZeRO 2 means 1" in finding.message]
    assert [text.partition(":")[0] for text in said] == ["actor_train", "critic_train"]


def test_a_base_counts_once_and_training_holds_adapters_only():
    """Four models of one shape: the actor's base is the reference, the critic's the reward model but for its head."""
    program = program_of("lora.rank=16")
    shapes = program.workload.models
    actor, critic = (num_trained(shapes[name], WHOLE) for name in ("actor", "critic"))
    frozen = num_frozen(shapes["actor"], WHOLE) + num_frozen(shapes["critic"], WHOLE)
    assert num_frozen(shapes["actor"], WHOLE) == num_params(shapes["reference"], WHOLE)
    assert critic - 4096 == actor == 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    of_reward = 4096  # its head, which the critic does not train
    wanted = {"weights": 2 * (frozen + of_reward) + 4 * (actor + critic), "kept gradients": 0}
    assert static_bytes(program, 0) == wanted | {"optimizer": 8 * (actor + critic), "offloaded": 0}
    apart = replace(program, workload=replace(program.workload, bases={"actor": "a", "critic": "c"}))
    assert static_bytes(apart, 0)["weights"] > 1.9 * wanted["weights"]


def test_a_second_layout_of_a_base_counts_again():
    workload, cluster = make_workload(load("llama-7b", ["lora.rank=16"])), Cluster.parse("1x2", "a100-80g")
    split, whole = Layout((0, 1), dp=1, tp=2), Layout.data_parallel((0, 1))
    layouts = {call.name: whole for call in workload.workflow.placed_calls}
    alike = static_bytes(compile_program(workload, Placement(layouts), cluster), 0)["weights"]
    layouts["actor_generate"] = split
    second = static_bytes(compile_program(workload, Placement(layouts), cluster), 0)["weights"]
    shape, half = workload.shape("actor"), Shard(0, 1, 0, 2)
    assert second - alike == 2 * num_frozen(shape, half) + 4 * num_trained(shape, half)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Returns options of a run whose actor begins with an adapter; its base is not where the adapter says."""
    folder = tmp_path_factory.mktemp("adapters")
    found = write_all(folder)
    make_adapter(folder / "adapter", folder / "actor")
    change(folder / "adapter", base_model_name_or_path="elsewhere")
    return [*found, f"models.actor={folder / 'adapter'}", f"lora.base={folder / 'actor'}"]


def test_an_adapter_in_a_folder_has_its_own_rank_and_so_has_the_reference(words):
    config = load_run(words, "lora.critic.rank=2")
    wanted = Adapters(3, 6.0, ("q_proj", "o_proj", "gate_proj", "down_proj"))
    assert [config.adapters(role) for role in ("actor", "reference", "reward")] == [wanted, wanted, None]
    assert config.main_folder == config.files("reference").folder and config.main_folder.endswith("actor")
    workload = make_workload(config)
    assert workload.shape("reference") == workload.shape("actor") and workload.bases["reference"] == "actor"
    assert load_run(words, "lora.actor.rank=3", "lora.rank=2").adapters("actor") == wanted


@pytest.mark.parametrize("option", ["rank=4", "actor.rank=0", "actor.alpha=32", "targets=o_proj", "rslora=true"])
def test_an_option_that_contradicts_an_adapter_is_refused(option, words):
    key, _, value = option.partition("=")
    with pytest.raises(
        UserError, match=f"^lora.{key}=(?i:{value}), but the actor goes on from the adapter in .* MERGED$"
    ):
        load_run(words, f"lora.{option}")


def test_adapters_for_another_base_than_that_of_the_run_are_refused(tmp_path):
    """lora.base is the base of actor and critic, and the critic was made for another one; a copy of it is none."""
    words, critic = write_all(tmp_path), tmp_path / "critic"
    base, other = write_model(tmp_path / "base", seed=1), write_model(tmp_path / "other", seed=5)
    make_adapter(tmp_path / "policy", base)
    make_adapter(critic, other, task="SEQ_CLS")
    given = [*words, f"models.actor={tmp_path / 'policy'}", f"models.critic={critic}"]
    with pytest.raises(
        UserError,
        match=f"^lora.base={base}: the adapter in {critic} was made for {other}, whose weights are not those of",
    ):
        load_run(given, f"lora.base={base}")
    bases = make_workload(load_run(given)).bases
    assert bases == {"actor": "actor", "reference": "actor", "critic": "critic"}  # each its own, without the option
    change(critic, base_model_name_or_path=str(write_model(tmp_path / "copy", seed=1)))
    assert make_workload(load_run(given, f"lora.base={base}")).bases["critic"] == "actor"
    assert make_workload(load_run(given)).bases["critic"] == "actor", "the copy is the same base"
    config = tmp_path / "copy" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"rms_norm_eps": 0.1}), encoding="utf-8"
    )
    assert make_workload(load_run(given)).bases["critic"] == "critic", "that computes something else"


def test_the_tokenizer_beside_an_adapter_is_that_of_the_run(tmp_path):
    """With a warning if it makes other tokens than that of the base; another chat template alone causes none."""
    words, adapter = write_all(tmp_path), tmp_path / "adapter"
    make_adapter(adapter, tmp_path / "actor")
    config = load_run(words, f"models.actor={adapter}")
    assert (config.files().tokenizer, config.files().warning) == (str(tmp_path / "actor"), "")
    write_tokenizer(adapter)
    (adapter / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    config = load_run(words, f"models.actor={adapter}")
    assert config.files().tokenizer == str(adapter) and not config.files().warning
    assert config.files("reward").tokenizer == str(tmp_path / "reward")
    text = (adapter / "tokenizer.json").read_text(encoding="utf-8")
    (adapter / "tokenizer.json").write_text(text.replace('"ba"', '"xx"'), encoding="utf-8")
    said = [finding.message for finding in tokenizer_findings(config)]
    assert said[0] == (
        f"the tokenizer in {adapter} makes other tokens than that of its base {tmp_path / 'actor'}; the run uses it, "
        "since the adapter belongs to it. If it does not, delete its files there"
    )
