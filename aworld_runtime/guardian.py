"""The small process between us and a program we start, so that the program can't outlive us.

    our process ──▶ guardian (own session, subreaper) ──▶ program ──▶ whatever it forks

It runs as a script, by path, on the standard library alone (`processes.spawn` starts it). It ends
the whole tree below it when our process is gone however it died, when the program has ended, or on
SIGQUIT; SIGTERM, SIGINT and SIGHUP go to the program alone. As a subreaper it inherits descendants
that made themselves daemons, so those end too. If the guardian itself is killed, the kernel kills
the program and our process kills what is left of the group.

Arguments: our pid, the file descriptor for the report (`pid N`, and `error TEXT` if the program
can't be executed), then the program's own argv.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_WITHOUT_PIDFD_MS = 200


def prctl(option: int, value: int) -> None:
    """Set a process attribute that Python has no call for."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def children() -> list[int]:
    """Direct children of this process, those inherited as a subreaper among them."""
    mine = os.getpid()
    found: list[int] = []
    for name in os.listdir("/proc") if sys.platform == "linux" else []:  # noqa: PTH208 - pathlib costs 5 ms
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                # The command's name is in parentheses and may hold anything: count from the last.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if int(fields[1]) == mine:
            found.append(int(name))
    return found


def kill_tree(program: int | None = None) -> None:
    """Kill every descendant; those of a killed one become our children: on until there are none."""
    while True:
        for pid in {*children(), *([program] if program is not None else [])}:
            os.kill(pid, signal.SIGKILL)
        try:
            reaped, _ = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if reaped == program:
            program = None


def start(argv: list[str], report: int) -> int:
    """Fork and execute the program; it dies with us, by the kernel's hand."""
    guardian = os.getpid()
    pid = os.fork()
    if pid:
        os.write(report, f"pid {pid}\n".encode())
        os.close(report)
        return pid
    try:
        for number in (*FORWARDED, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:  # it died before the line above took effect
            os._exit(1)
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        os.write(report, f"error {error.strerror}\n".encode())
    finally:
        os._exit(127)


def open_pidfd(pid: int) -> int | None:
    """None where the kernel has no pidfd: then the parent is polled."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def watch(owner: int, program: int, wake: int, arrived: list[int]) -> int:
    """Wait for the program, and return its wait status; kill everything if the owner goes first."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    owner_fd = open_pidfd(owner)
    if owner_fd is not None:
        poll.register(owner_fd, select.POLLIN)
    ready: dict[int, int] = {}
    while True:
        # The parent's id is asked too: it may have died before the pidfd was opened.
        if owner_fd in ready or os.getppid() != owner or signal.SIGQUIT in arrived:
            kill_tree(program)
            return signal.SIGKILL
        while arrived:
            number = arrived.pop(0)
            if number in FORWARDED:
                os.kill(program, number)
        status = reap(program)
        if status is not None:
            return status
        ready = dict(poll.poll(None if owner_fd is not None else POLL_WITHOUT_PIDFD_MS))
        if wake in ready:
            os.read(wake, 4096)


def reap(program: int) -> int | None:
    """Collect whoever ended; the program's wait status if it was among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # the program is ours until it is returned here
        if pid == program:
            return status
        if pid == 0:
            return None


def main(owner: int, report: int, argv: list[str]) -> None:
    """Run the program to its end, and end as it did."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    arrived: list[int] = []
    for number in (*FORWARDED, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, lambda number, _frame: arrived.append(number))
    os.set_inheritable(report, False)
    program = start(argv, report)
    status = watch(owner, program, wake, arrived)
    kill_tree()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # end as the program ended, without a second core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
