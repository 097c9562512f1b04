"""The experts that the tokens of an engine's requests take: recorded, and given again to rows that were preempted."""

# R requests, T tokens of a sequence, N tokens of a pass, L sparse layers of the whole model, k experts of a token

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.model.parallel import layers_of
from rlhf_spmd.model.routes import Routes
from rlhf_spmd.model.transformer import Transformer

Span = tuple[int, int, int]  # request, first token, last token + 1


class RouteRecord:
    """The routes of all requests on this rank: those of its own layers, until `of` adds those of other stages."""

    def __init__(self, model: Transformer, longest: int):
        config, layers = model.config, layers_of(model.config, model.parallel.shard)
        self.stages, dense = model.parallel.stages, config.num_dense_layers
        self._mine = slice(max(layers.start - dense, 0), max(layers.stop - dense, 0))
        size, device = (
            (0, longest, config.num_layers - dense, config.experts_per_token),
            next(model.parameters()).device,
        )
        self._ids_RTLk = torch.zeros(size, dtype=torch.uint8, device=device)
        self._known_RT = torch.zeros(size[:2], dtype=torch.bool, device=device)

    def add(self, num: int) -> None:
        """Adds requests."""
        self._ids_RTLk, self._known_RT = (
            torch.cat((one, one.new_zeros(num, *one.shape[1:]))) for one in (self._ids_RTLk, self._known_RT)
        )

    def places(self, request_B: Tensor, cached_B: Tensor, spans: list[Span]) -> tuple[Tensor, Tensor]:
        """Returns request and place in its sequence of each token of a pass: one of each running row, then spans."""
        device = request_B.device
        rows = [torch.full((stop - start,), request, device=device) for request, start, stop in spans]
        places = [torch.arange(start, stop, device=device) for _, start, stop in spans]
        return torch.cat((request_B, *rows)), torch.cat((cached_B, *places))

    def given(self, places: tuple[Tensor, Tensor]) -> Routes:
        """Returns the routes for a pass, which tokens take that took them before."""
        known_N = self._known_RT[places]
        return Routes(self._ids_RTLk[places], known_N) if known_N.any() else Routes()

    def note(self, places: tuple[Tensor, Tensor], routes: Routes) -> None:
        """Records the routes of a pass."""
        if self._mine.start < self._mine.stop:
            self._ids_RTLk[(*places, self._mine)] = routes.taken
        self._known_RT[places] = True

    def copy(self, source: int, to: int, num: int) -> None:
        """Gives a request the routes of another one's first tokens, which are the same."""
        self._ids_RTLk[to, :num], self._known_RT[to, :num] = self._ids_RTLk[source, :num], True

    def of(self, numbers: range, width: int) -> Tensor:
        """Returns the routes of some requests for `width` tokens: uint8 [R, width, L, k], 0 after the end. Collective
        over the stages."""
        ids_RTLk = self._ids_RTLk[numbers.start : numbers.stop, :width]
        ids_RTLk = F.pad(ids_RTLk, (0, 0, 0, 0, 0, width - ids_RTLk.shape[1]))
        if self.stages is not None:  # each has those of its own layers
            dist.all_reduce(ids_RTLk, group=self.stages)
        return ids_RTLk
