"""Programs in processes of their own, without the seconds that each would take to import torch and Lightning.

One process imports them and waits, and each program begins in a copy of it, as `python -m module …` or `python script.py …` would; from
then on it is an ordinary process, with an end like any other. What such a copy cannot show, warnings of imports and another hash seed for
each process, is tested with `subprocess` (`run_python`). For Linux.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from functools import cache
from multiprocessing import process
from pathlib import Path
from select import select

ROOT = Path(__file__).parent.parent
PATIENCE = 120.0
"""Seconds for imports, on a busy machine."""


class Apart:
    """A program in a process of its own, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: as behind `python`: `-m`, a module and its arguments, or a script and its arguments.
        folder: where it runs.
        env: its environment variables, this process's unless given.
        stdout: a descriptor to write to, which is closed with this object; else `communicate` says what was written.
    """

    def __init__(self, arguments: str, folder: Path, env: dict[str, str] | None = None, stdout: int | None = None) -> None:
        self.arguments, self.keeps = arguments, stdout is None
        self.streams = [os.memfd_create("stdout") if stdout is None else stdout, os.memfd_create("stderr")]
        inherited = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}  # of a run in this process
        request = {"arguments": shlex.split(arguments), "folder": str(folder), "env": inherited if env is None else env}
        self.answers, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.answers.settimeout(PATIENCE)
        with there:
            socket.send_fds(waiting()[1], [json.dumps(request).encode()], [there.fileno(), *self.streams])
        self.pid = self._answer()
        self.returncode: int | None = None

    def _answer(self) -> int:
        said = self.answers.recv(32)
        if not said:
            raise RuntimeError("the process that begins programs is gone")
        return int(said)

    def poll(self, timeout: float = 0.0) -> int | None:
        """Its exit status, if it has ended."""
        if self.returncode is None and select([self.answers], [], [], timeout)[0]:
            self.returncode = self._answer()
        return self.returncode

    def wait(self, timeout: float = 300.0) -> int:
        """Its exit status, when it has ended."""
        status = self.poll(timeout)
        if status is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.arguments, timeout, stderr=read(self.streams[1])[-2000:].encode())
        return status

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """What it wrote to stdout and stderr until it ended; what processes that it left behind write comes too late."""
        self.wait(timeout)
        out, err = self.streams
        return read(out) if self.keeps else "", read(err)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self.answers.close()
        for each in self.streams:
            os.close(each)


def read(descriptor: int) -> str:
    """All of a file, from its beginning."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()


@cache
def waiting() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process that waits, and a socket to it, which ends it when it closes."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # each program has its own
    with there:
        command = [sys.executable, "-m", "tests.apart", str(there.fileno())]
        return subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[there.fileno()]), here


def serve(requests: socket.socket) -> None:
    """Import, and then become a program for each request, in a copy of this process."""
    before = set(os.environ)
    import torch.utils.tensorboard  # noqa: F401

    import lightning_rl.cli.fit
    import lightning_rl.training.trainer  # noqa: F401

    sys.modules.pop("lightning_rl.__main__", None)  # else runpy warns that it was imported before
    warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)  # threads of libraries, which look after themselves
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies
    own = {name: value for name, value in os.environ.items() if name not in before}
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            answers, *streams = descriptors
            request = json.loads(message)
            if watch(answers) == 0:
                become(request["arguments"], request["folder"], own | request["env"], streams)
            return
        for each in descriptors:
            os.close(each)


def watch(answers: int) -> int:
    """Another copy, in which this returns 0, for the program; this one tells its process and how it ends, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        os.close(answers)
        return 0
    os.write(answers, str(program).encode())
    end = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)  # so that its number is nobody else's until that is known
    assert end is not None
    os.write(answers, str(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status).encode())
    os._exit(0)


def become(arguments: list[str], folder: str, env: dict[str, str], streams: list[int]) -> None:
    """Be the program."""
    import numpy as np
    import torch

    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that a shell runs in its background, or nohup, has both ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    random.seed()
    np.random.seed()
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    module = arguments.pop(1) if arguments[0] == "-m" else None
    sys.argv = arguments
    first = folder if module else str(Path(folder, arguments[0]).parent)
    sys.path[:1] = [first, *filter(None, env.get("PYTHONPATH", "").split(":"))]
    if module is None:
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
