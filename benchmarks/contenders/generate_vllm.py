"""vLLM as a contender of `bench_generate.py`: `LLM.generate` over token ids, prefix caching on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from generate_workload import Generate, serve_generation


def load(model: str, dtype: str) -> Generate:
    """Start an engine in this process."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )

    def generate(prompts: Sequence[list[int]], num_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    return generate


def main() -> None:
    """Serve the task ``generate``."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model")
    options.add_argument("--dtype", default="bfloat16")
    arguments = options.parse_args()
    serve_generation(lambda: load(arguments.model, arguments.dtype))


if __name__ == "__main__":
    main()
