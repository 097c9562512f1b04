"""Numbers as the text of a cell of a table; "-" where there is none."""


def percent(share: float | None, digits: int = 1) -> str:
    """share: 1 is 100%."""
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def number(value: float | None, digits: int = 1) -> str:
    """digits: behind the point."""
    return "-" if value is None else f"{value:,.{digits}f}"
