"""transformers as a contender of `bench_generate.py`: `generate`, or its continuous batching."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from generate_workload import Generate, bind_threads, serve_generation


def load(model: str, dtype: str, *, is_continuous: bool, num_threads: int | None) -> Generate:
    """Load the model; ``is_continuous`` chooses `generate_batch`."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: Sequence[list[int]], num_tokens: int) -> None:
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None if is_continuous else network.config.eos_token_id,
            pad_token_id=0,
        )
        if is_continuous:
            network.generate_batch(
                inputs=list(prompts), generation_config=settings, progress_bar=False
            )
        else:
            ids = torch.tensor(prompts)
            network.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)

    return generate


def main() -> None:
    """Serve the task ``generate``."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--continuous", action="store_true")
    options.add_argument("--threads", type=int)
    arguments = options.parse_args()
    if arguments.threads is not None:
        bind_threads(arguments.threads)
    serve_generation(
        lambda: load(
            arguments.model,
            arguments.dtype,
            is_continuous=arguments.continuous,
            num_threads=arguments.threads,
        )
    )


if __name__ == "__main__":
    main()
