"""The documents are true: tables are those of the committed rows and of the code, links and files exist, commands are
understood."""

import ast
import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest

from bench import tables
from bench.tables import BLOCK
from rlhf_spmd.command_line.arguments import parse
from rlhf_spmd.config.file import ConfigFile, read_config_file
from rlhf_spmd.config.presets import load
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.pages.strategy import load_strategy
from tools.pages import metrics_page, models_page, options_page, pages, walk

ROOT = Path(__file__).parents[3]
README, RESULTS = ROOT / "README.md", ROOT / "bench" / "RESULTS.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PROMISING = [
    README,
    *DOCS,
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
]  # their commands and the files that they name are checked
DOCUMENTS = [*PROMISING, RESULTS, ROOT / "CHANGES.md", ROOT / "bench" / "LOG.md", ROOT / "bench" / "data" / "README.md"]
SITE = ROOT / "tools" / "site" / "mkdocs.yml"
MOST_LINES = 200
GENERATED = (options_page.PAGE, metrics_page.PAGE, walk.PAGE)
# pages with one limit for all of their words -> this limit
MOST_WORDS = {
    tuple(page for page in (*PROMISING, ROOT / "CHANGES.md") if page not in GENERATED): 30_000,
    (RESULTS, ROOT / "bench" / "LOG.md"): 18_000,
}
OURS = (
    "rlhf_spmd",
    "kernels",
    "strategies",
    "bench",
    "tools",
    "tests",
    "slurm",
    "docs",
    "examples",
)  # folders whose files are named


def num_words(text: str) -> int:
    """Returns the words of a Markdown page as `wc -w` counts them, without the tables that are written from rows."""
    return len(re.sub(r"<!-- rows: .*?<!-- end -->", "", text, flags=re.DOTALL).split())


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list[tuple[str, str]]:
    """Returns language and text of each block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[str]:
    """Returns the lines of the blocks without a language; a line that ends with a backslash goes on in the next."""
    text = "\n".join(block for language, block in blocks(path) if not language)
    return [line.partition(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]


def inline(path: Path) -> list[str]:
    """Returns what stands in backticks outside blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)]


def words_for_us(command: str) -> list[str] | None:
    """Returns the arguments after `python -m rlhf_spmd`, or of train.sbatch; None for another command."""
    if not re.match(r"(mpirun|mpiexec|python|sbatch|[A-Z_]+=\S+) ", command):
        return None
    words = shlex.split(command)
    if "slurm/train.sbatch" in words:
        return ["train", *words[words.index("slurm/train.sbatch") + 1 :]]
    if "rlhf_spmd" in words and words[words.index("rlhf_spmd") - 1] == "-m":
        return words[words.index("rlhf_spmd") + 1 :]
    return None


COMMANDS = [(named(path), line) for path in PROMISING for line in commands(path) if words_for_us(line)]
COMMANDS += [
    (named(path), found)
    for path in PROMISING
    for found in inline(path)
    if re.match(r"(mpirun .*)?python -m rlhf_spmd \w+ .*[^.]$", found) and not found.endswith("--help")
]


@pytest.mark.parametrize("page", [*tables.PAGES, *pages.PAGES], ids=named)
def test_tables_come_from_rows(page):
    text = page.read_text(encoding="utf-8")
    assert BLOCK.search(text)
    maker, command = (tables, "bench tables") if page in tables.PAGES else (pages, "tools pages")
    assert maker.render(text) == text, f"run `python -m {command}`"


def test_no_other_page_has_such_tables():
    assert {path for path in DOCUMENTS if BLOCK.search(path.read_text(encoding="utf-8"))} == {
        *tables.PAGES,
        *pages.PAGES,
    }


@pytest.mark.parametrize("made", [options_page, metrics_page], ids=lambda made: made.PAGE.stem)
def test_options_and_metrics_are_those_of_the_code(made):
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run `python -m tools pages`"


def test_every_metric_has_a_meaning():
    rows = [line.split("|") for line in metrics_page.page().splitlines() if line.startswith("| `")]
    assert rows and [row[1] for row in rows if not row[2].strip()] == []


def test_every_family_has_its_models():
    assert models_page.MODELS.keys() == FAMILIES.keys()


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize(("pages", "most"), MOST_WORDS.items(), ids=["manual", "results"])
def test_pages_have_few_words(pages, most):
    """A sentence more means another sentence less, or one said in one place instead of two."""
    found = {named(page): num_words(page.read_text(encoding="utf-8")) for page in pages}
    assert sum(found.values()) <= most, found


@pytest.mark.parametrize("page", DOCUMENTS, ids=named)
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]
    for link in links:
        path, _, section = " ".join(link.split()).partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if section:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert section in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], link


def test_every_page_is_reachable():
    """From README.md over links of documents."""
    seen, todo = set(), [README]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
        todo += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert not set(DOCS) - seen


def test_every_page_has_a_place_on_the_site():
    places = re.findall(r"- (?:Home: )?(\S+\.md)$", SITE.read_text(encoding="utf-8"), re.MULTILINE)
    decisions = (ROOT / "docs" / "decisions").glob("*.md")
    assert {named(page) for page in (*DOCUMENTS, *decisions)} <= set(places)
    assert len(places) == len(set(places))


@pytest.mark.parametrize("page", [*DOCS, README, RESULTS], ids=named)
def test_named_files_exist(page):
    """Of files and folders of the repository that stand in backticks, by their path from its root."""
    found = [name for name in inline(page) if re.fullmatch(rf"({'|'.join(OURS)})/[\w/.-]*", name)]
    for name in found:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", ROOT / "bench" / "LOG.md"], ids=named)
def test_named_modules_exist(page):
    """Of our modules, by the ends of their paths; the third-party ones are listed here."""
    ours = ["/" + named(path) for folder in OURS for path in (ROOT / folder).rglob("*.py")]
    for name in (name for name in inline(page) if re.fullmatch(r"[\w/]+\.py", name)):
        assert any(path.endswith("/" + name) for path in ours), name


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_are_understood(page, command, tmp_path):
    """A file of --config is one of the repository, or the block of YAML on the same page."""
    parsed = parse(words_for_us(command))
    if parsed.verb in ("train", "check", "plan") and not getattr(parsed, "resume", None):
        options = [word for word in parsed.overrides if not word.startswith("strategy.")]
        if parsed.config:
            here = ROOT / parsed.config
            texts = [block for where, block in FILES if where == page]
            (block,) = [here.read_text(encoding="utf-8")] if here.is_file() else texts
            load(file=read_block(block, tmp_path), preset="llama-7b", overrides=options)
            return
        load("llama-7b" if parsed.model else parsed.preset, options)


FILES = [(named(path), block) for path in PROMISING for language, block in blocks(path) if language == "yaml"]


def read_block(block: str, folder: Path) -> ConfigFile:
    """Returns the file of --config that a block shows, without its model, which is not a folder here."""
    path = folder / "run.yaml"
    path.write_text(block, encoding="utf-8")
    file = read_config_file(str(path))
    return dataclasses.replace(file, words={name: text for name, text in file.words.items() if name != "model"})


@pytest.mark.parametrize(("page", "block"), FILES)
def test_files_of_options_are_understood(page, block, tmp_path):
    """Blocks of YAML are files of --config."""
    file = read_block(block, tmp_path)
    config = load(file.words.get("preset", "llama-7b"), file=file)
    if "strategy" in file.words:
        load_strategy(file.words["strategy"]).typed(config.strategy)


@pytest.mark.parametrize("page", PROMISING, ids=named)
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    said = [line for line in commands(page) + inline(page) if line.startswith("make ")]
    for target in [word for line in said for word in line.split()[1:] if re.fullmatch(r"[a-z][a-z0-9-]+", word)]:
        assert re.search(rf"^([\w -]* )?{target}( [\w -]*)?:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", DOCUMENTS, ids=named)
def test_benches_exist(page):
    from bench.__main__ import MODULES

    for name in re.findall(r"python -m bench\s+([a-z][a-z0-9-]+)", page.read_text(encoding="utf-8")):
        assert name in MODULES, name


@pytest.mark.parametrize("page", [*DOCS, README], ids=named)
def test_python_is_importable(page):
    """Blocks of Python compile, and what they import of ours is there."""
    for _, block in [one for one in blocks(page) if one[0] == "python"]:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("rlhf_spmd"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_packages_without_torch():
    """docs/install.md lists the requirements beside torch and triton, for machines with a torch of their own."""
    required = re.search(r"install_requires =\n(.*?)\n\n", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.DOTALL)[
        1
    ]
    wanted = {re.match(r"\s*([\w-]+)", line)[1] for line in required.splitlines()} - {"torch", "triton"}
    lines = [line for line in commands(ROOT / "docs" / "install.md") if line.startswith("pip install deepspeed")]
    assert [set(line.split()[2:]) for line in lines] == [wanted]
