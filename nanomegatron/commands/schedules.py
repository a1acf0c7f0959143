"""The command `schedules`: print or draw a pipeline schedule.

nanomegatron schedules --schedule zb-v --stages 4 --microbatches 8 [--picture zb-v.png]
"""

import sys
from pathlib import Path

from nanomegatron.config.help import CommandParser
from nanomegatron.report.schedule_draw import draw_timeline, text_rows, timeline_summary
from nanomegatron.schedules import NAMES, placement, schedule, simulate


def main(argv: list[str]) -> int:
    """Print the timeline of a schedule, and draw it with --picture; returns the exit code."""
    parser = CommandParser("nanomegatron schedules", description="Show a schedule.")
    parser.add_argument("--schedule", choices=NAMES, default="1f1b")
    parser.add_argument("--stages", "--pp", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=1, help="pieces of the model a rank holds")
    parser.add_argument("--group", type=int, help="of interleaved: microbatches a chunk takes in turn")
    parser.add_argument("--picture", "--png", type=Path, metavar="FILE", help=".png, .svg or .pdf")
    args = parser.parse_args(argv)
    try:
        lists = schedule(args.schedule, args.stages, args.microbatches, args.chunks, args.group)
        placed = placement(args.schedule, args.stages, args.chunks)
        timeline = simulate(lists, placed, dict.fromkeys("FBW", 1 / len(placed[0])))  # a piece of a rank
        print("\n".join([*text_rows(timeline, sys.stdout.isatty()), timeline_summary(timeline)]))
        if args.picture:
            draw_timeline(
                timeline,
                args.picture,
                f"{args.schedule}: {args.stages} ranks, {args.microbatches} microbatches",
            )
    except BrokenPipeError:
        raise  # for verbs.py
    except (ValueError, ImportError, OSError) as error:
        print(f"nanomegatron schedules: {error}", file=sys.stderr)
        return 2
    return 0
