"""The time that chat templates write: that of the first start of a run, on every rank and at every resume.

It is kept as text, ISO 8601 with the offset of the host that started the run, so that other hosts write the same.
"""

import re
from datetime import UTC, datetime


def time_of_start() -> str:
    """Returns the time by the clock and in the time zone of this host."""
    return datetime.now().astimezone().isoformat()


def format_time(started: str, pattern: str) -> str:
    """Formats the time by a pattern of strftime, as a template's strftime_now returns it: without a time zone."""
    moment = datetime.fromisoformat(started)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)

    def seconds(found: re.Match) -> str:  # since 1970: C would compute them in the time zone of this host
        return str(int(moment.timestamp())) if found[0] == "%s" else found[0]

    return moment.replace(tzinfo=None).strftime(re.sub("%.", seconds, pattern, flags=re.DOTALL))
