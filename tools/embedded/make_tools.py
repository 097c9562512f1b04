"""Makes the embedded task with tools: questions whose numbers only a tool can look up, and an actor that often guesses.

Purpose: the files in `rlhf_spmd/embedded/tools/`, which `--preset tools` trains with GRPO. A question is `amo*tiv`; the
         table of its row has the numbers of both words. A right episode looks both up, has the calculator compute, and
         answers. The actor is trained by this program on conversations (`--algorithm sft`), most of which leave a step
         out and guess, so the actor knows all ways.
Cost:    about 10 minutes on two CPU cores, 1 GB of memory; made.json records time and quality.
Command: python -m tools make-tools [--out FOLDER] [--ranks 2]
"""

# B sequences, P prompt tokens, G response tokens

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from rlhf_spmd import embedded
from rlhf_spmd.embedded.table_tools import OPERATIONS, Table
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import load_model, load_tokenizer, save_state
from rlhf_spmd.model.texts.tokenizer_files import Texts
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.rollout import generate_rows
from tools.embedded.stages import adamw, metrics, sizes, trained, write_rows

PAD, END = "<|pad|>", "<|end|>"
MARKS = (PAD, END, "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>")
WORDS = ('{"name": "', '", "arguments": {"', '": "', '"}}', "lookup", "calculate", "word", "expression", "unknown")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*"
TEMPLATE = """\
{%- for message in messages -%}
{{- "<|" + message.role + "|>" + (message.content or "") -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + "}" -}}
{{- "</tool_call>" -}}
{%- endfor -%}
{{- "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""
SEEDS = {"rows": 1, "ways": 2, "weights": 3}
RIGHT, GUESSES, LOOKS_ONE_UP, ADDS_IN_HEAD, MISTAKES = (
    "right",
    "guesses",
    "looks one up",
    "adds in its head",
    "mistakes",
)
WAYS = {RIGHT: 0.30, GUESSES: 0.25, LOOKS_ONE_UP: 0.15, ADDS_IN_HEAD: 0.15, MISTAKES: 0.15}  # of the conversations
CONTEXT, MOST_DRAWN, MOST_TURNS = 128, 48, 5
NUM_WORDS = 4  # of a table


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes and durations; the defaults make the packaged files."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 5
    num_heads: int = 4
    num_held_out: int = 200  # rows, with words that are in no other row
    num_prompts: int = 2048
    held_out_words: float = 0.2  # share of the words
    batch: int = 128
    steps: int = 2000
    lr: float = 2e-3


def words(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Returns all words of three letters, a vowel in the middle, in random order: those of training, and the held-out
    ones."""
    consonants = [letter for letter in "bcdfghjklmnpqrstvwxz"]
    every = [a + b + c for a in consonants for b in "aeiou" for c in consonants]
    random.Random(SEEDS["rows"]).shuffle(every)
    num_held_out = int(recipe.held_out_words * len(every))
    return every[num_held_out:], every[:num_held_out]


def row(draw: random.Random, known: Sequence[str]) -> dict:
    """Returns a question with its table and answer."""
    names = draw.sample(known, NUM_WORDS)
    table = {name: draw.randrange(10, 100) for name in names}
    first, second = names[:2]
    sign = draw.choice(list(OPERATIONS))
    shuffled = dict(sorted(table.items()))
    answer = str(OPERATIONS[sign](table[first], table[second]))
    return {"prompt": [{"role": "user", "content": f"{first}{sign}{second}"}], "table": shuffled, "answer": answer}


def call(name: str, **arguments: str) -> dict:
    """Returns a turn of the assistant that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def conversation(draw: random.Random, of: dict, way: str) -> list[dict]:
    """Returns a question with what an assistant does about it, in one of the ways."""
    question = of["prompt"][0]["content"]
    first, sign, second = question[:3], question[3], question[4:]
    a, b = str(of["table"][first]), str(of["table"][second])
    guessed = str(draw.randrange(10, 100))
    looked_up = [call("lookup", word=first), _tool(a), call("lookup", word=second), _tool(b)]
    messages = list(of["prompt"])
    if way == GUESSES:
        return [*messages, _says(str(OPERATIONS[sign](draw.randrange(10, 100), draw.randrange(10, 100))))]
    if way == ADDS_IN_HEAD:
        return [*messages, *looked_up, _says(str(OPERATIONS[sign](int(a), int(guessed))))]
    if way == LOOKS_ONE_UP:
        looked_up, b = looked_up[:2], guessed
    if way == MISTAKES:
        sign = draw.choice([other for other in OPERATIONS if other != sign])
    result = str(OPERATIONS[sign](int(a), int(b)))
    return [*messages, *looked_up, call("calculate", expression=f"{a}{sign}{b}"), _tool(result), _says(result)]


def _tool(text: str) -> dict:
    return {"role": "tool", "content": text}


def _says(text: str) -> dict:
    return {"role": "assistant", "content": text}


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, with one token for a mark, a name or a piece of JSON, else for a
    character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate((*MARKS, *WORDS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    pieces = "|".join(word.replace("{", r"\{").replace("}", r"\}") for word in WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pieces}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(MARKS[:5]))
    tokenizer.add_tokens(list(MARKS[5:]))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def new_actor(folder: Path, recipe: Recipe) -> Transformer:
    """Makes a model with random weights, with its tokenizer, in a folder."""
    config = ModelConfig(
        model_type="llama",
        vocab_size=len(MARKS) + len(WORDS) + len(CHARACTERS),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        num_kv_heads=recipe.num_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=CONTEXT,
        eos_token_ids=(MARKS.index(END),),
    )
    model = Transformer(config, head="lm", dtype=torch.float32)
    model.init_weights(SEEDS["weights"], std=0.02)
    write_tokenizer(folder)
    save_state(model.state_dict(), config, "lm", folder, Texts(folder))
    return model


def train(model: Path, data: Path, run_folder: Path, recipe: Recipe, ranks: int) -> Path:
    """Trains a model on whole conversations by a run of this program -> the folder of the trained model."""
    options = [*adamw("actor", recipe.lr, warmup=100), *sizes(recipe.steps, recipe.batch, ranks), "data.turns=all"]
    limits = ["data.max_prompt=16", f"generation.max_new_tokens={CONTEXT - 16}"]
    return trained("sft", model, data, run_folder, *options, *limits, ranks=ranks)


@torch.no_grad()
def episodes(actor: Path, rows: Sequence[dict], *, samples: int, temperature: float, tools: bool = True) -> list[float]:
    """Returns whether each episode of an actor is right: turn by turn, with the whole conversation read anew in each.

    tools: whether calls are answered; without answers an episode ends.
    """
    tokenizer, model = load_tokenizer(str(actor)), load_model(str(actor), head="lm", dtype=torch.float32)
    every = [one for one in rows for _ in range(samples)]
    texts = [f"<|user|>{one['prompt'][0]['content']}{END}<|assistant|>" for one in every]
    last, going = [""] * len(every), list(range(len(every)))
    for turn in range(MOST_TURNS):
        prompts_BP = pad([tokenizer.encode(texts[index], special=False) for index in going])
        places = np.array(going), np.full(len(going), turn)
        bits_BG = torch.from_numpy(random_bits(0, random_streams.OFFLINE, 0, *places, MOST_DRAWN))
        stops = (MARKS.index(END),)
        made_BG = generate_rows(model, prompts_BP, bits_BG, temperature=temperature, eos_ids=stops)[0]
        still = []
        for index, drawn in zip(going, made_BG.tolist(), strict=True):
            said = tokenizer.decode([token for token in drawn if token >= 0], special=True)
            last[index], text = said.removesuffix(END), answered(every[index], said)
            texts[index] += said + text
            if text and tools and len(tokenizer.encode(texts[index], special=False)) < CONTEXT - MOST_DRAWN:
                still.append(index)
        going = still
    return [float(text == one["answer"]) for text, one in zip(last, every, strict=True)]


def answered(of: dict, said: str) -> str:
    """Returns what follows a turn with a call; empty: there is none."""
    begin, mark, text = said.removesuffix(END).partition("<tool_call>")
    if begin or not mark:
        return ""
    environment = Table()
    environment.reset(of["table"])
    try:
        found = json.loads(text.removesuffix("</tool_call>"))
        result = getattr(environment, found["name"])(**found["arguments"])
    except (ValueError, KeyError, AttributeError, TypeError):
        return ""
    return f"<|tool|>{result}{END}<|assistant|>"


def make(out: Path, recipe: Recipe, *, ranks: int) -> dict:
    """Writes actor, prompts, held-out rows and made.json -> the contents of the last."""
    began = time.perf_counter()
    draw, known = random.Random(SEEDS["rows"]), words(recipe)
    held_out = [row(draw, known[1]) for _ in range(recipe.num_held_out)]
    prompts = [row(draw, known[0]) for _ in range(recipe.num_prompts)]
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "held_out.jsonl", held_out)
    write_rows(out / "prompts.jsonl", prompts)
    ways = random.Random(SEEDS["ways"])
    with tempfile.TemporaryDirectory() as folder:
        runs, data = Path(folder), Path(folder) / "conversations.jsonl"
        drawn = ways.choices(list(WAYS), list(WAYS.values()), k=recipe.steps * recipe.batch)
        write_rows(data, ({"messages": conversation(ways, row(ways, known[0]), way)} for way in drawn))
        new_actor(runs / "random", recipe)
        made_by = runs / "supervised"
        model = load_model(str(train(runs / "random", data, made_by, recipe, ranks)), head="lm", dtype=torch.bfloat16)
        save_state(model.state_dict(), model.config, "lm", out / "actor", Texts(runs / "random"))
        losses = [one["loss"] for one in metrics(made_by)]
    sampled = episodes(out / "actor", held_out, samples=8, temperature=1.0)
    alone = episodes(out / "actor", held_out, samples=8, temperature=1.0, tools=False)
    made = {
        "recipe": asdict(recipe),
        "ways": WAYS,
        "num_params": sum(weight.numel() for weight in model.state_dict().values()),
        "loss": losses[-1],
        "greedy": sum(episodes(out / "actor", held_out, samples=1, temperature=0.0)) / len(held_out),
        "sampled": sum(sampled) / len(sampled),
        "sampled_without_tools": sum(alone) / len(alone),
        "torch": version("torch"),
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }
    (out / "made.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(embedded.__file__).parent / "tools")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    options = parser.parse_args(arguments)
    made = make(options.out, Recipe(steps=options.steps), ranks=options.ranks)
    print(f"made {options.out}: sampled {made['sampled']:.1%}, without tools {made['sampled_without_tools']:.1%}")
    print(json.dumps(made))
    return 0
