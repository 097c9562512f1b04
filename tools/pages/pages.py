"""Writes pages of the documents from the code: docs/options.md, docs/metrics.md, and the tables of
PAGES.

Cost: none. Command: python -m tools pages. A unit test fails when a page is not current.
"""

import json
from functools import partial

from bench.rows import REPOSITORY
from bench.tables import BLOCK, markdown
from rlhf_spmd.pages.other_names import PROGRAMS
from rlhf_spmd.plan.cost.calibration import Calibration, Device, Link, Measured
from tools.pages import calibration_page, metrics_page, models_page, options_page, rooms_page

TABLES = {"rooms": rooms_page.rooms, "families": models_page.families, "one_card": models_page.one_card}
TABLES |= {f"option_names_{program}": partial(options_page.names_elsewhere, program) for program in PROGRAMS}
TABLES |= {f"defaults_{program}": partial(options_page.defaults_elsewhere, program) for program in PROGRAMS}
TABLES["calibration"] = partial(calibration_page.fields, Calibration, Device, Link)
TABLES["calibration_tables"] = partial(calibration_page.fields, Measured)
TABLES |= {f"variants_{name}": partial(metrics_page.variants, name) for name in ("grpo", "dpo")}
PAGES = (
    REPOSITORY / "docs" / "algorithms.md",
    REPOSITORY / "docs" / "architecture.md",
    REPOSITORY / "docs" / "choose_a_model.md",
    REPOSITORY / "docs" / "forecasts.md",
    *(REPOSITORY / "docs" / f"coming_from_{program}.md" for program in PROGRAMS),
)


def main(arguments: list[str]) -> int:
    assert not arguments, "pages takes no options"
    for path in PAGES:
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    for whole in (options_page, metrics_page):
        whole.PAGE.write_text(whole.page(), encoding="utf-8")
    print(json.dumps({"tool": "pages", "ok": True}))
    return 0


def render(text: str) -> str:
    """Returns the text of a page with its tables written from the code."""

    def table(name: str) -> str:
        return "\n".join(markdown(*TABLES[name]()))

    return BLOCK.sub(lambda found: f"<!-- rows: {found[1]} -->\n{table(found[1])}\n<!-- end -->", text)
