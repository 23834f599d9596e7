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
        Case(label="100,000 waiting", task="queue", settings={**waiting, "num_waiting": 100_000})
    ]
    steps = run("\nthe same: a step beside a long queue, and beside none", cases, arguments)
    steps.print_table("empty", "µs")
    steps.print_table("median", "µs")
    steps.print_table("growth", "times a step beside none")
    steps.print_table("mean growth", "times a step beside none")
    report.figures.update(steps.figures)
    report.save(arguments.json)


if __name__ == "__main__":
    main()
