"""Run the benchmarks and print ratios. Fails on nothing: it reports."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from bench.backends import BACKENDS, start_backends
from bench.kills import kill_writers
from bench.measure import BENCHES, CHANNEL_BENCHES, DEFAULT_BENCHES, PEERS, Plan, describe, measure, set_up
from bench.report import BLOCKS, is_page, print_report, summary, update_page


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
        help=f"of {', '.join(BENCHES)}, and of channels {', '.join(CHANNEL_BENCHES)}; "
        f"`channels` are all of those, `none` is none ({','.join(DEFAULT_BENCHES)})",
    )
    parser.add_argument(
        "--channels",
        default="memory,sqlite",
        metavar="NAME,...",
        help=f"backends of channels, of {', '.join(BACKENDS)} (memory,sqlite); servers are started for the time",
    )
    parser.add_argument(
        "--kills", type=int, default=0, metavar="N", help="also kill so many writers in each durable backend (none)"
    )
    parser.add_argument("--docs", type=Path, metavar="FILE", help="put the tables between the marks of this page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here")
    options = parser.parse_args()
    peers = [name for name in options.peers.split(",") if name]
    channels = [name for name in options.channels.split(",") if name]
    groups = {"channels": CHANNEL_BENCHES, "none": ()}
    benches = [bench for name in options.bench.split(",") if name for bench in groups.get(name, (name,))]
    known = (*PEERS, *BENCHES, *CHANNEL_BENCHES, *BACKENDS)
    if unknown := [name for name in (*peers, *benches, *channels) if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}")
    if options.runs < 1:
        parser.error("--runs is at least 1")
    if options.docs and not is_page(options.docs):
        parser.error(f"{options.docs} is no page with the marks of {', '.join(BLOCKS)}")

    console = Console(width=None if Console().is_terminal else 160)
    with start_backends(channels, console) as backends:
        plan = Plan(peers=set_up(peers, console), benches=benches, runs=options.runs, backends=backends)
        machine = describe(plan.peers)
        console.print(machine["text"], highlight=False)
        results = measure(plan, console)
        kills = kill_writers(backends, options.kills, console) if options.kills else []
    report = summary(results, machine, kills)
    print_report(report, console)
    if options.docs:
        update_page(options.docs, report)
        console.print(f"Updated: {options.docs}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps({**report, "results": results}, indent=1) + "\n")
        console.print(f"Written: {options.json}", highlight=False)


if __name__ == "__main__":
    main()
