"""Offline generation: responses to a file of prompts, on one rank or on many, as lines of JSON in the file's order.

    python -m rlhf_spmd generate --model FOLDER --prompts FILE --out FILE.jsonl [KEY=VALUE ...]

tp ranks hold a copy of the model together, and the copies take turns with the prompts: prompt p goes to copy p mod the
number of copies. They work in windows, so that memory does not grow with the file: each copy has two windows in its
engine's line and hands the first over when that has ended, and rank 0 writes. A token depends on (seed, prompt, sample,
position) alone, so the responses are the same on any number of ranks.
"""

# R requests, G longest response

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import load_model, load_tokenizer, read_config
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.model.tokenizer import Tokenizer
from rlhf_spmd.plan.layout import Layout, group_name
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.kvcache import free_bytes, give_back
from rlhf_spmd.runtime.offline.options import Options
from rlhf_spmd.runtime.offline.prompts import Prompt, read_prompts
from rlhf_spmd.runtime.weights.models import DTYPES
from rlhf_spmd.runtime.world.devices import describe
from rlhf_spmd.runtime.world.world import World

WINDOW = 8  # times the places: while a window's last sequences end, the next one keeps the places filled
AHEAD = 2  # windows in line


@dataclass(slots=True)
class Totals:
    """Of what has been written."""

    sequences: int = 0
    tokens: int = 0
    ended: int = 0  # by an EOS or a stop text

    def add(self, line: Mapping[str, Any]) -> None:
        self.sequences += 1
        self.tokens += line["num_tokens"]
        self.ended += line["finish"] != "length"


# ---- what comes out -------------------------------------------------------------------------------------------------


class Lines:
    """Rank 0's file: lines go to FILE.part, which gets its name when all are there."""

    def __init__(self, path: Path):
        self.path, self.part = path, path.with_name(path.name + ".part")
        self._begun = False

    @staticmethod
    def check(path: Path, prompts: Path, *, overwrite: bool) -> None:
        """Raises UserError if the file must not or cannot be written."""
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder: name a file" if path.is_dir() else f"cannot be made: there is no folder {path.parent}"
            raise UserError(f"--out {path} {what}")
        if path.exists() and prompts.exists() and path.samefile(prompts):
            raise UserError(f"--out {path} is the prompt file; name another one")
        if path.exists() and not overwrite:
            raise UserError(f"--out {path} exists; name another file, or pass --overwrite")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"--out {path}: the folder {path.parent} cannot be written to")

    def write(self, lines: Sequence[Mapping]) -> None:
        """Adds lines; nothing is there before the first ones."""
        mode, self._begun = "a" if self._begun else "w", True
        try:
            with self.part.open(mode, encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except OSError as error:
            raise UserError(f"{self.part} cannot be written: {error.strerror or error}") from error

    def finish(self) -> None:
        self.part.replace(self.path)

    def drop(self) -> None:
        """Leaves nothing behind."""
        if self._begun:
            with suppress(OSError):
                self.part.unlink()


class Bar:
    """Progress of the whole run as seen by rank 0: what its copy of the model has done, scaled by its share of the
    prompts. Asking the others would make them wait for one another."""

    def __init__(self, total: int, share: float, *, enabled: bool):
        interval_s = 0.5 if sys.stderr.isatty() else 5.0  # a log needs fewer lines
        self.total, self.share, self.ended, self.tokens = total, share, 0, 0
        self.started = time.perf_counter()
        self._bar = tqdm(
            total=total, unit="seq", disable=not enabled, mininterval=interval_s, maxinterval=interval_s, leave=True
        )

    def __call__(self, num_ended: int, num_tokens: int) -> None:
        self.ended += num_ended
        self.tokens += num_tokens
        rate = self.tokens / self.share / (time.perf_counter() - self.started)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(min(round(self.ended / self.share), self.total) - self._bar.n)

    def close(self, *, done: bool) -> None:
        self._bar.update(self.total - self._bar.n if done else 0)
        self._bar.close()


# ---- a copy of the model at work ------------------------------------------------------------------------------------


def line_of(
    prompt: Prompt, response: Sequence[int], logprob: float, tokenizer: Tokenizer, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """A line of the file. num_tokens counts the EOS; logprob is under the distribution that was sampled from."""
    if response[-1] in eos_ids:
        finish = "eos"
    elif len(response) < prompt.sampling.max_new_tokens:
        finish = "stop"
    else:
        said = tokenizer.decode(response) if prompt.sampling.stop else ""
        finish = "stop" if any(text in said for text in prompt.sampling.stop) else "length"
    return {
        "prompt": prompt.text,
        "response": tokenizer.decode_pair(prompt.tokens, response)[1],
        "num_tokens": len(response),
        "finish": finish,
        "logprob": round(logprob, 4),  # what float32 is good for over hundreds of tokens
    }


@dataclass(slots=True)
class Copy:
    """One copy of the model and the windows of prompts that it answers."""

    engine: Engine
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    options: Options
    windows: Iterator[Sequence[Prompt]]
    _line: deque[tuple[list[Prompt], range]] = field(default_factory=deque)

    def next_window(self, bar: Bar) -> list[dict[str, Any]]:
        """Lines of the next window, samples of a prompt side by side; [] if there is none."""
        while len(self._line) < AHEAD and (window := next(self.windows, None)):
            self._line.append(self._submit(window))
        if not self._line:
            return []
        prompts, numbers = self._line.popleft()
        self.engine.run(numbers, progress=bar)
        responses_RG, logprobs_RG, _ = self.engine.results(numbers)
        logprobs = logprobs_RG.double().sum(1).tolist()
        lines = [
            line_of(prompt, [token for token in row if token >= 0], logprob, self.tokenizer, self.eos_ids)
            for prompt, row, logprob in zip(prompts, responses_RG.tolist(), logprobs, strict=True)
        ]
        self.engine.requests.forget(numbers.stop)
        return lines

    def _submit(self, window: Sequence[Prompt]) -> tuple[list[Prompt], range]:
        num = self.options.samples_per_prompt
        prompts = [prompt for prompt in window for _ in range(num)]
        bits_RG = random_bits(
            self.options.seed,
            random_streams.OFFLINE,
            0,
            [prompt.index for prompt in prompts],
            list(range(num)) * len(window),
            max(prompt.sampling.max_new_tokens for prompt in window),
        )
        tokens, samplings = [prompt.tokens for prompt in prompts], [prompt.sampling for prompt in prompts]
        return prompts, self.engine.submit(tokens, torch.from_numpy(bits_RG), samplings)


def deal(prompts: Sequence[Prompt], copy: int, num_copies: int, window: int) -> Iterator[Sequence[Prompt]]:
    """A copy's windows: every num_copies-th prompt, `window` of them at a time."""
    mine = prompts[copy::num_copies]
    return (mine[start : start + window] for start in range(0, len(mine), window))


def interleave(lines: Sequence[Sequence[dict]], samples: int) -> list[dict]:
    """The copies' lines of one window in the order of the prompts: the inverse of `deal`."""
    longest = max(map(len, lines))
    return [
        line for start in range(0, longest, samples) for of_copy in lines for line in of_copy[start : start + samples]
    ]


# ---- the verb -------------------------------------------------------------------------------------------------------


def make_copy(
    folder: str, prompts: Sequence[Prompt], tokenizer: Tokenizer, layout: Layout, world: World, options: Options
) -> Copy | None:
    """This rank's copy of the model with its share of the prompts; None if it has none. Collective over the copy."""
    group = layout.tensor_ranks(world.rank)
    with world.together("loading the model"):
        parallel = Parallel(layout.shard(world.rank), group=world.group(group_name(group)) if len(group) > 1 else None)
        dtype, config = DTYPES[options.dtype], read_config(folder)
        model = load_model(folder, head="lm", dtype=dtype, device=world.device, parallel=parallel)
    generation, samples, index = options.generation, options.samples_per_prompt, layout.dp_index(world.rank)
    mine = prompts[index :: layout.dp]
    if not mine:
        return None
    places = min(generation.max_sequences, len(mine) * samples)
    give_back(world.device)  # what loading has used
    engine = Engine(
        model.eval().requires_grad_(False),
        longest=max(len(prompt.tokens) + prompt.sampling.max_new_tokens for prompt in prompts),
        eos_ids=eos_ids_of(config, tokenizer),
        max_sequences=places,
        block_size=generation.block_size,
        free_bytes=generation.cache_fraction * free_bytes(world.device, world.computes.num_ranks),
        decode=tokenizer.decode,
    )
    windows = deal(prompts, index, layout.dp, window_of(options))
    return Copy(engine, tokenizer, eos_ids_of(config, tokenizer), options, windows)


def eos_ids_of(config: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends a response: as in training."""
    return tuple(config.eos_token_ids) or ((tokenizer.eos_token_id,) if tokenizer.eos_token_id is not None else ())


def window_of(options: Options) -> int:
    """Prompts of a window, the same on every copy."""
    return max(WINDOW * options.generation.max_sequences // options.samples_per_prompt, 1)


def generate(
    world: World, layout: Layout, options: Options, *, model: str, prompts: Path, out: Path, overwrite: bool
) -> dict[str, Any]:
    """Writes the responses to a file of prompts; rank 0 shows progress and prints. Returns the last line's numbers."""
    with world.together("reading tokenizer and prompts"):
        if world.rank == 0:
            Lines.check(out, prompts, overwrite=overwrite)
        tokenizer = load_tokenizer(model)
        asked = read_prompts(prompts, tokenizer, read_config(model), options, world)
    world.agree("the start", {"prompts": repr(asked)})
    copy = make_copy(model, asked, tokenizer, layout, world, options)
    world.barrier("the start of generation")
    started, totals, lines = time.perf_counter(), Totals(), Lines(out)
    share = len(asked[layout.dp_index(world.rank) :: layout.dp]) / len(asked)
    bar = Bar(len(asked) * options.samples_per_prompt, share, enabled=world.rank == 0)
    try:
        for start in range(0, len(asked), window_of(options) * layout.dp):
            found = copy.next_window(bar) if copy else []
            answers = world.allgather(found if layout.reports(world.rank) else [], f"the responses from {start}")
            if world.rank == 0:
                of_copies = [answers[rank] for rank in layout.ranks if layout.reports(rank)]
                written = interleave(of_copies, options.samples_per_prompt)
                lines.write(written)
                for line in written:
                    totals.add(line)
        seconds = time.perf_counter() - started
        if world.rank == 0:
            bar.close(done=True)
            lines.finish()
    except BaseException:
        bar.close(done=False)
        lines.drop()
        raise
    result = {
        "out": str(out),
        "ranks": world.size,
        "sequences": totals.sequences,
        "tokens": totals.tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(totals.tokens / seconds, 1),
        "mean_length": round(totals.tokens / max(totals.sequences, 1), 2),
        "ended_share": round(totals.ended / max(totals.sequences, 1), 4),
        "device": describe(world.computes, world.size),
        "ok": True,
    }
    if world.rank == 0:
        show(result, layout)
    return result


def show(result: Mapping[str, Any], layout: Layout) -> None:
    """What happened, for people; then the same as JSON, which stays the last line."""
    sequences, copies = result["sequences"], layout.dp
    ranks = "1 rank" if layout.tp == 1 else f"{layout.tp} ranks"
    on = f"one copy of the model on {ranks}" if copies == 1 else f"{copies} copies of the model, {ranks} each"
    print(f"Done: {sequences:,} responses by {on}")
    print(f"  tokens   {result['tokens']:,} in {result['seconds']:.1f} s: {result['tokens_per_s']:,.0f} tokens/s")
    print(f"  lengths  {result['mean_length']:.1f} tokens on average; {result['ended_share']:.0%} ended by themselves")
    print(f"  device   {result['device']}")
    print(f"  file     {result['out']}")
    print(json.dumps(result), flush=True)
