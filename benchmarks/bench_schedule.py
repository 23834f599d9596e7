"""What a step of the scheduler costs: `schedule` and `update_from_output`, every result read.

Steady decode: all requests draw a token. Of one length, all fill a block in one step of sixteen,
which the mean includes; of mixed lengths, some do in every step. Churn: one request in 64 ends in
each step and another arrives, so that rows have holes; admission and end are part of the time.
"""

from __future__ import annotations

from measuring import Case, parser, run

SIZES = (1, 16, 64, 256, 1024, 4096)
CHURN_SIZES = (256, 1024)
# What it is called, whether prefixes are cached, and of how many lengths requests are.
KINDS = (("caching", True, 1), ("mixed lengths", True, 16), ("no caching", False, 1))
VLLM = {"vLLM": {"": {"kind": "sync"}, " async": {"kind": "async"}}}


def main() -> None:
    """Run all cases and print two tables: mean and median microseconds a step."""
    options = parser(__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="running requests")
    arguments = options.parse_args()
    cases = []
    for name, caching, spread in KINDS:
        for n in arguments.sizes:
            settings = {"n": n, "caching": caching, "prompt": 32, "spread": spread}
            settings["seed"] = arguments.seed
            # A multiple of the block size, so that the mean is over whole cycles; and many: a core
            # that has been idle needs milliseconds to reach full speed.
            settings["steps"] = 2048 if n <= 16 else 512 if n <= 256 else 128 if n <= 1024 else 64
            cases.append(
                Case(
                    label=f"decode, {name}, N={n}", task="decode", settings=settings, variants=VLLM
                )
            )
    for n in CHURN_SIZES:
        settings = {"n": n, "caching": True, "prompt": 128, "steps": 128, "seed": arguments.seed}
        cases.append(
            Case(label=f"churn, caching, N={n}", task="churn", settings=settings, variants=VLLM)
        )
    report = run("bench_schedule: one step, schedule + update", cases, arguments)
    report.print_table("mean", "µs")
    report.print_table("median", "µs")
    report.save(arguments.json)


if __name__ == "__main__":
    main()
