"""Feeds mkdocs with the Markdown of the repository, each file under its path there, so that the links which repository
browsers follow are those of the site, too. Also makes the pages of the reference.
"""

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGES.md", "SECURITY.md", "examples/README.md")
PAGES += ("bench/RESULTS.md", "bench/LOG.md", "bench/data/README.md")
SHIM = "assets/iframe-worker.js"  # without it, pages that are opened as files have no search
REFERENCE = """\
# Python reference

What strategies, algorithms, reward functions and environments are written with. Made from the docstrings.

"""
OBJECTS = {
    "Strategies": ("plan.placement.Placement", "plan.layout.Layout", "plan.workload.Workload", "plan.cluster.Cluster"),
    "Algorithms": ("algorithms.page", "plan.workflow"),
    "Rewards": ("rewards",),
    "Environments": ("tools", "embedded.table_tools.Table"),
}
FOREIGN = re.compile(r"https://unpkg\.com/iframe-worker/shim")
PICTURE = re.compile(r'(<img [^>]*src="([^"]+)"[^>]*>)')
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


REMOTE = re.compile(r"(?:https://(?:[^@/]*@)?|ssh://git@|git@)([\w.-]+\.\w+)[:/](.+?)(?:\.git)?/?")


def on_config(config):
    """Adds the version and, if the checkout was cloned from a web host, the link to it."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    config.site_name += f" {setup['metadata']['version']}"
    config.repo_url = repository(_git("remote", "get-url", "origin"))
    config.repo_name = "Repository" if config.repo_url else None
    return config


def repository(remote: str) -> str | None:
    """Returns the address of the web page of a remote, None for a folder."""
    found = REMOTE.fullmatch(remote)
    return f"https://{found[1]}/{found[2]}" if found else None


def _git(*words: str) -> str:
    """Returns what a git command prints; nothing without git or a checkout."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def on_files(files: Files, config) -> Files:
    """Takes the place of docs_dir: those of the repository and the generated pages."""
    paths = [*PAGES, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    linked = {target for path, text in texts.items() for target in _targets(path, text)} - set(texts)
    made = [File.generated(config, path, content=text) for path, text in texts.items()]
    made += [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in sorted(linked)]
    generated = {"python": _python(), "command_line": _command_line()}
    made += [File.generated(config, f"reference/{name}.md", content=text) for name, text in generated.items()]
    made.append(File.generated(config, SHIM, abs_src_path=str(Path(__file__).with_name("assets") / "iframe-worker.js")))
    theme = [file for file in files if not (ROOT / "docs" / file.src_uri).exists()]
    return Files([*theme, *made])


def on_page_content(html: str, page, config, files) -> str:
    """Links each picture to itself, for screens on which its text is too small."""
    return PICTURE.sub(r'<a href="\2">\1</a>', html)


def on_post_page(output: str, page, config) -> str:
    """Takes the one script that the theme loads from another host from here instead."""
    return FOREIGN.sub(get_relative_url(SHIM, page.url), output)


def on_post_template(output_content: str, template_name: str, config) -> str:
    """Does the same for pages that are not made from Markdown."""
    return FOREIGN.sub(f"/{SHIM}" if template_name == "404.html" else SHIM, output_content)


def _targets(path: str, text: str) -> set[str]:
    """Returns the files of the repository that a page links to."""
    found = set()
    for link in LINK.findall(text):
        target = Path(os.path.normpath(ROOT / Path(path).parent / unquote(link)))
        if ":" not in link and target.is_file():
            found.add(target.relative_to(ROOT).as_posix())
    return found


def _python() -> str:
    parts = [REFERENCE]
    for heading, names in OBJECTS.items():
        parts.append(f"## {heading}\n\n")
        parts += [f"::: rlhf_spmd.{name}\n\n" for name in names]
    return "".join(parts)


def _command_line() -> str:
    """Returns the help of each subcommand."""
    main = _help()
    verbs = re.findall(r"^    ([a-z][a-z-]+)(?: |$)", main.partition("SUBCOMMAND\n")[2].partition("\n\n")[0], re.M)
    parts = ["# Command line\n\nWhat `python -m rlhf_spmd SUBCOMMAND --help` prints.\n", f"\n```text\n{main}```\n"]
    parts += [f"\n## {verb}\n\n```text\n{_help(verb)}```\n" for verb in verbs]
    return "".join(parts)


def _help(*words: str) -> str:
    """Runs the package in the environment in which it is installed, which this one is not."""
    python = os.environ.get("RLHF_SPMD_PYTHON", sys.executable)
    return subprocess.run(
        [python, "-m", "rlhf_spmd", *words, "--help"],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"},
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout
