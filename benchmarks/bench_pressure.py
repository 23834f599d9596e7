"""What happens under pressure: a pool that is too small, and a queue that is very long.

Pool: 256 requests of 512 tokens in and 512 out, in a pool of 60 % of what they need at their end;
the whole run, preemptions included. Queue: 64 requests decode while others wait, and no row is
free.
"""

from __future__ import annotations

from measuring import Case, parser, run


def main() -> None:
    """Run both and print microseconds."""
    arguments = parser(__doc__).parse_args()
    pool = {"n": 256, "prompt": 512, "output": 512, "pool_share": 0.6, "seed": arguments.seed}
    waiting = {"n": 64, "steps": 128, "seed": arguments.seed}
    title = "bench_pressure: a small pool and a long queue"
    cases = [Case(label="pool of 60 %, whole run", task="pressure", settings=pool)]
    report = run(title, cases, arguments)
    report.print_table("total", "µs")
    report.print_table("num_steps", "steps")
    report.print_table("num_preemptions", "preemptions")
    cases = [
        Case(label=f"{count:,} waiting", task="queue", settings={**waiting, "num_waiting": count})
        for count in (0, 100_000)
    ]
    steps = run("\nthe same: a long queue", cases, arguments)
    steps.print_table("median", "µs")
    empty, full = (steps.median(case.label, "pdcore", "median") for case in cases)
    assert empty is not None
    assert full is not None
    print(f"\npdcore, 100,000 waiting against an empty queue: {full / empty:.2f}x")
    report.figures.update(steps.figures)
    report.save(arguments.json)


if __name__ == "__main__":
    main()
