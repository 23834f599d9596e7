"""What it costs to admit a prompt: making the request, naming its blocks, one step with one token.

Cold: nothing of it is cached. Cached: all of it is, and the last block is computed again. Alone, or
one of 16 that arrive in the same step: figures are per request.
"""

from __future__ import annotations

from measuring import Case, parser, run


def main() -> None:
    """Run all cases and print microseconds a request."""
    arguments = parser(__doc__).parse_args()
    cases = [
        Case(
            label=f"{num_tokens} tokens, {'cached' if cached else 'cold'}{arriving}",
            task="admission",
            settings={
                "num_tokens": num_tokens,
                "cached": cached,
                "at_once": at_once,
                "steps": 10 if at_once > 1 else 100 if num_tokens < 1000 else 20,
                "seed": arguments.seed,
            },
        )
        for at_once, arriving in ((1, ""), (16, ", 16 at once"))
        for num_tokens in (512, 8192)
        for cached in (False, True)
    ]
    report = run("bench_admission: from the request's making to its first token", cases, arguments)
    report.print_table("mean", "µs")
    report.print_table("median", "µs")
    report.save(arguments.json)


if __name__ == "__main__":
    main()
