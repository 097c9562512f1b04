"""Reads and writes Hugging Face folders: config, weights, tokenizer, GGUF. The only file that may import transformers.

Every rank loads models, so that must not import transformers, which takes seconds; it is imported only to convert a
GGUF file and for a tokenizer without tokenizer.json. transformers' AutoModelForCausalLM,
AutoModelForSequenceClassification and AutoTokenizer can load the written folders.
"""

import dataclasses
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.files import progress
from rlhf_spmd.files.reading import is_folder, refuse_pipes, why_no_file
from rlhf_spmd.model import config as model_config
from rlhf_spmd.model import weights
from rlhf_spmd.model.config import ModelConfig, naming, read_json
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.parallel import WHOLE, Parallel, slice_of
from rlhf_spmd.model.random_weights import is_random, random_tensors
from rlhf_spmd.model.stored_names import BIAS, check_names, hugging_face_names, with_score
from rlhf_spmd.model.stored_parts import ALL, joined, ours_of, stored_of, table_of
from rlhf_spmd.model.texts.template_time import format_time
from rlhf_spmd.model.texts.tokenizer import Tokenizer, padding_token
from rlhf_spmd.model.texts.tokenizer_files import (
    BACKEND,
    CONFIG,
    GENERATION,
    NAMED_TEMPLATES,
    OF_TOOLS,
    TEMPLATE,
    TOKENIZER_FILES,
    Texts,
    changed_tokens,
    check_ids,
    named_templates,
    no_chat_template,
    read_backend,
    read_template,
    tokenizer_files,
)
from rlhf_spmd.model.texts.turns import ASK, tool_call, with_arguments_as_text
from rlhf_spmd.model.texts.written import ASSISTANT, constants_of, kinds, lost, marked
from rlhf_spmd.model.transformer import Head, Transformer

MAX_SHARD_BYTES = 5 * 10**9
IN_PLACE = Texts()


def read_config(folder: str | Path, texts: Texts = IN_PLACE) -> ModelConfig:
    """Reads the shape of the model in a folder, from config.json; end-of-sequence ids from generation_config.json, if
    given.

    texts: of the adapter whose base it is.

    Raises UserError for a missing folder or file, and for an unsupported family or feature.
    """
    folder = Path(folder)
    if not is_folder(folder):
        raise UserError(f"{folder} is not a folder; give a local model folder in Hugging Face's format")
    config = model_config.read_config_json(folder / "config.json")
    generation = Path(texts.generation or folder) / GENERATION
    if generation.exists():
        values = read_json(generation)
        with naming(generation):
            ends = model_config.token_ids(values.get("eos_token_id"))
            model_config.token_ids(values.get("suppress_tokens"), "suppress_tokens")  # which the trained model has, too
        config = dataclasses.replace(config, eos_token_ids=ends or config.eos_token_ids)
    return config


def load_model(
    folder: str | Path,
    *,
    head: Head,
    fresh_head: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    parallel: Parallel = WHOLE,
) -> Transformer:
    """Loads the model in a folder, or one shard of it, its weights in `dtype` on `device`.

    Every rank checks the names and shapes of the whole model, but reads only the slices of its shard.

    head "lm" needs a causal language model. head "scalar" is read from a folder of AutoModelForSequenceClassification
    or AutoModelForTokenClassification with one label, or with a value head. From a causal language model it starts at
    zero if `fresh_head` (for a critic; the scores of a reward model would all be 0). Raises UserError naming file and
    tensor if a tensor is missing, unexpected, truncated or of a wrong shape.
    """
    folder = Path(folder)
    config = read_config(folder)
    whole = Transformer(config, head=head, dtype=dtype, device="meta")
    model = Transformer(config, head=head, dtype=dtype, device="meta", parallel=parallel)
    shapes = {name: weight.shape for name, weight in whole.state_dict().items()}
    slices = {name: slice_of(name, config, parallel.shard) for name in model.state_dict()}
    if is_random(folder):
        model.take(random_tensors(shapes, slices, dtype=dtype, device=device))
        return model
    found = weights.locate(folder)
    family = FAMILIES[config.model_type]
    stored = hugging_face_names(found, family)
    stored = with_score(stored) if head == "scalar" else stored
    places = {name: found[there] for name, there in stored.items()}
    with naming(_file(folder)):
        table = table_of(shapes, config, stored)
    parts = {part.name: part for some in table.values() for part in some}
    expect = {name: part.shape for name, part in parts.items()}
    needed = {part.there: None for part in parts.values()}
    missing_head = check_names(_file(folder), stored, needed, family, head=head, tied=config.tie_embeddings)
    if missing_head and not fresh_head:
        raise UserError(
            f"{_file(folder)} has no tensor {missing_head[0]}, so it is not a reward model; give a folder saved from "
            "AutoModelForSequenceClassification with num_labels=1"
        )
    expect = {name: shape for name, shape in expect.items() if name not in missing_head}
    stored |= {name: stored[parts[name].there] for name in expect}
    places |= {name: places[parts[name].there] for name in expect}

    wanted = {part.name: part.slices(ours, shapes[name][0]) for name, ours in slices.items() for part in table[name]}
    held = {name: theirs for name, theirs in wanted.items() if theirs is not None}
    if head == "scalar" and BIAS in stored:
        expect[BIAS], held[BIAS] = torch.Size([1]), ALL
    tensors = weights.read_weights(places, expect, lambda tensor: tensor.to(device=device, dtype=dtype), held, stored)
    if head == "lm":
        _check_tied(config, places, expect, tensors, held, stored)
    if BIAS in tensors and (bias := tensors.pop(BIAS)).any():
        raise UserError(
            f"{places[BIAS]}: the bias {stored[BIAS]} is {bias.item():g}, and a head has none here; set it to zero, "
            "which moves all values by as much, or leave out the head, and a critic begins with zeros"
        )
    for name in missing_head:  # a fresh critic's values are zero
        if name in slices:
            tensors[name] = torch.zeros(1, config.hidden_size, dtype=dtype, device=device)
    model.take({name: joined(table[name], tensors) for name in slices})
    return model


def save_state(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    head: Head,
    folder: str | Path,
    beside: Texts = IN_PLACE,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes weights with our names (`Transformer.state_dict()`, or gathered elsewhere) as a Hugging Face folder.

    beside: what belongs to the model, see write_texts.

    AutoModelForSequenceClassification pools at the last token that is not padding. If a model with a scalar head pads
    with its end-of-sequence token, config and tokenizer therefore get another special token for padding, so that a
    final end of sequence is pooled.
    """
    folder = Path(folder)
    shapes = {name: weight.shape for name, weight in Transformer(config, head=head, device="meta").state_dict().items()}
    assert {name: tensor.shape for name, tensor in state.items()} == shapes, "state does not fit the config"
    folder.mkdir(parents=True, exist_ok=True)
    config = write_texts(folder, config, beside)
    if head == "scalar":
        config = dataclasses.replace(config, pad_token_id=padding_token(folder, config))
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    stored = stored_of(state, config)
    weights.write_weights(folder, stored, max_shard_bytes=max_shard_bytes)
    weights.write_json(folder / "config.json", model_config.to_hf(config, head=head, dtype=dtype))


def write_texts(folder: Path, config: ModelConfig, texts: Texts) -> ModelConfig:
    """Writes what belongs to a model beside its weights: the files of its tokenizer, chat templates among them, and
    generation_config.json -> its configuration with the tokens that end responses. Every folder that this program
    writes has them from here."""
    source, path = Path(texts.source or folder), folder / GENERATION
    if source.resolve() != folder.resolve():
        for name in {*tokenizer_files(folder)} - {*tokenizer_files(source)}:  # of an earlier save
            (folder / name).unlink()
        for name in tokenizer_files(source):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    if texts.chat_template:
        _replace_template(folder, texts.chat_template)
    given = Path(texts.generation or source) / GENERATION
    before = read_json(given) if given.is_file() else {}
    ends = texts.ends or model_config.token_ids(before.get("eos_token_id")) or config.eos_token_ids
    if {*ends} != {*config.eos_token_ids}:
        config = dataclasses.replace(config, eos_token_ids=tuple(ends))
    values = before or {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    if {*ends} != {*model_config.token_ids(values.get("eos_token_id"))}:
        values = values | {"eos_token_id": ends[0] if len(ends) == 1 else list(ends)}
    if texts.suppressed:
        values = values | {"suppress_tokens": sorted({*texts.suppressed, *(values.get("suppress_tokens") or ())})}
    if texts.stop:
        values = values | {"stop_strings": list(texts.stop)}
    if values != before:
        weights.write_json(path, {name: value for name, value in values.items() if value is not None or name in before})
    elif given.resolve() != path.resolve():
        shutil.copyfile(given, path)
    return config


def _replace_template(folder: Path, text: str) -> None:
    """Writes a chat template in the place of a tokenizer's own and of that for conversations with tools, wherever
    versions of transformers look for it."""
    settings = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    templates = settings.get("chat_template")
    if isinstance(templates, list) and not (named_templates(folder) or (folder / TEMPLATE).is_file()):  # the files win
        others = [template for template in templates if template.get("name") not in ("default", OF_TOOLS)]
        templates = [{"name": "default", "template": text}, *others]
    else:
        templates = text
        (folder / TEMPLATE).write_text(text, encoding="utf-8", newline="")
        (folder / NAMED_TEMPLATES / f"{OF_TOOLS}.jinja").unlink(missing_ok=True)
    if settings:
        weights.write_json(folder / CONFIG, settings | {"chat_template": templates})


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Loads the tokenizer in a model folder: with the light package `tokenizers` if tokenizer.json says everything,
    else with transformers.

    Raises UserError if the folder has no readable tokenizer.
    """
    folder = Path(folder)
    for read in (folder, folder / NAMED_TEMPLATES):
        refuse_pipes(read)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise UserError(f"{folder} holds no tokenizer; copy tokenizer.json and tokenizer_config.json there")
    if not (folder / BACKEND).exists():
        return Tokenizer.from_transformers(_transformers_tokenizer(folder, "AutoTokenizer"), folder)
    backend = read_backend(folder)
    if changed_tokens(folder, backend):  # by the class that does what tokenizer.json says
        backend = _transformers_tokenizer(folder, "PreTrainedTokenizerFast").backend_tokenizer
    check_ids(folder, backend)
    return Tokenizer.of_backend(backend, folder)


def _transformers_tokenizer(folder: Path, name: str) -> Any:
    """Loads a tokenizer with a class of transformers. Raises UserError."""
    with progress.during("importing transformers, which reads the tokenizer"):
        import transformers

    try:
        return getattr(transformers, name).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers and its many backends raise, the cause is the folder
        raise UserError(
            f"{folder}: transformers cannot read the tokenizer ({error}); write its files again, with a tokenizer.json"
        ) from None


class ChatTemplate:
    """Makes the text of a conversation, as transformers does. Importing transformers takes seconds, so this waits for
    the first conversation."""

    def __init__(self, folder: str | Path, file: str = "", *, started: str):
        """folder: of the tokenizer, whose template is used unless `file` holds another one. started: the time that the
        template writes (template_time.py). Raises UserError."""
        self.folder, self.file, self.started = Path(folder), file, started
        self._writes_time = False  # once it has written it
        self._unread: dict[str, None] = {}  # variables that it was given and does not read
        self._known: dict[str, frozenset[str]] = {}  # the variables that each template reads
        self._constants: dict[str, list[str]] = {}  # texts that each template looks for in messages
        self._tried: dict[tuple, set[tuple]] = defaultdict(set)  # kinds of messages, of template, tools and kwargs
        self._lost: dict[str, None] = {}  # notes about what it does not write of messages
        self._closing: dict[str, str] = {}  # what each writes after a whole conversation alone
        self._takes_text: dict[str, bool] = {}  # whether each template adds the arguments of calls to text as they are
        self._tokenizer: Any = None
        self._template: str | None = None
        if file:  # read even if no prompt turns out to be a conversation: a misspelt name must not go unnoticed
            self._template = read_template(file)

    @property
    def is_used(self) -> bool:
        """Whether a conversation was rendered."""
        return self._tokenizer is not None

    def render(
        self,
        where: str,
        messages: list[dict[str, Any]],
        *,
        answers: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Renders the text of a conversation and, with `answers`, after it the beginning of the assistant's answer.
        Raises UserError.

        where: file and place.
        tools, chat_template_kwargs: variables of the template.
        """
        if self._tokenizer is None:
            self._load(where)
        try:
            text = self._tokenizer.get_chat_template(self._template, tools)
            variables = self._prepared(text)
            named = [*["tools"] * bool(tools), *chat_template_kwargs]
            self._unread |= dict.fromkeys(name for name in named if name not in variables)
            if any("tool_calls" in message for message in messages) and self._wants_text(text):
                messages = list(map(with_arguments_as_text, messages))
            given = {"tools": tools, "chat_template": self._template, "add_generation_prompt": answers}
            written = self._tokenizer.apply_chat_template(messages, tokenize=False, **given, **chat_template_kwargs)
            return written if answers else written.removesuffix(self._only_last(text))
        except Exception as error:  # templates raise exceptions of their own for roles that they do not know
            raise UserError(f"{where}: the chat template does not take this conversation: {error}") from None

    def check(
        self,
        where: str,
        messages: list[dict[str, Any]],
        learned: int,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Raises UserError if messages say what the template does not write (written.py), and keeps notes for
        `remarks`.

        learned: number of the first message that is learned.
        """
        if self._tokenizer is None:
            self._load(where)
        text = self._tokenizer.get_chat_template(self._template, tools)
        if text not in self._constants:
            self._prepared(text)
        constants = self._constants[text]
        tried = self._tried[text, bool(tools), str(chat_template_kwargs)]
        if tried.issuperset(found := kinds(messages, learned, constants)):
            return
        copies, marks = marked(messages, constants)
        try:
            answers = messages[-1]["role"] != ASSISTANT
            more: dict[str, Any] = {"chat_template_kwargs": chat_template_kwargs}
            written = self.render(where, copies, answers=answers, tools=tools, **more)
        except UserError:  # which the row itself gets, or its marks alone
            return
        self._lost |= dict.fromkeys(lost(where, messages, marks, written + text, learned))
        tried.update(found)
        with suppress(UserError):  # of a template that cannot do without tools
            if tools and self.render(where, copies, answers=answers, **more) == written:
                self._unread["tools"] = None

    def _only_last(self, text: str) -> str:
        """Returns the end of sequence that a template writes after a whole conversation, and not before a message."""
        if text not in self._closing:
            self._closing[text] = ""
            turn, end = [ASK, {"role": ASSISTANT, "content": "!"}], self._tokenizer.eos_token or ""
            with suppress(UserError):
                alone, followed = (self.render("", said, answers=False) for said in (turn, [*turn, ASK]))
                if not followed.startswith(alone) and followed.startswith(alone.removesuffix(end)):
                    self._closing[text] = end
        return self._closing[text]

    def _wants_text(self, text: str) -> bool:
        """Returns whether a template writes the arguments of a tool call as they are: it wants them as JSON text."""
        if text not in self._takes_text:
            self._takes_text[text] = False
            call = {"role": ASSISTANT, "content": "", "tool_calls": [tool_call("f", {"a": "b"}, "000000000")]}
            made = []
            for said in (call, with_arguments_as_text(call)):
                try:
                    made.append(self.render("", [ASK, said], answers=False))
                except UserError:
                    made.append("")
            self._takes_text[text] = (not made[0] or "{'a': 'b'}" in made[0]) and '{"a": "b"}' in made[1]
        return self._takes_text[text]

    def remarks(self, of_all: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns notes about variables that no template reads, and parts of messages that none writes. Raises
        UserError.

        of_all: data.chat_template_kwargs, all of which the template has to read.
        """
        vain = next((name for name in self._unread if name in of_all), None)
        if vain is not None:
            reads = ", ".join(sorted(frozenset().union(*self._known.values()) - {"messages", "add_generation_prompt"}))
            raise UserError(
                f"data.chat_template_kwargs has {vain!r}, which the chat template of {self.file or self.folder} does "
                f"not read (it reads {reads or 'nothing else'}); correct the name, or drop it"
            )
        remarks = [f"the chat template does not read {name!r}" for name in self._unread]
        if self._writes_time:
            remarks.append(f"the chat template writes the time {format_time(self.started, '%Y-%m-%d %H:%M')}")
        return (*remarks, *self._lost)

    def _prepared(self, text: str) -> frozenset[str]:
        """Returns the variables that a template reads. Its clock, which transformers shares among all that use the same
        text, is set to the time of the start, and what it could draw at random is refused."""
        from transformers.utils import chat_template_utils

        environment = chat_template_utils._compile_jinja_template(text).environment
        environment.globals["strftime_now"] = self._strftime
        environment.globals["lipsum"] = environment.filters["random"] = _refuse_chance
        if text not in self._known:
            from jinja2 import meta

            parsed = environment.parse(text)
            self._known[text] = frozenset(meta.find_undeclared_variables(parsed) - {*environment.globals})
            self._constants[text] = constants_of(parsed)
        return self._known[text]

    def _strftime(self, pattern: str) -> str:
        self._writes_time = True
        return format_time(self.started, pattern)

    def _load(self, where: str) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        if not self.file and not tokenizer.chat_template:
            raise no_chat_template(where, self.folder)
        self._tokenizer = tokenizer


def _refuse_chance(*_: object, **__: object) -> None:
    raise ValueError("it uses random numbers, so no run with it could be repeated or resumed")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Describes a tool for chat templates, from its signature and docstring. Raises UserError for one without."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # of transformers, a class for each kind of mistake
        raise UserError(
            f"the tool {getattr(function, '__name__', function)} can't be described to the model ({error}): give each "
            "parameter a type, and the docstring a line for it under Args:"
        ) from None


def convert_gguf(gguf_file: str | Path, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Converts a GGUF file of a supported family into a Hugging Face folder, dequantised, with its tokenizer.

    Raises UserError if the packages gguf and accelerate are missing or the file cannot be read.
    """
    gguf_file, folder = Path(gguf_file), Path(folder)
    if why := why_no_file(gguf_file):
        model_config.refuse_adapter(gguf_file)
        raise UserError(f"{gguf_file} {why}; give a GGUF file")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"reading GGUF files needs two more packages ({error}): pip install gguf accelerate") from None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        where: dict[str, Any] = {"gguf_file": gguf_file.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, dtype=dtype, trust_remote_code=False, **where)
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, trust_remote_code=False, **where)
    except Exception as error:  # whatever transformers raises, the cause is the file
        raise UserError(f"{gguf_file}: transformers cannot read this GGUF file ({error})") from None
    with naming(gguf_file):
        config = model_config.from_hf(model.config.to_dict() | {"quantization_config": None})  # dequantised by now
    whole = Transformer(config, head="lm", device="meta").state_dict()
    state = ours_of(model.state_dict(), {name: weight.shape for name, weight in whole.items()}, config)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    values = read_json(folder / "tokenizer_config.json")
    own = {key: value for key, value in values.items() if key not in ("is_local", "local_files_only")}
    weights.write_json(folder / "tokenizer_config.json", own)
    own_end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    save_state(state, config, "lm", folder, Texts(ends=config.eos_token_ids or own_end))


def _file(folder: Path) -> Path:
    """Returns the file that names the tensors of a folder."""
    return folder / (weights.SINGLE if (folder / weights.SINGLE).exists() else weights.INDEX)


def _check_tied(
    config: ModelConfig,
    places: dict[str, Path],
    shapes: dict[str, torch.Size],
    tensors: dict[str, Tensor],
    parts: dict[str, tuple[slice, ...]],
    stored: dict[str, str],
) -> None:
    """Checks, on stages that hold them, that a stored copy of tied weights equals the original."""
    name = "model.embed_tokens.weight"
    if not config.tie_embeddings or "lm_head.weight" not in places or name not in tensors:
        return
    embeddings = tensors[name]
    expect, part = {"lm_head.weight": shapes[name]}, {"lm_head.weight": parts[name]}
    copy = weights.read_weights(places, expect, lambda tensor: tensor.to(embeddings), part, stored)
    if not torch.equal(copy["lm_head.weight"], embeddings):
        raise UserError(
            f"{places['lm_head.weight']}: tensor lm_head.weight differs from model.embed_tokens.weight, but "
            'config.json ties them; set "tie_word_embeddings" to false there'
        )
