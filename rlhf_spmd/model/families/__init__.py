"""The families of models: a page of data for each, by its model_type in config.json. Plain Python without torch."""

from collections.abc import Mapping

from rlhf_spmd.model.families import (
    ernie4_5,
    gemma,
    gemma2,
    gemma3_text,
    glm,
    glm4,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    starcoder2,
    vaultgemma,
)

FAMILIES = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "smollm3": smollm3.FAMILY,
    "gemma": gemma.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "vaultgemma": vaultgemma.FAMILY,
    "granite": granite.FAMILY,
    "phi3": phi3.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo3.FAMILY,
    "seed_oss": seed_oss.FAMILY,
    "ernie4_5": ernie4_5.FAMILY,
    "glm": glm.FAMILY,
    "glm4": glm4.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "gpt2": gpt2.FAMILY,
    "opt": opt.FAMILY,
    "starcoder2": starcoder2.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "olmoe": olmoe.FAMILY,
}


def family_with(fields: Mapping[str, bool], *, mixture: bool, norms: str, learned: bool = False) -> str:
    """Returns the first family that has models, or mixtures, with these fields of `ModelConfig`, whatever others it
    implies, norms at these places, and rope or learned positions."""
    true = {field for field, value in fields.items() if value}
    for name, family in FAMILIES.items():
        keyed = [group for group in family.switches.values() if {*group} <= true]
        implied = {*family.always}.union(*keyed) & fields.keys()
        kind = bool(family.sizes), family.norms, family.positions is not None
        if implied == true and kind == (mixture, norms, learned):
            return name
    raise AssertionError(f"no family has {', '.join(true)}")
