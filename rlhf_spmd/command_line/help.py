"""What --help prints, in forty lines: arguments, examples, and the options that are used most. `options` lists all."""

import fnmatch
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_spmd.config.options import Config
from rlhf_spmd.config.presets import default_algorithm
from rlhf_spmd.files.output import width
from rlhf_spmd.files.printing import command_lines
from rlhf_spmd.pages.algorithm import Algorithm, load_algorithm
from rlhf_spmd.pages.option_tree import OptionTree, options_of
from rlhf_spmd.pages.option_values import text_of
from rlhf_spmd.pages.strategy import Strategy

MOST_LINES, LEAST_OPTIONS, KEY_COLUMNS = 40, 6, 29
# what KEY=VALUE arguments set -> the options used most; * stands for the algorithm
USUAL: Mapping[str, str] = {
    "run": "iterations data.prompts reward_function *.kl_coef *.beta *.epochs *.clip_ratio *.clip_low *.clip_high "
    "*.aggregation rollout_batch samples_per_prompt mini_batch micro_batch generation.max_new_tokens "
    "optimizer.actor_lr eval.prompts checkpoint.every data.max_prompt dtype wandb seed",
    "responses": "generation.max_new_tokens generation.temperature generation.top_k generation.top_p generation.min_p "
    "generation.stop samples_per_prompt best_of data.key data.chat_template data.max_prompt data.long_prompts device",
}
MOST_OPTIONS = 15


class Described(NamedTuple):
    """An option as text: its default and its meaning."""

    default: str
    meaning: str

    def lines(self, key: str) -> str:
        """Returns the option with its whole meaning."""
        text, after = f"{f'{key}={self.default}':<{KEY_COLUMNS}} {self.meaning}", " " * (KEY_COLUMNS + 3)
        return textwrap.fill(text, width() - 2, initial_indent="  ", subsequent_indent=after)

    def line(self, key: str) -> str:
        """Returns the option with as much of its meaning as one line holds."""
        text, room = f"  {f'{key}={self.default}':<{KEY_COLUMNS}} ", width() - 2
        return f"{text}{textwrap.shorten(self.meaning.split(';')[0], max(room - len(text), 12), placeholder=' ...')}"


def described(tree: OptionTree, strategy: Strategy | None = None) -> dict[str, Described]:
    """Returns the options of a tree, and those of a strategy, by their keys."""
    texts = {key: Described(text_of(one.value), one.meaning) for key, one in options_of(tree).items()}
    for name, one in strategy.parameters.items() if strategy else ():
        texts[f"strategy.{name}"] = Described(text_of(one.default), strategy.meanings.get(name, "") if strategy else "")
    return {key: text for key, text in texts.items() if key != "preset"}  # which is --preset


def of_page(page: Algorithm) -> Config:
    """Returns the defaults of a run of an algorithm."""
    return Config(preset="", algorithm=page, samples_per_prompt=page.samples)


def matching(texts: Mapping[str, Described], pattern: str) -> dict[str, Described]:
    """Returns the options with a text in their name or meaning; in it, `*` stands for any text."""
    form = f"*{pattern.casefold()}*"
    return {key: one for key, one in texts.items() if fnmatch.fnmatchcase(f"{key} {one.meaning}".casefold(), form)}


def usual_options(words: str, given: Mapping[str, str | None], taken: int) -> str:
    """Returns the options used most, one on a line.

    words: of a subcommand in arguments.toml.
    given: --algorithm and --preset.
    taken: lines that stand before.
    """
    if words == "run":
        page = load_algorithm(given.get("algorithm") or default_algorithm(given.get("preset")))
        texts, name = described(of_page(page)), page.name
        every = f"rlhf-spmd options --algorithm {given.get('algorithm') or name}"
        heading = f"KEY=VALUE of {name}, before a preset ({every}: all {len(texts)}):"
    else:
        from rlhf_spmd.runtime.offline.options import GenerateOptions

        texts, name, heading = described(GenerateOptions()), "", "KEY=VALUE (docs/options.md: all):"
    known = [key for key in USUAL[words].replace("*", name).split() if key in texts]
    most = min(MOST_OPTIONS, max(LEAST_OPTIONS, MOST_LINES - taken - 1))
    return "\n".join([heading, *(texts[key].line(key) for key in known[:most])]) + "\n"


def examples_of(verbs: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """Returns the examples of some subcommands, as lines of the terminal."""

    def lines() -> Iterator[str]:
        for name in names:
            for example in verbs[name]["examples"]:
                yield command_lines(shlex.split(example, posix=False), width() - 4)

    return "\n".join(["examples:", *(textwrap.indent(text, "  ") for text in lines())])
