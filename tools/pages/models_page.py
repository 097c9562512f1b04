"""The tables of docs/choose_a_model.md: families, their chat templates, and what one GPU trains."""

import json

from bench.rows import REPOSITORY
from bench.tables import Columns, Rows
from rlhf_spmd.model.families import FAMILIES

# model_type -> models, sizes in billions of parameters, and how their own chat templates write calls of tools (a format
# of model/texts/tool_calls.py; none: not at all; or what is in the way)
HERMES, NONE = "`<tool_call>`, as ChatML", "none"
GLM = "none (a name, and JSON in the next line, if the model writes it, is read)"
MODELS = {
    "llama": [
        ("Llama 2", "7, 13, 70", NONE),
        ("Llama 3 to 3.3", "1, 3, 8, 70, 405", "JSON, or `[f(x=1)]`"),
        ("SmolLM2", "0.135, 0.36, 1.7", "1.7: " + HERMES),
    ],
    "smollm3": [("SmolLM3", "3", "none (it reads `xml_tools`, and writes no calls)")],
    "granite": [("Granite 3", "2, 8", "none (`<\\|tool_call\\|>[...]`, if the model writes it, is read)")],
    "gemma": [("Gemma 1", "2, 7", NONE)],
    "gemma2": [("Gemma 2", "2, 9, 27", NONE)],
    "gemma3_text": [("Gemma 3, text", "0.27, 1", NONE), ("Gemma 3, its part for text", "4, 12, 27", NONE)],
    "vaultgemma": [("VaultGemma", "1", "no template")],
    "mistral": [
        ("Mistral", "7", "`[TOOL_CALLS] [...]`; tools move to the last message of the user, so a second one is refused")
    ],
    "qwen2": [("Qwen2, Qwen2.5", "0.5, 1.5, 3, 7, 14, 32, 72", HERMES)],
    "qwen3": [("Qwen3", "0.6, 1.7, 4, 8, 14, 32", HERMES + "; drops thinking of earlier turns, which is refused")],
    "phi3": [
        ("Phi-3, Phi-3.5", "3.8, 7, 14", NONE),
        ("Phi-4", "14", NONE),
        ("Phi-4-mini", "3.8", "none (`functools[...]`, which it writes, is read)"),
    ],
    "glm": [("GLM-4 of 2024", "9", GLM)],
    "glm4": [
        ("GLM-4 of 2025", "9, 32", GLM),
        ("GLM-Z1", "9, 32", "none; drops thinking of earlier turns, which is refused"),
    ],
    "seed_oss": [("Seed-OSS", "36", "`<seed:tool_call>` with values without types: not read")],
    "ernie4_5": [("ERNIE 4.5, dense", "0.3", NONE)],
    "olmo2": [("OLMo 2", "1, 7, 13, 32", NONE)],
    "olmo3": [("OLMo 3", "7, 32", "`<function_calls>f(x=1)`")],
    "gpt_neox": [("GPT-NeoX, Pythia", "0.07 to 12, 20", "no template")],
    "gpt2": [("GPT-2", "0.12, 0.35, 0.77, 1.5", "no template")],
    "opt": [("OPT, not that of 0.35", "0.125, 1.3, 2.7, 6.7, 13, 30, 66", "no template")],
    "starcoder2": [("StarCoder2", "3, 7, 15", NONE)],
    "mixtral": [("Mixtral", "8x7, 8x22", "`[TOOL_CALLS] [...]`, as Mistral")],
    "qwen3_moe": [("Qwen3-30B-A3B, 235B-A22B", "30, 235", HERMES + ", as Qwen3")],
    "olmoe": [("OLMoE", "7", NONE)],
}


def families() -> tuple[Columns, Rows]:
    """Returns a row for the models of each family, in its order."""
    rows = [
        {"type": f"`{name}`", "models": models, "sizes": sizes, "tools": tools}
        for name in FAMILIES
        for models, sizes, tools in MODELS[name]
    ]
    columns = {
        "`model_type`": "type",
        "models": "models",
        "sizes, 10^9 parameters": "sizes",
        "calls of tools, by their own template": "tools",
    }
    return _columns(columns), rows


def one_card() -> tuple[Columns, Rows]:
    """Returns what fits one GPU, by the rows of the recipes."""
    lines = (REPOSITORY / "bench" / "results" / "recipes.jsonl").read_text(encoding="utf-8").splitlines()
    found = [row for row in map(json.loads, lines) if row.get("devices") == 1 and row.get("options")]
    rows = [
        {
            "model": f"`{row['preset']}`",
            "algorithm": row["algorithm"].upper(),
            "gib": str(row["device_gib"]),
            "options": f"`{row['options']}`",
            "used": f"{row['peak_bytes'] / 2**30:.1f}",
        }
        for row in found
    ]
    columns = {
        "model": "model",
        "algorithm": "algorithm",
        "GiB of the GPU": "gib",
        "options of `flattening`": "options",
        "GiB used": "used",
    }
    return _columns(columns), rows


def _columns(names: dict[str, str]) -> Columns:
    return {title: lambda row, key=key: row[key] for title, key in names.items()}
