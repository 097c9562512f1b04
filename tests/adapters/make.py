"""Makes the adapters beside this file with peft, and the logits that peft computes with them (a minute).

Each folder is as `save_pretrained` leaves it, without README.md, with the logits of `TOKENS` in logits.safetensors.
peft is none of our dependencies, so each version of it has a virtual environment of its own (that of `make peers` has
0.21):

pip install torch transformers==4.57.1 peft==0.17.1; cd tests/adapters; python make.py base 0.17   # the base, too
pip install torch transformers==5.23.0 peft==0.21.2; cd tests/adapters; python make.py 0.21
"""

import sys
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file

TOKENS = [
    [(7 * i + 3) % 30 + 2 for i in range(8)],
    [(11 * i + 5) % 30 + 2 for i in range(8)],
]  # no padding (0) among them
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ATTENTION = ["q_proj", "v_proj"]
PATTERNS = {
    "rank_pattern": {"q_proj": 4, "layers.1.mlp.down_proj": 1, r"^model\.layers\.0\..*up_proj": 3},
    "alpha_pattern": {"self_attn.q_proj": 6, r"1\..*\.(up|down)_proj": 5},
}
CASES = {
    "0.17": {
        "last-names": {"target_modules": ATTENTION, "r": 2, "lora_alpha": 8},
        "patterns": {"target_modules": ["q_proj", "up_proj", "down_proj"], "r": 2, **PATTERNS},
        "all-linear": {"target_modules": "all-linear", "r": 1, "lora_alpha": 4},
        "reward": {"target_modules": ATTENTION, "r": 2, "task_type": "SEQ_CLS"},
        "some-layers": {"target_modules": ["o_proj"], "r": 2, "layers_to_transform": [1], "layers_pattern": "layers"},
    },
    "0.21": {
        "all-linear": {"target_modules": "all-linear", "r": 1, "lora_alpha": 4},
        "rslora": {"target_modules": ["q_proj", "up_proj", "down_proj"], "r": 2, "use_rslora": True, **PATTERNS},
        "expression": {"target_modules": r".*\.0\..*(k|o)_proj", "r": 2, "exclude_modules": ["o_proj"]},
        "saved-modules": {"target_modules": ATTENTION, "r": 2, "modules_to_save": ["lm_head", "input_layernorm"]},
        "reward": {"target_modules": ATTENTION, "r": 2, "task_type": "SEQ_CLS", "lora_dropout": 0.1},
    },
}


def make_base(folder: Path) -> None:
    """Makes a small random Llama."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape)
    model.save_pretrained(folder)


def make(folder: Path, base: Path, case: dict) -> None:
    """Makes one adapter with random factors, and its logits."""
    settings = {"task_type": "CAUSAL_LM"} | case
    scores = settings["task_type"] == "SEQ_CLS"
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    torch.manual_seed(1)
    model = auto.from_pretrained(base, **({"num_labels": 1} if scores else {})).float()
    model = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.3 * torch.randn(weight.shape)
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    save_file({"tokens": torch.tensor(TOKENS), "logits": logits.contiguous()}, folder / "logits.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "base" in sys.argv:
        make_base(Path("base"))
    for version in CASES.keys() & set(sys.argv):
        assert peft.__version__.startswith(version), f"this is peft {peft.__version__}"
        for name, case in CASES[version].items():
            make(Path(f"peft-{version}-{name}"), Path("base"), case)
