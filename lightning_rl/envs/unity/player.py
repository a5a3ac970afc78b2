"""A player: one Unity editor or executable, and the server to which it connects.

Unity is the client. Each of its requests says what happened, and the reply says what to do; Unity waits for it. So `start` answers the last
request, `finish` waits for the next one, and in between Unity simulates: start all players before finishing the first.
"""

import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.envs.unity import wire
from lightning_rl.envs.unity.channels import STATS, read_messages, read_stat
from lightning_rl.envs.unity.decoding import Agents, BehaviorSpec, read_spec, split_agents
from lightning_rl.envs.unity.settings import EDITOR_PORT, UnitySettings
from lightning_rl.errors import RunStoppedError, SettingError, missing_extra
from lightning_rl.processes.children import STOPPING, close_at_exit

CLOSE_TIMEOUT = 10.0
"""Seconds in which an executable must quit before it is killed."""
POLL_INTERVAL = 0.5
"""Seconds between looks at whether an executable still runs."""
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")


class PlayerError(SettingError):
    """A player quit, crashed or does not answer."""


class Turn(NamedTuple):
    """The agents of each behavior in a message: those that ask for a decision, and those whose episode ended."""

    asking: dict[str, Agents]
    ended: dict[str, Agents]


class Actions(NamedTuple):
    """Actions of N agents, in the order in which they asked: continuous `[N, C]` and discrete `[N, branches]`, or None."""

    continuous: np.ndarray | None
    discrete: np.ndarray | None


class Player:
    """One editor or executable. The constructor returns when the scene has started.

    Args:
        executable: the program; None: wait for the editor's Play button, without a limit.
        settings: of the run's players.
        index: of this player in the run.
        seed: of the scene.
        setup: messages of side channels that are sent before the scene begins.
        log: the executable's log.

    Raises:
        PlayerError: it quit, crashed, or did not answer in time.
        SettingError: a package is missing, the port is in use, or Unity speaks another protocol.
    """

    def __init__(self, executable: Path | None, settings: UnitySettings, index: int, seed: int, setup: bytes, log: Path | None) -> None:
        self.executable, self.settings, self.log, self.setup = executable, settings, log, setup
        self.requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.specs: dict[str, BehaviorSpec] = {}
        self.outbox, self.stats = bytearray(), list[tuple[str, float, str]]()
        """Messages of side channels for the next reply, and statistics that the scene reported."""
        self.process: subprocess.Popen | None = None
        self.quits = False
        """Whether Unity was asked to quit."""
        self.executor = DaemonExecutor()
        base = settings.port or (EDITOR_PORT if executable is None else None)
        self.server, self.port = self._serve(0 if base is None else base + index)
        close_at_exit(self)
        try:
            if executable is None:
                print(f"waiting for Unity on port {self.port}: press Play", flush=True)
            else:
                assert log is not None
                self.process = launch(settings.make_command(executable, self.port, log))
            self._shake_hands(seed)
        except BaseException:
            self.close(0.0)
            raise

    def _serve(self, port: int) -> tuple[Any, int]:
        """Start the server. Return it and its port; 0 lets the system choose one."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else a port in use is reported in several lines
        try:
            import grpc
        except ModuleNotFoundError as error:
            raise missing_extra("grpcio", "unity", "unity") from error
        try:
            wire.messages()
        except ModuleNotFoundError as error:
            raise missing_extra("protobuf", "unity", "unity") from error
        service, method = wire.METHOD[1:].split("/")
        handler = grpc.unary_unary_rpc_method_handler(self._answer)  # without serializers: messages are bytes
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        server = grpc.server(self.executor, options=[*unlimited, ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        try:
            port = server.add_insecure_port(f"127.0.0.1:{port}")
        except RuntimeError as error:
            way_out = "set env.kwargs.port (in Unity: Project Settings, ML-Agents)"
            raise SettingError(f"port {port} is in use; stop the other trainer, or {way_out}") from error
        server.start()
        return server, port

    def _answer(self, request: bytes, context: object) -> bytes:
        """Pass on a request, in a thread of the server, and wait for its reply."""
        self.requests.put(request)
        return self.replies.get()

    def _shake_hands(self, seed: int) -> None:
        """Agree on a protocol, and start the scene."""
        hello = self._receive(None if self.executable is None else self.settings.timeout_wait).unity_output.rl_initialization_output
        version = hello.communication_version
        if version.partition(".")[0] != wire.VERSION.partition(".")[0]:
            raise SettingError(f"Unity's package speaks protocol {version}, and 1.x is read: use com.unity.ml-agents 1.0 or newer")
        self._reply(wire.make_hello(seed % 2**31, self.settings.num_areas, self.settings.package_version))
        self._receive(self.settings.timeout_wait)  # an empty message, which the reset answers
        self.outbox += self.settings.make_engine_settings() + self.setup
        self.reset()

    def reset(self) -> None:
        """Start all episodes in the scene again; Unity abandons those that run, without a word."""
        self._send(wire.messages(raw=True).UnityRLInputProto(command=wire.RESET))

    def start(self, actions: Mapping[str, Actions]) -> None:
        """Send the actions of agents that asked, by behavior; agents of behaviors without actions do nothing."""
        content = wire.messages(raw=True).UnityRLInputProto(command=wire.STEP)
        for behavior, (continuous, discrete) in actions.items():
            values = content.agent_actions[behavior].value
            numbers = None if continuous is None else np.ascontiguousarray(continuous, "<f4")
            choices = None if discrete is None else discrete.tolist()
            for i in range(len(continuous if continuous is not None else discrete)):  # type: ignore[arg-type]
                value = values.add()
                if numbers is not None:
                    value.continuous_actions = numbers[i].tobytes()
                if choices is not None:
                    value.discrete_actions.extend(choices[i])
        self._send(content)

    def finish(self) -> Turn:
        """Wait for the next message. Raises `PlayerError` as the constructor does."""
        output = self._receive(self.settings.timeout_wait).unity_output
        infos = output.rl_output.agent_infos
        for brain in output.rl_initialization_output.brain_parameters:
            if brain.brain_name not in self.specs and brain.brain_name in infos and infos[brain.brain_name].value:
                self.specs[brain.brain_name] = read_spec(brain, infos[brain.brain_name].value[0])
        for channel, payload in read_messages(output.rl_output.side_channel):
            if channel == STATS:
                self.stats.append(read_stat(payload))
        turn = Turn({}, {})
        for name, spec in self.specs.items():
            turn.asking[name], turn.ended[name] = split_agents(infos[name].value if name in infos else (), spec, name.partition("?")[0])
        return turn

    def _send(self, content: Any) -> None:
        content.side_channel = bytes(self.outbox)
        self.outbox.clear()
        self._reply(wire.make_message(wire.messages(raw=True).UnityInputProto(rl_input=content)))

    def _reply(self, message: bytes) -> None:
        self.replies.put(message)

    def _receive(self, timeout: float | None) -> Any:
        """Wait for the next message; without a timeout for ever, or until the run is asked to stop, which raises `RunStoppedError`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_INTERVAL if deadline is None else min(POLL_INTERVAL, deadline - time.monotonic())
            try:
                request = self.requests.get(timeout=max(0.0, left))
                break
            except queue.Empty:
                if deadline is None and STOPPING:
                    raise RunStoppedError from None
                if self.process is not None and (code := self.process.poll()) is not None:
                    raise PlayerError(f"{self._name} {describe_exit(code)}; see {self.log}") from None
                if left <= 0.0:
                    needs = "the scene needs an agent with a Decision Requester and Behavior Type Default"
                    log = "" if self.log is None else f" (log: {self.log})"
                    raise PlayerError(f"no message from Unity on port {self.port} in {timeout:g} s: {needs}{log}") from None
        message = wire.messages(raw=True).UnityMessageProto.FromString(request)
        if message.header.status != wire.OK:
            raise PlayerError(f"{self._name} was closed" if self.process else "Play was stopped in Unity's editor")
        return message

    @property
    def _name(self) -> str:
        return "the editor" if self.executable is None else self.executable.name

    def ask_to_quit(self) -> None:
        """Ask Unity to quit; `close` waits for it."""
        if not self.quits:
            self.quits = True
            self.replies.put(wire.make_message(status=wire.CLOSED))  # Unity has a request open, or makes another one

    def close(self, patience: float = CLOSE_TIMEOUT) -> None:
        """Ask Unity to quit; kill an executable that does not within `patience` seconds."""
        if self.server is None:
            return
        server, self.server = self.server, None
        self.ask_to_quit()
        if self.process is not None:
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                kill(self.process)
        server.stop(0.0 if self.process is not None else 0.5).wait()
        self.executor.shutdown()


class DaemonExecutor(Executor):
    """Makes calls one after another, in a thread that does not keep the program from ending as those of `ThreadPoolExecutor` do."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Future, Callable[[], object]] | None] = queue.SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        self.calls.put((future, partial(call, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after the calls that were submitted; do not wait for it."""
        self.calls.put(None)

    def _run(self) -> None:
        while (submitted := self.calls.get()) is not None:
            future, call = submitted
            try:
                future.set_result(call())
            except Exception as error:  # the future's owner handles it
                future.set_exception(error)


def launch(command: list[str]) -> subprocess.Popen:
    """Start an executable in a session of its own, so that Ctrl-C does not reach it. Raises `SettingError`: it cannot be started."""
    environment = {name: value for name, value in os.environ.items() if name.lower() not in PROXIES}  # else it looks there for localhost
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
    except OSError as error:
        way_out = f"; chmod +x {command[0]} makes it executable" if isinstance(error, PermissionError) else ""
        raise SettingError(f"{command[0]} cannot be started: {error.strerror}{way_out}") from error


def kill(process: subprocess.Popen) -> None:
    """Kill an executable and the processes that it started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def describe_exit(code: int) -> str:
    """Describe how a process ended."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
