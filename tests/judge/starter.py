# SPDX-License-Identifier: Apache-2.0
"""Starts `hydra-judge` again and again: a process that has imported it forks one for each command, which costs no second.

Such a command is a process with its own folder, environment, streams and exit status, and ends as Python ends. What is asked
comes as a line of JSON on stdin, the answer is two lines on stdout: a process id, and its exit status when it has ended.
"""

import json
import os
import sys
from typing import Any

import hydra_judge.backends.openai  # with all that a command imports when it has read its arguments
import hydra_judge.charts  # noqa: F401
from hydra_judge.__main__ import main


def become(wanted: dict[str, Any]) -> None:
    """Makes this process what a shell would have started."""
    os.setsid()
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    for number, (path, flags) in enumerate(
        zip(wanted["streams"], (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (open(n, "w" if n else "r", closefd=False) for n in range(3))  # noqa: SIM115
    sys.argv = ["hydra-judge", *wanted["arguments"]]


if __name__ == "__main__":
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
            sys.exit(main())
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
