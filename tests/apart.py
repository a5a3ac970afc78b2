"""Programs in processes of their own, without the seconds that each would take to import torch and Lightning.

One process imports them and waits, and each program begins in a copy of it, as `python -m module …` or `python script.py …` begins; from
then on it is an ordinary process, with an end like any other. What Python does before, `subprocess` tests. For Linux.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from select import select
from typing import Any

ROOT = Path(__file__).parent.parent


class Apart:
    """A program in a process of its own, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: as behind `python`: `-m`, a module and its arguments, or a script and its arguments.
        folder: where it runs.
        env: its environment variables, this process's unless given.
        stdout: where it writes to, a descriptor that is closed here; else `communicate` says what it wrote.
    """

    def __init__(self, arguments: str, folder: Path, env: dict[str, str] | None = None, stdout: int | None = None) -> None:
        self.keeps = stdout is None
        self.streams = [os.memfd_create("stdout") if stdout is None else stdout, os.memfd_create("stderr")]
        self.answers, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            request = {"arguments": shlex.split(arguments), "folder": str(folder), "env": dict(os.environ if env is None else env)}
            socket.send_fds(waiting()[0], [json.dumps(request).encode()], [there.fileno(), *self.streams])
        self.pid = int(self.answers.recv(32))
        self.returncode: int | None = None

    def poll(self, timeout: float = 0.0) -> int | None:
        """Its exit status, if it has ended."""
        if self.returncode is None and select([self.answers], [], [], timeout)[0]:
            with self.answers:
                self.returncode = int(self.answers.recv(32))
        return self.returncode

    def wait(self, timeout: float = 300.0) -> int:
        """Its exit status, when it has ended."""
        status = self.poll(timeout)
        if status is None:
            self.kill()
            raise subprocess.TimeoutExpired("a program apart", timeout)
        return status

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """What it wrote to stdout and stderr, when it has ended."""
        self.wait(timeout)
        out, err = self.streams
        return read(out) if self.keeps else "", read(err)

    def __del__(self) -> None:
        for each in self.streams:
            os.close(each)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def read(descriptor: int) -> str:
    """All of a file, from its beginning."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()


@cache
def waiting() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that waits, and a socket to it; it ends with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with there:
        return here, subprocess.Popen([sys.executable, "-m", "tests.apart", str(there.fileno())], cwd=ROOT, pass_fds=[there.fileno()])


def serve(requests: socket.socket) -> None:
    """Import, and then become a program for each request, in a copy of this process."""
    import torch.utils.tensorboard  # noqa: F401

    import lightning_rl.cli
    import lightning_rl.trainer  # noqa: F401

    sys.modules.pop("lightning_rl.__main__", None)  # a program's own, made anew
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            watch(json.loads(message), *descriptors)
            return
        for each in descriptors:
            os.close(each)


def watch(request: dict[str, Any], answers: int, *streams: int) -> None:
    """Start the program in another copy; tell its process, and how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        os.close(answers)
        become(**request, streams=streams)
        return
    os.write(answers, str(program).encode())
    os.write(answers, str(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])).encode())
    os._exit(0)


def become(arguments: list[str], folder: str, env: dict[str, str], streams: tuple[int, ...]) -> None:
    """Be the program."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    module = arguments.pop(1) if arguments[0] == "-m" else None
    sys.argv = arguments
    sys.path[:1] = [folder, *filter(None, env.get("PYTHONPATH", "").split(":"))]
    if module is None:
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
