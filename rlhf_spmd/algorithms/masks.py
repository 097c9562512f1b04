"""Masks of response tokens, and which responses ended.

Legend: B sequences, G response tokens. responses_BG: int32 or int64, -1 on padding, which is not a token id.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def response_mask(responses_BG: Tensor) -> Tensor:
    """Returns true on real response tokens, the EOS included: bool [B, G]."""
    return responses_BG >= 0


def last_index(mask_BG: Tensor) -> Tensor:
    """Returns index of the last True of each row, -1 where there is none: int64 [B]."""
    counting_G = torch.arange(1, mask_BG.shape[1] + 1, device=mask_BG.device)
    return torch.where(mask_BG, counting_G, 0).amax(dim=1) - 1


def ended(responses_BG: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """Returns true where the last real token is an EOS id, False where the response was truncated (or is empty): bool
    [B]."""
    last_B = last_index(response_mask(responses_BG)).clamp(min=0)  # of an empty response token_B is -1
    token_B = responses_BG.gather(1, last_B[:, None])[:, 0]
    return torch.isin(token_B, token_B.new_tensor(list(eos_ids)))
