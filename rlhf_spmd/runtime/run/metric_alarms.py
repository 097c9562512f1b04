"""Says early that a metric runs away: long before it is infinite it is many times as large as it ever was."""

from collections.abc import Iterable, Mapping

EXPLODED = 10.0  # times the largest value so far
NUM_BEFORE = 3  # iterations that have to be known
FLOORS = {  # metric -> what is small whatever it was before
    "kl": 2.0,
    "approx_kl": 0.1,
    "actor_grad_norm": 1.0,
    "critic_grad_norm": 1.0,
    "policy_loss": 1.0,
    "value_loss": 1.0,
}
RATIO_RANGE = (0.5, 2.0)  # of the mean of pi_new / pi_old, which is 1 while the two are close
ADVICE = {
    "kl": "the actor leaves the reference: raise ppo.kl_coef or lower optimizer.actor_lr",
    "approx_kl": "an iteration changes the actor too much: lower optimizer.actor_lr or ppo.epochs",
    "ratio": "the actor has left the policy that generated: lower optimizer.actor_lr or ppo.epochs",
    "actor_grad_norm": "lower optimizer.actor_lr, or look at the rewards",
    "critic_grad_norm": "lower optimizer.critic_lr, or look at the rewards",
    "policy_loss": "lower optimizer.actor_lr, or look at the rewards",
    "value_loss": "lower optimizer.critic_lr, or scale the rewards",
}


class Alarm:
    """Remembers the largest value of each metric; speaks once of each. history: metrics of the iterations before, of
    a run that goes on."""

    def __init__(self, history: Iterable[Mapping] = ()) -> None:
        self._largest: dict[str, float] = {}
        self._num_seen, self._told = 0, set()
        for metrics in history:
            self.notes({name: value for name, value in metrics.items() if isinstance(value, int | float)})

    def notes(self, metrics: Mapping[str, float | str]) -> list[str]:
        """Sentences about the metrics of one iteration that are far outside what they were."""
        found = []
        for name, floor in FLOORS.items():
            value = abs(float(metrics.get(name, 0.0)))
            limit = max(EXPLODED * self._largest.get(name, 0.0), floor)
            if self._num_seen >= NUM_BEFORE and value > limit:
                before = self._largest[name]
                found.append((name, f"{name} is {value:.4g}, and was at most {before:.4g} before"))
            self._largest[name] = max(self._largest.get(name, 0.0), value)
        ratio = float(metrics.get("ratio", 1.0))
        if not RATIO_RANGE[0] <= ratio <= RATIO_RANGE[1]:
            found.append(("ratio", f"ratio is {ratio:.4g}, far from 1"))
        self._num_seen += 1
        new = [(name, text) for name, text in found if name not in self._told]
        self._told |= {name for name, _ in new}
        return [f"warning: {text}: {ADVICE[name]}" for name, text in new]
