"""A model of iterations at the level of calls: seconds and bytes of a placement without compiling it, for the search.

In the order of the workflow, a call occupies all ranks of its mesh once its inputs are there and the ranks are free,
for the seconds of its candidate; then new weights go to the copies that lack them. A trained model's other calls need
no copy if they split the model as its training does, over the same ranks. Memory is a hard limit: bytes are those of
memory.py, of the rank of each layout that needs the most of each kind. One iteration ahead (Placement.ahead), training
waits for no call before it, and shares no rank with any. In a chain (Placement.chain) seconds are those from one
iteration to the next.
"""

from collections.abc import Sequence
from copy import copy
from math import inf, lcm
from typing import NamedTuple

from rlhf_spmd.plan.calls import Generate, Train, trains
from rlhf_spmd.plan.cost.memory import most_rows_bytes, num_trained
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.instructions import BUCKET_BYTES
from rlhf_spmd.plan.search.candidates import Allowed, CallCosts, Candidate, Destination, anything
from rlhf_spmd.plan.shard import Shard

Assignment = Sequence[Candidate | None]  # by searched call; None: not chosen yet
Base = tuple[str, tuple[int, int, int]]  # weights that models have in common, and the copy (Candidate.copy)


class Parts(NamedTuple):
    """Bytes of a rank by kind. resident: static ones, with buckets and all rows; the others: the most that a call
    needs."""

    resident: float
    gathered: float
    gradients: float
    activations: float
    cache: float

    @property
    def peak(self) -> float:
        """The most that a rank needs at one time, as memory.peak_bytes adds it up."""
        return self.resident + self.gathered + max(self.activations + self.gradients, self.cache)


class CallModel:
    """The searched calls of a workload on a cluster (all that have weights), and the costs of a choice for each.

    phases: indices of calls; each call of a phase depends, directly or not, on all calls of earlier phases of its line.
    lines: indices of phases, one list for all, or one ahead: the phases that sample, and those that train meanwhile.
    evaluated_tokens, ahead: as in planner.search.
    late: train calls of other models than the first call's; what they do, the next iteration may begin without.
    chain: whether iterations are a chain.
    """

    def __init__(self, cost: Cost, allowed: Allowed = anything, evaluated_tokens: int = 0, ahead: int = 0):
        self.cost, self.workload, self.cluster, self.ahead = cost, cost.workload, cost.cluster, ahead
        self.chain = False
        workflow, models = self.workload.workflow, self.workload.models
        self.calls = tuple(call for call in workflow.placed_calls if models[call.model] is not None)
        self.costs = CallCosts(cost, allowed, evaluated_tokens, ahead)
        self.evaluated_tokens = evaluated_tokens
        self.needs = self._needs()
        # one ahead, inferences with the weights with which training begins are a part of it
        late = [trains(call, workflow) if ahead else isinstance(call, Train) for call in self.calls]
        self.trains = [index for index, is_late in enumerate(late) if is_late]
        self.others = [index for index, is_late in enumerate(late) if not is_late]
        self.phases = self._phases()
        self.lines = [list(range(len(self.phases)))]
        if ahead:
            self._take_apart()
        names, models_used = [call.name for call in self.calls], [call.model for call in self.calls]
        self.trained_in_chain = sorted(self.trains, key=lambda index: models_used.index(models_used[index]))
        self.late = [index for index in self.trains if models_used[index] != models_used[0]]
        self.models: list[tuple[int | None, list[int]]] = []  # of each model: its train call, its other calls
        self.bases = [self.workload.bases.get(call.model, "") for call in self.calls]
        for model in dict.fromkeys(call.model for call in self.calls):
            train = workflow.train_call(model)
            users = [i for i, call in enumerate(self.calls) if call.model == model and call is not train]
            self.models.append((names.index(train.name) if train else None, users))
        self.num_caches = sum(isinstance(call, Generate) for call in self.calls)
        self.can_stream = (
            not ahead
            and not any(map(self.workload.needs_batch, workflow.calls))
            and self.workload.num_mini_batches > 1
            and bool(self.trains)
        )
        self.limits = self._limits()
        self.rows_bytes = most_rows_bytes(self.workload, ahead)  # so a rank of a plan may hold less, never more
        sizes = {call.model: num_trained(self.workload.shape(call.model), Shard()) for call in self.calls}
        self.moved_bytes = [sizes[one.model] * self.workload.trained_number_bytes(one.model) for one in self.calls]
        self._pairs: dict[tuple[Destination, Destination, bool, int], tuple[bool, float]] = {}
        self._nodes_of: dict[tuple[int, int, int], frozenset[int]] = {}

    def _needs(self) -> list[frozenset[int]]:
        """Finds, for each searched call, the calls whose data it reads, directly or through a `compute`."""
        workflow, index = self.workload.workflow, {call.name: i for i, call in enumerate(self.calls)}
        made: dict[str, frozenset[int]] = {}
        needs = {}
        for call in workflow.calls:
            inputs = frozenset().union(*(made.get(key, frozenset()) for key in call.inputs))
            needs[call.name] = inputs
            mine = frozenset({index[call.name]}) if call.name in index else inputs
            made |= dict.fromkeys(call.outputs, mine)
        return [needs[call.name] for call in self.calls]

    def _phases(self) -> list[list[int]]:
        """Cuts the list of calls wherever all later calls depend on all earlier ones."""
        num, needs = len(self.calls), list[frozenset[int]]()
        for direct in self.needs:
            needs.append(direct.union(*(needs[i] for i in direct)))
        edges = [at for at in range(num) if all(set(range(at)) <= needs[i] for i in range(at, num))]
        return [list(range(first, stop)) for first, stop in zip(edges, [*edges[1:], num], strict=True)]

    def _take_apart(self) -> None:
        """Makes two lines of the calls that sample a batch and of those that train the one before."""
        late_calls = set(self.trains)
        self.needs = [need & late_calls if i in late_calls else need for i, need in enumerate(self.needs)]
        drawing, training = (
            [part for phase in self.phases if (part := [i for i in phase if (i in late_calls) == late])]
            for late in (False, True)
        )
        self.phases = drawing + training
        self.lines = [list(range(len(drawing))), list(range(len(drawing), len(self.phases)))]

    def trained_by(self, index: int) -> int | None:
        """Returns the call that trains the model of a call; None if it is frozen."""
        return next((train for train, users in self.models if index in users or index == train), None)

    def _limits(self) -> list[float]:
        """Returns usable bytes of the smallest device of the type at each place (see Mesh.first)."""
        limits: list[float] = []
        for device in self.cluster.device_types:
            ranks = self.cluster.ranks_of(device)
            sizes = [size for rank in ranks if (size := self.cluster.usable_bytes(rank)) is not None]
            limits += [min(sizes, default=inf)] * len(ranks)
        return limits

    # ---- two layouts of one model ------------------------------------------------------------------------------------

    def pair(self, user: Candidate, training: Candidate) -> tuple[bool, float]:
        """Returns whether a call uses the weights that its model trains on ranks that both have, and the seconds in
        which new weights reach the ranks that lack them."""
        key = user.where, training.where, training.layout.zero == 3, user.whole_bytes
        if key not in self._pairs:
            self._pairs[key] = self._pair(user, training)
        return self._pairs[key]

    def _pair(self, user: Candidate, training: Candidate) -> tuple[bool, float]:
        size = user.layout.pp * user.layout.tp
        alike = (user.layout.pp, user.layout.tp) == (training.layout.pp, training.layout.tp)
        shares = (
            alike
            and (user.first - training.first) % size == 0
            and user.first < training.stop
            and training.first < user.stop
        )
        inside = training.first <= user.first and user.stop <= training.stop
        if training.layout.zero == 3:
            shares = shares and (user.first, user.stop) == (training.first, training.stop)
        if shares and inside:
            return True, 0.0
        held = self._least_held(user, training) if inside and training.layout.zero < 3 else 0.0
        nodes = self._nodes(user) | self._nodes(training)
        training_size = training.layout.pp * training.layout.tp
        copies = self._nodes(training, step=training_size)
        training_nodes = {self.cluster.node_of(rank) for rank in training.ranks[:training_size]}
        near = len(nodes) == 1 or (inside and len(training_nodes) == 1 and training.layout.zero < 3 and nodes == copies)
        link = self.cost.calibration.inside if near else self.cost.calibration.between
        return shares, user.whole_bytes * (1 - held) / link.bytes_per_s

    def _nodes(self, one: Candidate, step: int = 1) -> frozenset[int]:
        """Returns the nodes of a candidate's ranks, or of its first rank and every `step` ranks after it."""
        key = one.first, one.stop, step
        if key not in self._nodes_of:
            self._nodes_of[key] = frozenset(map(self.cluster.node_of, one.ranks[::step]))
        return self._nodes_of[key]

    def _least_held(self, user: Candidate, training: Candidate) -> float:
        """Returns the share of its new shard that a rank already holds, for the rank that holds the least."""
        least = 1.0
        mine, theirs = user.layout, training.layout
        size, other_size = mine.pp * mine.tp, theirs.pp * theirs.tp
        for at in range(min(len(user.ranks), lcm(size, other_size))):
            stage, slice_ = divmod(at % size, mine.tp)
            other_stage, other_slice = divmod((user.first - training.first + at) % other_size, theirs.tp)
            layers = _common(stage, mine.pp, other_stage, theirs.pp) * mine.pp
            least = min(least, layers * _common(slice_, mine.tp, other_slice, theirs.tp) * mine.tp)
        return least

    # ---- seconds -----------------------------------------------------------------------------------------------------

    def schedule_s(self, chosen: Assignment, indices: Sequence[int]) -> float:
        """Returns seconds of some calls, in this order, and of the transfers of weights after training; calls without a
        choice are skipped."""
        ends: dict[int, float] = {}
        busy: list[tuple[int, int, float]] = []  # first place, last + 1, busy until
        for index in indices:
            one = chosen[index]
            if one is None:
                continue
            begin_s = max((ends.get(i, 0.0) for i in self.needs[index]), default=0.0)
            for first, stop, end_s in busy:
                if end_s > begin_s and first < one.stop and one.first < stop:
                    begin_s = end_s
            ends[index] = begin_s + one.seconds + self.gather_s(chosen, index)
            busy.append((one.first, one.stop, ends[index]))
        self._reallocate(chosen, ends, busy)
        return max((end_s for _, _, end_s in busy), default=0.0)

    def gather_s(self, chosen: Assignment, index: int) -> float:
        """Returns the extra seconds of a call that gathers the weights that its model trains (ZeRO 3)."""
        one = chosen[index]
        for train, users in self.models:
            training = chosen[train] if train is not None and index in users else None
            if one is not None and training is not None and training.layout.zero == 3 and self.pair(one, training)[0]:
                return one.gather_s
        return 0.0

    def _reallocate(self, chosen: Assignment, ends: dict[int, float], busy: list[tuple[int, int, float]]) -> None:
        """Sends new weights once the ranks of both layouts are free."""
        for train, users in self.models:
            training = chosen[train] if train is not None and train in ends else None
            if train is None or training is None:
                continue
            seen: set[Destination] = set()
            for user in users:
                one = chosen[user]
                if one is None or one.where in seen:
                    continue
                seen.add(one.where)
                took_s = self.pair(one, training)[1]
                if took_s:
                    begin_s = ends[train]
                    for first, stop, end_s in busy:
                        trains_here = first < training.stop and training.first < stop
                        if end_s > begin_s and (trains_here or (first < one.stop and one.first < stop)):
                            begin_s = end_s
                    busy += [(c.first, c.stop, begin_s + took_s) for c in (training, one)]

    def streams(self, chosen: Assignment) -> bool:
        """Returns whether an iteration can stream, if memory allows it."""
        return self.can_stream and self.apart(chosen)

    def apart(self, chosen: Assignment) -> bool:
        """Returns whether no train call shares a rank with another call, as far as chosen."""
        trains = [one for i in self.trains if (one := chosen[i])]
        others = [one for i in self.others if (one := chosen[i])]
        return all(a.stop <= b.first or b.stop <= a.first for a in trains for b in others)

    def streamed_s(self, chosen: Assignment, least_s: Sequence[float] = ()) -> float:
        """Returns the seconds of an iteration that streams: mini-batch by mini-batch, including the first epoch of
        training.

        least_s: for each call without a choice, the least seconds of a mini-batch, on ranks of its own.
        """
        num, epochs = self.workload.num_mini_batches, self.workload.epochs
        free = [0.0] * len(self.calls)  # when the ranks of each call have no more work
        piece_s = [one.piece_s if one else least_s[index] for index, one in enumerate(chosen)]
        same_ranks = [
            [j for j, b in enumerate(chosen) if i == j or (a and b and a.first < b.stop and b.first < a.stop)]
            for i, a in enumerate(chosen)
        ]
        for _ in range(num):
            now: list[float] = []
            for index, needs in enumerate(self.needs):
                begin_s = max([free[j] for j in same_ranks[index]] + [now[i] for i in needs])
                free[index] = begin_s + piece_s[index]
                now.append(free[index])
        for index in self.trains:
            free[index] = max(free[j] for j in same_ranks[index]) + (epochs - 1) * num * piece_s[index]
        busy = [(one.first, one.stop, end_s) for one, end_s in zip(chosen, free, strict=True) if one]
        self._reallocate(chosen, {index: free[index] for index in self.trains if chosen[index]}, busy)
        return max(max(free), *(end_s for _, _, end_s in busy))

    @property
    def can_chain(self) -> bool:
        """Whether iterations may be a chain, and gain from that."""
        return self.workload.may_chain and bool(self.late) and not self.ahead and self.cluster.num_devices > 1

    def in_chain(self) -> "CallModel":
        """Returns the same model for iterations that are a chain."""
        other = copy(self)
        other.chain = True
        return other

    def chained_s(self, chosen: Sequence[Candidate], most_s: float = inf) -> float:
        """Returns the seconds from one iteration to the next in a chain: of the work of the busiest rank or, if that is
        longer, of the way from the first use of a trained model to the arrival of its new weights. Iterations stream if
        they can, and then decode all mini-batches at once.

        most_s: of more seconds, a lower bound is enough.
        """
        places, seconds = {one.first for one in chosen}, [one.seconds for one in chosen]
        longest_s = max(sum([one.seconds for one in chosen if one.first <= at < one.stop]) for at in places)
        if round(longest_s, 9) > most_s:
            return longest_s
        streams = self.may_stream(chosen)
        same_ranks = [[j for j, b in enumerate(chosen) if a.first < b.stop and b.first < a.stop] for a in chosen]
        now, later = list[int](), list[int]()  # as chain.order_of_training does
        for train in self.trained_in_chain:
            (now if set(now).isdisjoint(same_ranks[train]) else later).append(train)
        num, begins = self.workload.num_mini_batches if streams else 1, dict[int, float]()
        seconds = [one.seconds + self.gather_s(chosen, index) for index, one in enumerate(chosen)]
        pieces_s = [
            one.piece_s if streams and not isinstance(call, Generate) else whole_s
            for call, one, whole_s in zip(self.calls, chosen, seconds, strict=True)
        ]
        free = [0.0] * len(self.calls)  # when the ranks of each call have no more work
        for piece in range(num):
            ends: dict[int, float] = {}
            for index in (*self.others, *now):
                begin_s = max([free[j] for j in same_ranks[index]] + [ends[i] for i in self.needs[index]])
                begins.setdefault(index, begin_s)
                drawn = piece > 0 and isinstance(self.calls[index], Generate)
                free[index] = ends[index] = begin_s + (0.0 if drawn else pieces_s[index])
        users_of = dict(self.models)
        for train in (*now, *later):
            left_s = seconds[train] - num * pieces_s[train] * (train in now)
            begin_s = max(free[j] for j in (*same_ranks[train], *self.needs[train]))
            moved_s = [self.pair(chosen[user], chosen[train])[1] for user in users_of[train]]
            free[train] = begin_s + left_s + max(moved_s, default=0.0)
            longest_s = max([longest_s, *(free[train] - begins[user] for user in users_of[train])])
        return longest_s

    def score_s(self, chosen: Assignment, most_s: float = inf) -> float:
        """Returns seconds of an iteration, which streams if that is possible and faster.

        most_s: of more seconds, a lower bound is enough.
        """
        if self.chain:
            return self.chained_s([one for one in chosen if one], most_s)
        seconds = self.schedule_s(chosen, range(len(self.calls)))
        return min(seconds, self.streamed_s(chosen)) if self.may_stream(chosen) else seconds

    def may_stream(self, chosen: Assignment) -> bool:
        """Returns whether a choice that fits can stream, and fits then, too."""
        return self.streams(chosen) and (self.num_caches < 2 or self.excess_bytes(chosen, stream=True) <= 0)

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def excess_bytes(self, chosen: Assignment, *, stream: bool = False) -> float:
        """Returns the bytes by which the fullest rank exceeds its device's memory; negative if all ranks have room.
        Calls without a choice need nothing, so another choice never lowers it.

        stream: in an iteration that streams.
        """
        return max(self._excesses(chosen, stream), default=-inf)

    def overflow_bytes(self, chosen: Assignment) -> float:
        """Returns the bytes that do not fit, summed over places."""
        return sum(max(0.0, excess) for excess in self._excesses(chosen))

    def _excesses(self, chosen: Assignment, stream: bool = False) -> list[float]:
        """Returns bytes beyond the limit at all places that may be the fullest: where a mesh begins, or where the mesh
        of a train call ends."""
        if not self._consistent(chosen):
            return [inf]
        ends = {one.stop for i in self.trains if (one := chosen[i]) and one.stop < len(self.limits)}
        places = ends.union(one.first for one in chosen if one is not None)
        return [self.parts_at(chosen, at, stream).peak - self.limits[at] for at in places if self.limits[at] < inf]

    def parts_at(self, chosen: Assignment, place: int, stream: bool = False) -> Parts:
        """Returns the bytes at a place. A shard of weights that models have in common counts once, with the largest of
        their heads.

        stream: generate calls alternate, so all their caches live at the same time; else one after another.
        """
        static, gathered, gradients, activations, cache = self.rows_bytes, 0, 0, 0, 0
        bases: dict[Base, int] = {}

        def held(one: Candidate, index: int) -> int:
            """Returns the static bytes of a candidate without its base."""
            if one.base_bytes:
                key = self.bases[index], one.copy
                bases[key] = max(bases.get(key, 0), one.base_bytes)
            return one.static_bytes - one.base_bytes

        for train, users in self.models:
            training = chosen[train] if train is not None else None
            trains_here = training is not None and training.first <= place < training.stop
            if train is not None and training is not None and trains_here:
                static += held(training, train)
                gathered, gradients = max(gathered, training.gathered_bytes), max(gradients, training.gradient_bytes)
                activations = max(activations, training.activation_bytes)
            copies, buckets = set(), 0
            for user in users:
                one = chosen[user]
                if one is None:
                    continue
                here = one.first <= place < one.stop
                shares, took_s = (False, 0.0) if training is None else self.pair(one, training)
                if took_s and (here or trains_here):
                    buckets = min(2 * BUCKET_BYTES, 4 * self.moved_bytes[user])
                if not here:
                    continue
                cache = cache + one.cache_bytes if stream else max(cache, one.cache_bytes)
                activations = max(activations, one.activation_bytes)
                if training is not None and shares and trains_here:
                    gathered = max(gathered, one.spread_bytes if training.layout.zero == 3 else 0)
                    continue
                gathered = max(gathered, one.gathered_bytes)
                if one.copy not in copies:
                    copies.add(one.copy)
                    static += held(one, user)
            static += buckets
        return Parts(static + sum(bases.values()), gathered, gradients, activations, cache)

    def _consistent(self, chosen: Assignment) -> bool:
        """Returns whether all calls of each frozen model keep its weights alike, and one ahead training has ranks of
        its own (validate.py)."""
        if self.ahead and not self.apart(chosen):
            return False
        for train, users in self.models:
            ways = [one for user in users if train is None and (one := chosen[user])]
            for one in ways[1:]:
                if (one.layout.zero, one.layout.offload) != (ways[0].layout.zero, ways[0].layout.offload):
                    return False
                if one.layout.zero and one.ranks != ways[0].ranks:
                    return False
        return True

    # ---- placements --------------------------------------------------------------------------------------------------

    def placement(self, chosen: Sequence[Candidate]) -> Placement:
        """Returns the placement of a full choice; reward functions run where responses are made."""
        layouts = {call.name: one.placed for call, one in zip(self.calls, chosen, strict=True)}
        first = next((c for c in self.calls if isinstance(c, Generate)), self.calls[0])
        ranks = layouts[first.name].ranks[: self.workload.mini_batch]
        for call in self.workload.workflow.placed_calls:
            layouts.setdefault(call.name, Layout.data_parallel(ranks))
        order = [call.name for call in self.workload.workflow.placed_calls]
        return Placement({name: layouts[name] for name in order})


def _common(index: int, parts: int, other: int, others: int) -> float:
    """Returns the share of a whole that part `index` of `parts` and part `other` of `others` have in common."""
    return max(0.0, min((index + 1) / parts, (other + 1) / others) - max(index / parts, other / others))
