"""Offline generation: answers a file of prompts on any number of ranks, as lines of JSON in the order of the file.

    python -m rlhf_spmd generate --model FOLDER --prompts FILE --out FILE.jsonl [KEY=VALUE ...]

Each group of tp ranks holds a copy of the model; prompt p goes to copy p mod the number of copies. Copies work in
windows, so memory does not grow with the file: each copy queues two windows in its engine and sends the first one to
rank 0 when it has ended; rank 0 writes the file. The random numbers of a token depend only on (seed, prompt, sample,
position), so the responses are the same on any number of ranks.
"""

# R requests, G longest response

import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from rlhf_spmd.config.model_folders import same_tokenizer, shape_of_folder
from rlhf_spmd.errors import UserError
from rlhf_spmd.files import progress
from rlhf_spmd.files.data_files import files_of
from rlhf_spmd.files.json_text import json_lines, json_text
from rlhf_spmd.files.printing import formatted
from rlhf_spmd.files.reading import is_file, is_folder
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.adapters.uniform import BASE_HERE, model_files
from rlhf_spmd.model.adapters.unmerged import load_any
from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer, read_config
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.model.texts.template_time import time_of_start
from rlhf_spmd.model.texts.tokenizer import Tokenizer, has_stop
from rlhf_spmd.plan.layout import Layout, group_name
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.kv_cache import free_bytes, release_unused
from rlhf_spmd.runtime.offline.best_of import Judge, best_lines
from rlhf_spmd.runtime.offline.options import GenerateOptions
from rlhf_spmd.runtime.offline.prompts import Prompt, read_offline_prompts
from rlhf_spmd.runtime.profile.products import choose, limit_packing
from rlhf_spmd.runtime.records.run_folder import writing
from rlhf_spmd.runtime.weights.rank_models import DTYPES
from rlhf_spmd.runtime.world.devices import describe_device
from rlhf_spmd.runtime.world.world import World

WINDOW = 8  # sequences in a window per row of the batch; while its last ones end, the next window fills the rows
AHEAD = 2  # windows queued


# ---- output ---------------------------------------------------------------------------------------------------------


def check_out(path: Path, prompts: Path, *, overwrite: bool) -> None:
    """Raises UserError if the file must not or cannot be written."""
    if is_folder(path) or not os.access(path.parent, os.W_OK):
        raise UserError(f"--out {path} is a folder, or there is no folder for it that can be written to; name a file")
    if is_file(path) and any(is_file(file) and path.samefile(file) for file in files_of(prompts)):
        raise UserError(f"--out {path} is the prompt file; name another one")
    if is_file(path) and not overwrite:
        raise UserError(f"--out {path} exists; name another file, or pass --overwrite")


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Opens FILE.part, which is renamed at the end of the block, or deleted on an error. Raises UserError, except for
    the block."""
    path = path.absolute()  # a function of best_of may change the working folder
    part = path.with_name(f"{path.name}.part")
    with writing(part):
        file = part.open("w", encoding="utf-8")
    try:
        with file:
            yield file
        with writing(path):
            part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


# ---- one copy of the model ------------------------------------------------------------------------------------------


def line_of(
    prompt: Prompt, response: Sequence[int], logprob: float, tokenizer: Tokenizer, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """Returns a line of the file. num_tokens includes the EOS; logprob is under the distribution sampled from."""
    sampling = prompt.sampling
    stopped = len(response) < sampling.max_new_tokens or has_stop(tokenizer.decode, response, sampling.stop)
    return {
        "prompt": prompt.text,
        "response": tokenizer.decode_pair(prompt.tokens, response)[1],
        "num_tokens": len(response),
        "finish": "eos" if response[-1] in eos_ids else "stop" if stopped else "length",
        "logprob": round(logprob, 4),  # the precision of float32 over hundreds of tokens
    }


@dataclass(slots=True)
class Replica:
    """One copy of the model and the windows of prompts that it answers."""

    engine: Engine
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    options: GenerateOptions
    windows: Iterator[Sequence[Prompt]]
    judge: Judge | None = None  # chooses the best sample of each prompt
    _queue: deque[tuple[list[Prompt], range]] = field(default_factory=deque)

    def next_window(self) -> list[dict[str, Any]]:
        """Returns lines of the next window, samples of a prompt adjacent, or only the best one; [] if there is none."""
        while len(self._queue) < AHEAD and (window := next(self.windows, None)):
            self._queue.append(self._submit(window))
        if not self._queue:
            return []
        prompts, numbers = self._queue.popleft()
        self.engine.run(numbers)
        responses_RG, logprobs_RG, _ = self.engine.results(numbers)
        logprobs = logprobs_RG.double().sum(1).tolist()
        tokens = [[token for token in row if token >= 0] for row in responses_RG.tolist()]
        lines = [
            line_of(prompt, row, logprob, self.tokenizer, self.eos_ids)
            for prompt, row, logprob in zip(prompts, tokens, logprobs, strict=True)
        ]
        self.engine.requests.forget(numbers.stop)
        if self.judge is None:
            return lines
        scores = self.judge.scores(prompts, lines, tokens)
        return best_lines(lines, scores, self.options.samples_per_prompt)

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
    """Deals the prompts out: returns the windows of a copy: every num_copies-th prompt, `window` at a time."""
    mine = prompts[copy::num_copies]
    return (mine[start : start + window] for start in range(0, len(mine), window))


def merge_in_order(lines: Sequence[Sequence[dict]], samples: int) -> list[dict]:
    """Returns the lines of all copies for one window, in the order of the prompts: the inverse of `deal`."""
    longest = max(map(len, lines))
    return [
        line for start in range(0, longest, samples) for of_copy in lines for line in of_copy[start : start + samples]
    ]


# ---- the verb -------------------------------------------------------------------------------------------------------


def make_replica(
    folder: str,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    layout: Layout,
    world: World,
    options: GenerateOptions,
) -> Replica | None:
    """Loads this rank's copy of the model with its share of the prompts; None without prompts. Collective over the
    copy.

    folder: of the model, or of an adapter.
    """
    group = layout.tensor_ranks(world.rank)
    with world.together("loading the model"):
        parallel = Parallel(layout.shard(world.rank), group=world.group(group_name(group)) if len(group) > 1 else None)
        files = model_files(folder, option=BASE_HERE)
        dtype, config = DTYPES[options.dtype], read_config(files.folder, files.texts)
        model = load_any(folder, head="lm", dtype=dtype, device=world.device, parallel=parallel)
    generation, samples, index = options.generation, options.samples_per_prompt, layout.dp_index(world.rank)
    mine = prompts[index :: layout.dp]
    if not mine:
        return None
    judge = None
    if options.best_of and layout.reports(world.rank):
        judge = Judge(options, folder, tokenizer, prompts, world.device)
    places = min(generation.max_sequences, len(mine) * samples)
    release_unused(world.device)  # memory used while loading
    engine = Engine(
        model.eval().requires_grad_(False),
        longest=max(len(prompt.tokens) + prompt.sampling.max_new_tokens for prompt in prompts),
        eos_ids=tokenizer.eos_ids(config),
        known=tokenizer.known(config.vocab_size),
        max_sequences=places,
        block_size=generation.block_size,
        free_bytes=generation.cache_fraction * free_bytes(world.device, world.computes.num_ranks),
        decode=tokenizer.decode,
    )
    windows = deal(prompts, index, layout.dp, window_of(options))
    return Replica(engine, tokenizer, tokenizer.eos_ids(config), options, windows, judge)


def window_of(options: GenerateOptions) -> int:
    """Returns the number of prompts in a window, the same on every copy."""
    return max(WINDOW * options.generation.max_sequences // options.samples_per_prompt, 1)


def generate_file(
    world: World, layout: Layout, options: GenerateOptions, *, model: str, prompts: Path, out: Path, overwrite: bool
) -> dict[str, Any]:
    """Answers a file of prompts; rank 0 shows progress and prints a summary. Returns the same as values."""
    options = replace(options, started=world.bcast(time_of_start(), what="the time of the start"))
    with world.together("reading tokenizer and prompts"):
        if world.rank == 0:
            check_out(out, prompts, overwrite=overwrite)
        has_judge = options.best_of and is_folder(options.best_of)
        files = model_files(model, option=BASE_HERE)
        whole, texts = files.folder, files.tokenizer
        judges = [model_files(options.best_of, option=BASE_HERE).folder] if has_judge else []
        tokenizer = load_tokenizer(texts)
        notes = [*filter(None, [files.warning])]
        template = ChatTemplate(texts, options.data.chat_template, started=options.started)
        asked = read_offline_prompts(prompts, tokenizer, read_config(whole), options, world, template)
    columns = json_text([prompt.columns for prompt in asked])  # that a reward function of best_of reads
    world.agree("the start", {"prompts": repr(asked), "columns of the prompts": columns})
    with world.together("reading the model's sizes"):
        shapes = [shape_of_folder(folder) for folder in (whole, *judges)]
    library, note = choose(world, options, shapes)
    copied = shapes[0].num_params // layout.tp * DTYPES[options.dtype].itemsize  # at most
    notes += filter(None, [note, limit_packing(world, options, library, copied)])
    replica = make_replica(model, asked, tokenizer, layout, world, options)
    if judges and not same_tokenizer(judges[0], texts):
        notes.append(f"{options.best_of} has another tokenizer than {model}, so it is given text")
    for note in notes if world.rank == 0 else ():
        print(f"note: {note}", flush=True)
    world.barrier("the start of generation")
    started = time.perf_counter()
    totals: Counter[str] = Counter()
    kept = 1 if options.best_of else options.samples_per_prompt  # lines of a prompt
    with replacing(out) if world.rank == 0 else nullcontext() as file:
        for start in range(0, len(asked), window_of(options) * layout.dp):
            window = replica.next_window() if replica else []
            answers = world.allgather(window if layout.reports(world.rank) else [], f"the responses from {start}")
            if file is not None:
                of_copies = [answers[rank] for rank in layout.ranks if layout.reports(rank)]
                lines = merge_in_order(of_copies, kept)
                with writing(out):
                    file.write(json_lines(lines))
                    file.flush()
                for line in lines:
                    totals.update(sequences=1, tokens=line["num_tokens"], ended=line["finish"] != "length")
                    totals.update({name: line[name] for name in ("score", "mean_score") if name in line})
                num, seconds = len(asked) * kept, time.perf_counter() - started
                left_s = (num - totals["sequences"]) / totals["sequences"] * seconds
                done = f"{totals['sequences']:,} of {num:,} lines, {totals['tokens'] / seconds:,.0f} tokens/s"
                progress.say(f"{done}, about {progress.duration(left_s)} left")
        seconds = time.perf_counter() - started
    num_lines = max(totals["sequences"], 1)
    result = {
        "out": str(out),
        "ranks": world.size,
        "sequences": totals["sequences"],
        "tokens": totals["tokens"],
        "seconds": round(seconds, 3),
        "tokens_per_s": round(totals["tokens"] / seconds, 1),
        "mean_length": round(totals["tokens"] / num_lines, 2),
        "ended_share": round(totals["ended"] / num_lines, 4),
        "device": describe_device(world.computes, world.size),
        "ok": True,
    }
    if options.best_of:
        result |= {name: round(totals[name] / num_lines, 4) for name in ("score", "mean_score")}
    if world.rank == 0:
        print_summary(result, layout)
    return result


def print_summary(result: Mapping[str, Any], layout: Layout) -> None:
    """Prints a summary for people."""
    sequences, copies = result["sequences"], layout.dp
    ranks = "1 rank" if layout.tp == 1 else f"{layout.tp} ranks"
    on = f"one copy of the model on {ranks}" if copies == 1 else f"{copies} copies of the model, {ranks} each"
    print(f"Done: {sequences:,} responses by {on}")
    print(f"  tokens   {result['tokens']:,} in {result['seconds']:.1f} s: {result['tokens_per_s']:,.0f} tokens/s")
    print(f"  lengths  {result['mean_length']:.1f} tokens on average; {result['ended_share']:.0%} ended by themselves")
    if "score" in result:
        best, mean = (formatted(result[name], "{:.4f}") for name in ("score", "mean_score"))
        print(f"  scores   {best} of the best samples, {mean} of all")
    print(f"  device   {result['device']}")
    print(f"  file     {result['out']}", flush=True)
