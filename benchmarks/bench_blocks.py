"""What the block pool costs: a block's allocation, release, look-up and publication; a big pool."""

from __future__ import annotations

from measuring import Case, parser, run

OPERATIONS = (
    "allocate plain",
    "release plain",
    "allocate hashed",
    "publish",
    "lookup",
    "release hashed",
)


def main() -> None:
    """Run all cases and print nanoseconds a block."""
    arguments = parser(__doc__).parse_args()
    cases = [
        Case(
            label=f"{size} at a time",
            task="blocks",
            settings={"size": size, "rounds": 4000 // size + 40},
        )
        for size in (1, 32, 512)
    ]
    report = run("bench_blocks: nanoseconds a block, all checks on", cases, arguments)
    for operation in OPERATIONS:
        report.print_table(operation, "ns")
    report.add_sum("both plain", "allocate plain", "release plain")
    report.add_sum("both hashed", "allocate hashed", "release hashed")
    report.print_table("both plain", "ns")
    report.print_table("both hashed", "ns")
    cases = [Case(label="1,000,000 blocks", task="pool", settings={"num_blocks": 1_000_000})]
    pools = run("\nthe same: building a pool", cases, arguments)
    pools.print_table("build", "ns a block")
    pools.print_table("num_bytes", "bytes a block")
    report.figures.update(pools.figures)
    report.save(arguments.json)


if __name__ == "__main__":
    main()
