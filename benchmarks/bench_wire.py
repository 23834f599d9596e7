"""What a step weighs on the wire: bytes, and the time to write and to read it (pickle, protocol 5).

And what a running request with 8192 tokens takes in memory, all its blocks cached.
"""

from __future__ import annotations

from measuring import Case, parser, run


def main() -> None:
    """Run all cases and print bytes and microseconds."""
    arguments = parser(__doc__).parse_args()
    cases = [
        Case(
            label="256 decodes, all taking a block",
            task="wire",
            settings={"n": 256, "new": False, "prompt": 31, "repeats": 200, "seed": arguments.seed},
        ),
        Case(
            label="256 new prompts of 2048",
            task="wire",
            settings={"n": 256, "new": True, "prompt": 2048, "repeats": 5, "seed": arguments.seed},
        ),
    ]
    report = run("bench_wire: one step, serialised", cases, arguments)
    report.print_table("num_bytes", "bytes")
    report.print_table("write", "µs")
    report.print_table("read", "µs")
    report.add_sum("both ways", "write", "read")
    report.print_table("both ways", "µs")
    settings = {"num_tokens": 8192, "count": 16, "seed": arguments.seed}
    cases = [Case(label="a request with 8192 tokens", task="memory", settings=settings)]
    memory = run("\nthe same: memory", cases, arguments)
    memory.print_table("waiting", "KiB")
    memory.print_table("running", "KiB")
    report.figures.update(memory.figures)
    report.save(arguments.json)


if __name__ == "__main__":
    main()
