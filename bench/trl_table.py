"""The tables of the comparison with TRL: a line for each loss, and one for each kind of steps."""

from collections.abc import Callable, Sequence
from functools import partial

Columns = dict[str, Callable[[dict], str]]
EQUAL = ("loss_error", "gradient_error", "weights_error")
GIVEN = ("loss_error", "metrics_error", "gradient_error", "weights_error")


def by_case(rows: Sequence[dict], names: Sequence[str] = EQUAL) -> list[dict]:
    """One row for each loss: the largest errors over the models, by precision."""
    cases: dict[str, dict] = {}
    for row in rows:
        case = cases.setdefault(row["case"], {"case": row["case"], "difference": row["difference"]})
        worst = case.setdefault(row["precision"], dict.fromkeys(names, 0.0))
        for name in names:
            worst[name] = max(worst[name], row[name])
    return list(cases.values())


def _errors(precision: str, *names: str) -> Callable[[dict], str]:
    return lambda row: ", ".join(f"{row[precision][name]:.0e}" for name in names) if precision in row else "-"


def _phases(who: str) -> Callable[[dict], str]:
    return lambda row: ", ".join(f"{row[f'{who}_{phase}_s']:.1f}" for phase in ("generation", "reference", "training"))


JOINED: dict[str, tuple[str, Callable[[Sequence[dict]], list[dict]], Columns]] = {
    "against_trl": (
        "against_trl",
        by_case,
        {
            "loss": lambda row: row["case"],
            "float64: loss, gradient, weights after the step": _errors("float64", *EQUAL),
            "with casts: loss, gradient": _errors("float64 with casts", *EQUAL[:2]),
            "SmolLM2, float32: loss, gradient": _errors("float32", *EQUAL[:2]),
            "conventions": lambda row: row["difference"] or "the same",
        },
    ),
    "against_trl_given": (
        "against_trl_given",
        partial(by_case, names=GIVEN),
        {
            "loss": lambda row: row["case"],
            "float64: loss, metrics, gradient, weights after the step": _errors("float64", *GIVEN),
            "with casts: loss, metrics, gradient": _errors("float64 with casts", *GIVEN[:3]),
            "conventions": lambda row: row["difference"] or "the same",
        },
    ),
}
COMPARED: Columns = {  # a step of both programs
    "times faster": lambda row: f"{row['ratio']:.2f}",
    "promised": lambda row: f"{row['promised']:g}",
    "floor, s": lambda row: f"{row['floor_s']:.1f}",
    "its share of our step, of TRL's": lambda row: f"{row['ours_share']:.0%}, {row['peer_share']:.0%}",
}
COLUMNS: dict[str, Columns] = {
    "against_trl_steps": {
        "responses": lambda row: row["work"],
        "against": lambda row: row["peer"],
        "step, s": lambda row: f"{row['ours_s']:.1f}",
        "generation, reference, training": _phases("ours"),
        "TRL's step, s": lambda row: f"{row['peer_s']:.1f}",
        "TRL's generation, reference, training": _phases("peer"),
        **COMPARED,
    },
    "against_trl_given_steps": {
        "work": lambda row: row["work"],
        "tokens of a step": lambda row: f"{row['tokens']}",
        "step, s": lambda row: f"{row['ours_step_s']:.1f}",
        "TRL's step, s": lambda row: f"{row['peer_step_s']:.1f}",
        **COMPARED,
        "peak memory, GiB": lambda row: f"{row['ours_peak_bytes'] / 2**30:.2f}",
        "TRL's peak memory, GiB": lambda row: f"{row['peer_peak_bytes'] / 2**30:.2f}",
    },
    "against_trl_adapter_steps": {
        "work": lambda row: row["case"],
        "step of all weights, s": lambda row: f"{row['full_step_s']:.1f}",
        "step with adapters, s": lambda row: f"{row['ours_step_s']:.1f}",
        "TRL's, s": lambda row: f"{row['peer_step_s']:.1f}",
        "peak memory of all weights, GiB": lambda row: f"{row['full_peak_bytes'] / 2**30:.2f}",
        "with adapters, GiB": lambda row: f"{row['ours_peak_bytes'] / 2**30:.2f} ({row['memory_share']:.0%})",
        "TRL's, GiB": lambda row: f"{row['peer_peak_bytes'] / 2**30:.2f}",
    },
}
