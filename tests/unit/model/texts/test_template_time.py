"""The time that a chat template writes."""

import time
from datetime import datetime

from rlhf_spmd.model.texts.template_time import format_time, time_of_start
from tests.unit.model.texts.test_chat_template import STARTED


def test_the_time_zone_of_a_host_does_not_matter(monkeypatch):
    moment, seen = datetime.fromisoformat(STARTED), set()
    for zone in ("UTC", "Asia/Tokyo", "XYZ+11"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        seen.add(format_time(STARTED, "%s %c %Z %z"))
        assert datetime.fromisoformat(time_of_start()).tzinfo
    monkeypatch.undo()
    time.tzset()
    assert seen == {f"{int(moment.timestamp())} Tue Feb  3 23:59:58 2026  "}
