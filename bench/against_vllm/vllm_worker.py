"""vLLM's worker: `.venv-peers-vllm/bin/python -m bench.against_vllm.vllm_worker JOB`, a JSON object.

It loads the model, says how long that took when it is asked, and generates the requests of each further line of JSON
that it reads. It runs in an environment of its own, without torch of ours.
"""

import json
import os
import sys
import time

from bench.against_trl import work


def main(job: str) -> None:
    told, answer = work.commands()
    started = time.perf_counter()
    engine, params_of = loaded(**json.loads(job))
    next(told)
    answer(load_s=time.perf_counter() - started)
    for one in told:
        prompts = [{"prompt_token_ids": tokens} for tokens in one["prompts"]]
        params = [params_of(max_tokens=length) for length in one["lengths"]]
        found = engine.generate(prompts, params, use_tqdm=False)
        answer(tokens=[len(done.outputs[0].token_ids) for done in found])


def loaded(*, model: str, dtype: str, longest: int, places: int, cores: list[int], cache: str):
    """Loads vLLM's engine as it is by default, but for one core a thread, no end tokens, no cache of prompts,
    and one process: a second one would take time from the threads that compute."""
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": cache,  # of compiled code
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from functools import partial

    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype=dtype,
        max_model_len=longest,
        max_num_seqs=places,
        skip_tokenizer_init=True,
        generation_config="vllm",
        enable_prefix_caching=False,
        seed=0,
    )
    return engine, partial(SamplingParams, temperature=1.0, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
