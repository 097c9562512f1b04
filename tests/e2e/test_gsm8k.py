"""docs/gsm8k.md as it is written: its scripts, its file of options and its command for two ranks, with a random model
of Qwen2's shape and a few rows of the form of GSM8K."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.page_runs import evaluations, metrics
from tests.run_mpi import run_limited
from tests.unit.house.test_documents import ROOT, blocks, commands

PAGE = ROOT / "docs" / "gsm8k.md"
MODEL = "path/to/Qwen2.5-1.5B-Instruct"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, texts: list[str]) -> None:
    """Writes a random Qwen2 of 50,000 parameters as transformers saves it, with a tokenizer of bytes and a chat
    template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    names = {"pad_token": special[0], "eos_token": special[2]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=fast.convert_tokens_to_ids(special[2]),
        bos_token_id=fast.convert_tokens_to_ids(special[0]),
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def command_for_two() -> list[str]:
    (found,) = [line for line in commands(PAGE) if line.startswith("mpirun -n 2")]
    return shlex.split(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns what a user has after the sections about data and configuration."""
    folder = tmp_path_factory.mktemp("gsm8k")
    rows = [
        {
            "question": f"Nora had {one} pens and bought {one + 3}. How many has she?",
            "answer": f"Sum.\n#### {2 * one + 3}",
        }
        for one in range(12)
    ]
    for split, some in (("train", rows[:9]), ("test", rows[9:])):
        (folder / f"gsm8k_{split}.raw.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in some), encoding="utf-8"
        )
    scripts = [block for language, block in blocks(PAGE) if language == "python"]
    for name, source in zip(("prepare.py", "format.py"), scripts, strict=True):
        (folder / name).write_text(source, encoding="utf-8")
    (file,) = [block for language, block in blocks(PAGE) if language == "yaml"]
    (folder / "gsm8k.yaml").write_text(file, encoding="utf-8")
    prepare = "; ".join(line for line in commands(PAGE) if "prepare.py" in line)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(prepare, shell=True, cwd=folder, check=True, timeout=60, env=environment)
    write_model(folder / MODEL, [json.dumps(row) for row in rows])
    return folder


def test_the_first_try_of_the_page(folder, warm):
    words = command_for_two()
    assert words[:5] == ["mpirun", "-n", "2", "python", "-m"]
    assert words[5] == "rlhf_spmd"
    command = ["env", "-C", str(folder), *warm.command(2), *words[6:], "generation.max_new_tokens=24"]
    status, stdout, stderr = run_limited(command, limit_s=400.0)
    assert status == 0, stdout + stderr
    result = json.loads(stdout.splitlines()[-1])
    assert (result["ranks"], result["iterations"]) == (2, 2)
    run = folder / result["run_dir"]
    rows = metrics(run)
    table = {
        line.split("|")[1].strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    }
    named = {name.strip(" `") for cell in table for name in cell.partition(" in ")[0].split(",")}
    held_out = evaluations(run)
    assert [row["iteration"] for row in held_out] == [0, 2]
    assert named - rows[0].keys() - held_out[0].keys() == set()  # the metrics that the page explains are there
    samples = (run / "samples.txt").read_text(encoding="utf-8")
    assert "How many" in samples and "<|im_start|>" not in samples  # what the user said, without the template
