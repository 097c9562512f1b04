"""`python -m bench NAME [options]` runs a bench; `python -m bench` lists them."""

import importlib
import sys

ROOMS = {
    "speed": {
        "overlap": "two ranks with slowed calls: iterations under each strategy against the critical path",
        "ahead-real": "separation one iteration ahead with real computation on two pinned ranks: gain, simulated gain",
        "strategies": "where an iteration goes under each strategy, the control plane's share, timelines on one axis",
        "reallocation": "weights from one layout to another against gather and broadcast: seconds, bytes, memory",
        "generate": "generation against transformers on the same weights, to the limit and with realistic lengths; "
        "floors",
        "generate-adapters": "generation with LoRA at rank 16, apart and joined, against the model without: tokens/s",
        "tool-waits": "episodes whose tools only sleep against the same rows without waiting: tokens/s",
        "kernels": "sampling, logprobs, attention and small kernels against their peers and the ceilings of the "
        "device; with --static, what they take of an H100, without one",
    },
    "forecast": {
        "validate": "the simulator against published measurements of PPO iterations: error per row",
        "measure-cpu": "forecasts of four strategies and a searched plan on CPU ranks against measured iterations",
        "measure-plans": "the planner's best plans against all shipped strategies, run in turn on 4 and 8 CPU ranks",
        "lengths": "iterations with spread lengths on 2 to 8 CPU ranks whose layers sleep, against forecasts of their "
        "distribution from a calibration of the same ranks",
        "machines": "the demo on imitated machines (AVX2, SSE, one core, a quota) against a forecast made elsewhere",
        "published-hours": "DeepSpeed-Chat's published table against its forecast: hours of an epoch, error per row",
        "rehearse": "64 processes rehearse the shipped strategies and a plan for 8x8: seconds against their forecast",
        "plan-speed": "programs of 1,024 ranks and searches for 8x8 and 128x8 on one core: seconds; the planner's "
        "methods and APP's space from 8 to 1,024 devices: seconds, distance from the optimum",
        "ablation": "a heuristic plan, then own layouts, own ranks, offloading and CUDA graphs: what each step gains",
        "derived": "what one H100 should take for a 7B, from data sheets and counted kernels; writes two calibrations",
        "scan": "forecasts of the strategies over models and layouts: samples/s, phases, bytes; or of a named suite",
        "recipes": "a strategy to begin with for 0.5B to 70B on 1 to 64 A100s of 40 and 80 GB: options, bytes, seconds",
    },
    "numbers": {
        "demo-grpo-seeds": "make demo-grpo on five seeds: accuracy on held-out problems before and after, seconds",
        "demo-tools-seeds": "make demo-tools on five seeds: held-out questions right before, after, without a tool",
        "adapters": "LoRA at rank 8 and 1 against full training on five seeds: GRPO, SFT and DPO on held-out data",
        "demo-seeds": "the demo's learning on five fixed seeds: reward gained in initial standard deviations, KL",
        "invariance": "three seeds under four strategies at 1 to 8 ranks: tokens, metrics and weights compared",
        "lag": "PPO and GRPO that generate with weights of 1, 2, 4 iterations ago, by correction: five paired seeds",
    },
    "faults": {
        "faults": "kills at random moments under six strategies and `auto`: resumed to the same bits? hangs, orphans",
        "soak": "500 iterations with a kill about every fifty: the same bits as without? is memory flat?",
    },
    "first_light": {
        "first-light": "the first minutes on a GPU: is everything correct on it, and as fast as promised? one folder",
    },
    "against_trl": {
        "against-trl": "TRL's trainers on the same rows: losses, gradients, a step of SGD; needs `make peers`",
    },
    "against_vllm": {
        "against-vllm": "generation against vLLM's CPU backend on the same weights; needs `make peers-vllm`",
    },
    "": {
        "tables": "the tables of README.md, RESULTS.md and docs/recipes.md, written anew from bench/results/",
    },
}
SHARED = dict.fromkeys(("demo-seeds", "demo-grpo-seeds", "demo-tools-seeds"), "seeds")  # modules of several benches
MODULES = {
    name: ".".join(filter(None, ("bench", room, SHARED.get(name, name.replace("-", "_")))))
    for room, names in ROOMS.items()
    for name in names
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        lines = [f"python -m bench {name:<14} {what}" for names in ROOMS.values() for name, what in names.items()]
        print("\n".join(lines))
        return 2
    name = sys.argv[1]
    return importlib.import_module(MODULES[name]).main(sys.argv[1:] if name in SHARED else sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
