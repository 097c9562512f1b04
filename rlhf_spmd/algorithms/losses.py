"""Names of earlier versions, for pages that import them from here: these functions are in surrogates.py."""

from rlhf_spmd.algorithms.surrogates import policy_loss, policy_loss_prepare, policy_loss_sums, value_loss

__all__ = ["policy_loss", "policy_loss_prepare", "policy_loss_sums", "value_loss"]
