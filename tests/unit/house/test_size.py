import tomllib

from tests.size_rules import BUDGET, REPOSITORY, measure


def test_the_code_keeps_its_budget():
    """Lowering the budget is free; a room that needs more takes it from another one."""
    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    for table, numbers in measure(REPOSITORY).items():
        over = {name: number for name, number in numbers.items() if not _fits(number, budget[table].get(name))}
        assert not over, f"{table} above {BUDGET.name}: {over}"


def _fits(number, most):
    if most is None:
        return False
    return (
        all(size <= limit for size, limit in zip(number, most, strict=True))
        if isinstance(most, list)
        else number <= most
    )
