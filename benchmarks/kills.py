# SPDX-License-Identifier: Apache-2.0
"""Kills a run at random moments, again and again, and compares what it computed with a run that nobody disturbed.

    uv run python benchmarks/kills.py --kills 20 --ranks 2
    uv run python benchmarks/kills.py --kills 5 --victim "stopped rank"

Four runs on the CPU: in one a rank is killed (SIGKILL), in one all ranks, in one a rank is stopped (SIGSTOP), so that the
others have to find out, in one the launcher is killed, after which the same command is given again. A checkpoint is written every other step, so many kills fall into a write. Every figure that the
arithmetic decides must be that of the undisturbed run, bit for bit. Prints a line for each run, with the longest time that the ranks lived on; exit
status 1 if one differs.
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from nmoe.commands import enter

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "distributed"))

from commands import CONFIG, Command, alive, figures

from nmoe.data.builtin import make_python_docs

STEPS, TIMEOUT_S = 120, 3.0
VICTIMS = ("one rank", "all ranks", "stopped rank", "the launcher")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--victim", choices=VICTIMS, help="default: each in turn")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    random.seed(options.seed)
    print(f"seed {options.seed}, {options.ranks} ranks, {STEPS} steps, {options.kills} kills a run", flush=True)
    with tempfile.TemporaryDirectory() as place:
        data = make_python_docs(Path(place) / "data")
        whole, _ = run(Path(place) / "whole", data, "nobody", options, kills=0)
        expected, differ = figures(whole), 0
        for victim in [options.victim] if options.victim else VICTIMS:
            began = time.monotonic()
            found, longest = run(Path(place) / victim.replace(" ", "-"), data, victim, options, kills=options.kills)
            equal = figures(found) == expected
            differ += not equal
            seconds = time.monotonic() - began
            print(
                f"{victim}: {options.kills} times, {seconds:.0f} s, bits {'equal' if equal else 'DIFFER'}, "
                f"all ranks gone after {longest:.1f} s at most",
                flush=True,
            )
    return 1 if differ else 0


def run(folder: Path, data: Path, victim: str, options: argparse.Namespace, *, kills: int) -> tuple[Path, float]:
    """Trains to the end however often it is killed; the run's folder, and the longest that ranks lived on, in seconds."""
    folder.mkdir()
    text = (
        CONFIG.replace("DATA", str(data)).replace("steps = 40", f"steps = {STEPS}").replace("every = 4}", "every = 2}")
    )
    (folder / "tiny.toml").write_text(text)
    arguments = ("--nproc", str(options.ranks), "--restarts", "5", f"rdep.timeout_s={TIMEOUT_S}")
    longest = 0.0
    done, command = 0, Command(folder, *arguments)
    while done < kills:
        command.wait_for_step(min(STEPS - 10, STEPS * done // kills + 1))
        while victim == "stopped rank" and steps_of_this_start(command) < 3:
            time.sleep(0.01)  # up to there ranks have half an hour, to compile
        time.sleep(random.random() * 0.3)
        ranks = command.ranks()
        if len(ranks) < options.ranks:
            continue  # between two starts
        one = [random.choice(ranks)]
        victims = {"one rank": one, "stopped rank": one, "all ranks": ranks, "the launcher": [command.pid]}[victim]
        for pid in victims:
            os.kill(pid, signal.SIGSTOP if victim == "stopped rank" else signal.SIGKILL)
        done, began = done + 1, time.monotonic()
        if victim == "the launcher":
            command.wait()
        while any(alive(pid) for pid in ranks):
            assert time.monotonic() - began < 60, f"ranks live on: {command.errors}"
            time.sleep(0.01)
        longest = max(longest, time.monotonic() - began)
        if victim == "the launcher":
            command = Command(folder, *arguments)
        else:
            while set(command.ranks()) & set(ranks):
                time.sleep(0.01)
    with command:
        assert command.wait(1200) == 0, command.errors
    return command.run, longest


def steps_of_this_start(command: Command) -> int:
    """Steps since the ranks were started last."""
    return len(re.findall(r"^step ", command.errors.rpartition(": starting again")[2], re.MULTILINE))


if __name__ == "__main__":
    raise SystemExit(enter("__main__", "main"))
