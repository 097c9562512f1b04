"""Commands of users who have not read the manual: they work, or the error says which strategy and model to name."""

import json
import shlex
from types import SimpleNamespace

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.command_line.checks import refuse_errors
from rlhf_spmd.command_line.fitting_strategies import COMPARED, advice, fitting_options, options_to_try
from rlhf_spmd.command_line.ranks import cluster_of
from rlhf_spmd.config import options as configs
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.proof.memory_check import memory
from rlhf_spmd.runtime.world.devices import VisibleDevice, choose_devices

SEVEN = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
SEVEN |= {"num_key_value_heads": 32, "vocab_size": 32000}
ONE = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
ONE |= {"num_key_value_heads": 8, "vocab_size": 128256}
H100 = ("NVIDIA H100 80GB HBM3", 85_000_000_000)  # 79.2 GiB, as torch has it


@pytest.fixture
def folder(tmp_path):
    """Writes the description of a model, which is all that a refusal reads."""

    def write(shape: dict, name: str = "model", context: int = 4096) -> str:
        path = tmp_path / name
        path.mkdir()
        about = {"model_type": "llama", "rms_norm_eps": 1e-5, "eos_token_id": 2, "max_position_embeddings": context}
        (path / "config.json").write_text(json.dumps(shape | about), encoding="utf-8")
        return str(path)

    return write


def world_of(num_ranks: int, name: str, num_bytes: int, wanted: str = "auto", num_devices: int = 0) -> SimpleNamespace:
    """Returns a node as its ranks find it."""
    seen = [VisibleDevice(f"device {index}", name, num_bytes) for index in range(num_devices or num_ranks)]
    chosen = choose_devices(wanted, [seen] * num_ranks, "", (0,) * num_ranks, ("here",) * num_ranks)
    return SimpleNamespace(nodes=(0,) * num_ranks, num_nodes=1, chosen=chosen)


# ---- a model and no preset -------------------------------------------------------------------------------------------


def test_a_model_without_a_preset_gets_options_of_a_real_one(folder):
    path = folder(SEVEN)
    config = presets.load(None, [], path, on_gpu=True)
    assert (config.preset, config.dtype, config.main_folder) == ("model", "bfloat16", path)
    assert config.models["reward"] == config.reward_function == config.data.prompts == ""
    assert config.optimizer == configs.Config(preset="").optimizer and config.options.epochs == 1
    assert (config.data.max_prompt, config.generation.max_new_tokens) == (1024, 1024)
    assert presets.load(None, [], path).dtype == "float32"  # of a CPU
    short = presets.load(None, ["dtype=float32"], folder(ONE, "short", context=512), on_gpu=True)
    assert (short.dtype, short.data.max_prompt, short.generation.max_new_tokens) == ("float32", 256, 256)
    with pytest.raises(UserError, match="there is no reward: give models.reward=FOLDER or reward_function="):
        configs.make_workload(config)
    assert presets.load(None).preset == "tiny" and presets.load("tiny", [], path).preset == "tiny"


def test_7b_on_eight_devices_of_80_gb_is_refused_with_fitting_options(folder):
    """Before anything is loaded: the folder holds no weights. Whatever is advised does fit."""
    config = presets.load(None, ["reward_function=mine:score"], folder(SEVEN), on_gpu=True)
    workload, cluster = configs.make_workload(config), cluster_of(world_of(8, *H100), None, "cpu")
    assert str(cluster) == "1x8" and cluster.device_types == ("h100-80g",)
    assert cluster.device_bytes(0) == H100[1] and cluster.usable_bytes(0) == int(H100[1] * 0.94)
    program = load_strategy("flattening").compile(workload, cluster, {})
    with pytest.raises(UserError) as refused:
        refuse_errors("flattening", memory(program), advice(program))
    text = str(refused.value)
    assert "ranks 0-7 need" in text and "(79.2 GiB less 4.7 GiB" in text
    told = text.partition("These fit (--strategy auto plans the fastest): ")[2].split("; ")
    assert len(told) > 2 and told == list(fitting_options(workload, cluster))
    for words in told:
        _, name, *options = shlex.split(words)
        chosen = dict(option.removeprefix("strategy.").split("=") for option in options)
        again = configs.overridden(config, options)  # as they would be typed
        fitting = load_strategy(name).compile(configs.make_workload(again), cluster, again.strategy)
        assert again.strategy == chosen
        assert not any(finding.severity == "error" for finding in memory(fitting)), words
        refuse_errors(name, memory(fitting))


def test_one_card_trains_all_weights_of_7b_with_states_in_host_memory(capsys):
    command = ["--layout", "1x1", "--preset", "qwen2.5-7b", "--algorithm", "ppo", "--device-type", "a100-80g"]
    assert main(["check", "flattening", *command]) == 1
    _, _, words = capsys.readouterr().out.partition("These fit (--strategy auto plans the fastest): --strategy ")
    name, *options = words.split("\n")[0].split()
    assert "strategy.offload_optimizer=True" in options
    assert main(["check", name, *command, *options]) == 0
    assert "  191.5 GiB  " in capsys.readouterr().out  # in host memory: 12 bytes of each number that trains, two models


FEW = ["generation.max_sequences=64"]


@pytest.mark.parametrize(
    ("model", "words", "expected"),
    [
        ("qwen2.5-14b", FEW, "--strategy flattening (73.1 GiB); --strategy reallocation (73.1 GiB)"),
        ("llama-65b", [], ""),  # its base alone is too large
        ("llama-65b", ["lora.rank=8"], ""),  # it has adapters already
    ],
)
def test_adapters_are_advised_where_nothing_else_fits(model, words, expected, capsys):
    """And the advice fits."""
    command = ["--layout", "1x1", "--preset", model, "--algorithm", "grpo", "--device-type", "h100-80g", *words]
    assert main(["check", "flattening", *command]) == 1
    _, _, told = capsys.readouterr().out.partition(
        "No shipped strategy fits these devices with any of its usual options"
    )
    if not expected:
        assert told.startswith(": use more or larger devices\n")
        return
    assert told.startswith(f". These fit with lora.rank=16, which trains adapters alone: {expected}\n")
    assert main(["check", "flattening", *command, "lora.rank=16"]) == 0
    assert "  73.1 GiB  " in capsys.readouterr().out


# ---- words ----------------------------------------------------------------------------------------------------------


def test_a_name_of_the_hub_says_to_download_it(capsys):
    assert main(["check", "flattening", "--model", "meta-llama/Llama-3.1-8B"]) == 2
    told = capsys.readouterr().err
    assert (
        "`hf download meta-llama/Llama-3.1-8B --local-dir FOLDER`" in told
        and "on a machine with a network connection" in told
    )
    for path in ("/no/model", "no/such/model", "../model", "model"):
        assert main(["check", "flattening", "--model", path]) == 2
        assert "hf download" not in capsys.readouterr().err


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("layout", ["1x1", "2x8", "4x8"])
def test_the_options_that_are_tried_exist(name, layout):
    strategy, cluster = load_strategy(name), Cluster.parse(layout)
    options = options_to_try(name, make_workload(load("llama-7b")), cluster)
    assert options[0] == {} and all(strategy.typed(one) == one for one in options)
