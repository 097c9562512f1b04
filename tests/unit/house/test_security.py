"""Files cannot make this program run code: nothing is unpickled, and only code that the user named runs."""

import ast
import json
from collections.abc import Iterator

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import load_tokenizer
from tests.folders import write_model
from tests.import_rules import ROOT, modules_of, within

PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNPICKLING = {  # calls that read pickles, from files or from other ranks
    *("torch.load", "torch.save", "numpy.load", "np.load", "numpy.save", "np.save", "pandas.read_pickle"),
    *("distributed.all_gather_object", "distributed.gather_object", "distributed.broadcast_object_list"),
    *("distributed.scatter_object_list", "distributed.send_object_list", "distributed.recv_object_list"),
    *("engine.save_checkpoint", "engine.load_checkpoint"),
}
RUNNING = {"exec", "eval", "__import__", "import_module", "util.spec_from_file_location", "runpy.run_path"}
MAY_RUN = {  # the modules that run code: what the user named, and what this program wrote itself
    "rlhf_spmd.__main__",  # its own modules of verbs
    "rlhf_spmd.pages.user_module",  # --strategy, --algorithm, and for the reward function
    "rlhf_spmd.pages.algorithm",  # its own modules of functions
    "rlhf_spmd.pages.named_objects",  # reward functions and environments
    "rlhf_spmd.runtime.rewards.function",  # reward_function=
    "rlhf_spmd.command_line.plans",  # the plan that it has just written
}


def dotted(node: ast.expr) -> str:
    """Returns `a.b.c` of an attribute or a name; `().c` of an attribute of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "()"


def problems(source: str, module: str) -> Iterator[str]:
    """Yields what in a module could run code that nobody named."""
    for node in ast.walk(ast.parse(source)):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"{where}: imports {name}" for name in names if name.partition(".")[0] in PICKLERS)
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if any(name == bad or name.endswith(f".{bad}") for bad in UNPICKLING):
            yield f"{where}: calls {name}"
        if name.removeprefix("importlib.") in RUNNING and module not in MAY_RUN:
            yield f"{where}: calls {name}"
        given = {word.arg: word.value for word in node.keywords}
        for word in ("trust_remote_code", "allow_pickle"):
            if word in given and getattr(given[word], "value", None) is not False:
                yield f"{where}: {word} is not False"
        if name.endswith("from_pretrained") and "trust_remote_code" not in given:
            yield f"{where}: from_pretrained without trust_remote_code=False"


def test_this_repository():
    ours = {name: path for name, path in modules_of(ROOT).items() if within(name, "rlhf_spmd")}
    found = [line for name, path in ours.items() for line in problems(path.read_text(encoding="utf-8"), name)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import pickle", "imports pickle"),
        ("def f():\n    from cloudpickle import loads", "imports cloudpickle"),
        ("torch.load('x', weights_only=True)", "calls torch.load"),
        ("np.load('x')", "calls np.load"),
        ("torch.distributed.all_gather_object(a, b)", "calls torch.distributed.all_gather_object"),
        ("self.engine.load_checkpoint('x')", "calls self.engine.load_checkpoint"),
        ("f(allow_pickle=True)", "allow_pickle is not False"),
        ("f(trust_remote_code=flag)", "trust_remote_code is not False"),
        ("AutoModel.from_pretrained('x')", "from_pretrained without"),
        ("eval('1')", "calls eval"),
        ("importlib.import_module(name)", "calls importlib.import_module"),
    ],
)
def test_an_offence_is_found(source, problem):
    found = list(problems(source, "rlhf_spmd.model.hf"))
    assert len(found) == 1 and problem in found[0]


def test_code_in_a_model_folder_does_not_run(tmp_path):
    folder, marker = write_model(tmp_path / "model"), tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n", encoding="utf-8")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        values["auto_map"] = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
        values |= {"tokenizer_class": "Own", "model_type": "llama"} if name != "config.json" else {}
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    (folder / "tokenizer.json").unlink()  # so that transformers must find a class for the tokenizer
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load_tokenizer(folder)
    assert not marker.exists()


def test_a_strategy_in_the_working_folder_does_not_hide_ours(tmp_path, monkeypatch):
    from rlhf_spmd.pages.strategy import load_strategy

    (tmp_path / "separation.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_strategy("separation").source == (ROOT / "strategies" / "separation.py").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="unknown strategy 'mine'"):  # a file is named as one: mine.py
        load_strategy("mine")


def test_an_algorithm_in_the_working_folder_does_not_hide_ours(tmp_path, monkeypatch):
    from rlhf_spmd.pages.algorithm import load_algorithm

    (tmp_path / "ppo.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_algorithm("ppo").source == (ROOT / "rlhf_spmd" / "algorithms" / "ppo.py").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="unknown algorithm 'mine'"):  # a file is named as one: mine.py
        load_algorithm("mine")
