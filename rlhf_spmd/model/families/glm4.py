"""GLM-4 and GLM-Z1 of 2025: GLM-4 of 2024 with norms of what a block adds, too."""

from dataclasses import replace

from rlhf_spmd.model.families import glm

FAMILY = replace(glm.FAMILY, prefix="Glm4", norms="around")
