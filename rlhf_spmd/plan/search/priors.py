"""Where a search begins: meshes in the style of the strategies, and the choice on them that needs the least memory."""

from collections.abc import Iterator, Sequence
from itertools import cycle

from rlhf_spmd.plan.calls import Train
from rlhf_spmd.plan.search.budget import Budget
from rlhf_spmd.plan.search.candidates import Candidate
from rlhf_spmd.plan.search.exact import Choice, Space
from rlhf_spmd.plan.search.iteration_model import CallModel

Meshes = tuple[tuple[int, int], ...]  # of each call: first place, last + 1


def priors(space: Space) -> Iterator[Meshes]:
    """Yields meshes in the style of the strategies: all calls on all ranks, or on the first power of two of them, which
    has more grids (flattening, reallocation); frozen models, train calls or both on alternating halves, and models with
    all of their calls on alternating halves (interleaving); training on the first ranks and all else on the others, or
    the other way around (separation)."""
    model = space.model
    num, parts = len(model.limits), _parts(space)
    large = sorted(parts, key=lambda span: (span[0] - span[1], span))
    even = [span for span in large if (span[1] - span[0]) & (span[1] - span[0] - 1) == 0]
    everywhere = dict.fromkeys([*(large[:1] if large[0] == (0, num) else large[:2]), *even[:1]])
    for whole in everywhere:
        halves = _halves(whole)
        yield (whole,) * len(model.calls)
        frozen = [model.trained_by(i) is None for i in range(len(model.calls))]
        trained = [isinstance(call, Train) for call in model.calls]
        both = [a or b for a, b in zip(frozen, trained, strict=True)]
        for apart in (frozen, trained, both):
            turns = cycle(halves)
            yield tuple(next(turns) if split else whole for split in apart)
        trainings = [model.trained_by(i) for i in range(len(model.calls))]
        half_of = dict(zip(dict.fromkeys(t for t in trainings if t is not None), cycle(halves), strict=False))
        for spans in ([whole], halves):
            turns = cycle(spans)
            yield tuple(next(turns) if training is None else half_of[training] for training in trainings)
    for training, rest in _cuts(space):
        yield tuple(training if index in model.trains else rest for index in range(len(model.calls)))


def priors_in_chain(space: Space) -> Iterator[Meshes]:
    """Yields meshes on which iterations of a chain overlap: training on some ranks and all else on the others
    (separation), or on some ranks the calls of the first kind, such as generation, on the others training that these
    need not wait for, such as the critic's, and all else on all ranks."""
    model, whole = space.model, (0, len(space.model.limits))
    first = [call.kind == model.calls[0].kind for call in model.calls]
    for one, other in _cuts(space):
        yield tuple(one if index in model.trains else other for index in range(len(model.calls)))
        yield tuple(one if index in model.late else other if first[index] else whole for index in range(len(first)))


def _parts(space: Space) -> set[tuple[int, int]]:
    """Returns all meshes that candidates have."""
    return {(one.first, one.stop) for of in space.candidates for one in of}


def _cuts(space: Space) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields the ranks in two parts, in both orders."""
    num, parts = len(space.model.limits), _parts(space)
    for edge in sorted({stop for first, stop in parts if first == 0 and (stop, num) in parts}):
        yield (0, edge), (edge, num)
        yield (edge, num), (0, edge)


def around(space: Space, chosen: Choice, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates on the meshes of some call, on all ranks, and on halves of these."""
    used = {(one.first, one.stop) for one in chosen} | {(0, len(space.model.limits))}
    halves = {half for mesh in used for half in _halves(mesh)}
    return [one for one in candidates if (one.first, one.stop) in used | halves]


def _halves(mesh: tuple[int, int]) -> list[tuple[int, int]]:
    middle = sum(mesh) // 2
    return [(mesh[0], middle), (middle, mesh[1])]


def on_meshes(space: Space, meshes: Meshes) -> list[list[Candidate]]:
    """Returns the candidates of each call on its mesh."""
    return [
        [one for one in of if (one.first, one.stop) == mesh] for of, mesh in zip(space.candidates, meshes, strict=True)
    ]


def least_full(
    model: CallModel, chosen: Choice, grid: Sequence[Sequence[Candidate]], budget: Budget
) -> tuple[Choice, float]:
    """Changes one call after another until a choice fits, no change helps or the budget is spent; returns it and the
    bytes that it misses."""
    current, missing = list(chosen), model.overflow_bytes(chosen)
    improved = True
    while missing > 0 and improved and not budget.is_spent:
        improved = False
        for index, of in enumerate(grid):
            kept = current[index]
            for one in () if budget.is_spent else of:
                current[index] = one
                budget.taken += 1
                other = model.overflow_bytes(current)
                if other < missing:
                    missing, kept, improved = other, one, True
            current[index] = kept
    return tuple(current), missing


def least_memory(one: Candidate) -> tuple[float, ...]:
    """Sorts candidates by the memory that they need, all kinds together."""
    working = one.gathered_bytes + one.gradient_bytes + one.activation_bytes + one.cache_bytes
    return one.static_bytes + working, one.seconds


def least_static(one: Candidate) -> tuple[float, ...]:
    """Sorts candidates first by the memory that they need all the time."""
    return one.static_bytes, *least_memory(one)
