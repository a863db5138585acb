"""Run the benchmarks and print ratios. Fails on nothing: it reports."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from bench.measure import BENCHES, DEFAULT_BENCHES, PEERS, Plan, describe, measure, set_up
from bench.report import BEGIN, print_report, summary, update_page


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--peers",
        nargs="?",
        const=",".join(PEERS),
        default="",
        metavar="NAME,...",
        help="also measure these frameworks, all of them without names; their environments are set up first (about "
        f"1 GB for all): {', '.join(PEERS)}",
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="how often each is measured (3)")
    parser.add_argument(
        "--bench",
        default=",".join(DEFAULT_BENCHES),
        metavar="NAME,...",
        help=f"of {', '.join(BENCHES)} ({','.join(DEFAULT_BENCHES)})",
    )
    parser.add_argument("--docs", type=Path, metavar="FILE", help="put the tables between the marks of this page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here")
    options = parser.parse_args()
    peers = [name for name in options.peers.split(",") if name]
    benches = [name for name in options.bench.split(",") if name]
    if unknown := [name for name in peers if name not in PEERS] + [name for name in benches if name not in BENCHES]:
        parser.error(f"there is no {', '.join(unknown)}")
    if options.runs < 1:
        parser.error("--runs is at least 1")

    if options.docs and not (options.docs.is_file() and BEGIN in options.docs.read_text(encoding="utf-8")):
        parser.error(f"{options.docs} is no page with the line {BEGIN}")

    console = Console(width=None if Console().is_terminal else 160)
    plan = Plan(peers=set_up(peers, console), benches=benches, runs=options.runs)
    machine = describe(plan.peers)
    console.print(machine["text"], highlight=False)
    results = measure(plan, console)
    report = summary(results, machine)
    print_report(report, console)
    if options.docs:
        update_page(options.docs, report)
        console.print(f"Updated: {options.docs}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps({**report, "results": results}, indent=1) + "\n")
        console.print(f"Written: {options.json}", highlight=False)


if __name__ == "__main__":
    main()
