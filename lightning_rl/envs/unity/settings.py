"""Settings of Unity's players, and how an executable is found and started."""

import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from lightning_rl.envs.unity.channels import make_engine_settings
from lightning_rl.errors import SettingError, nearest
from lightning_rl.settings.fields import Range, read_fields

EDITOR = "unity"
PREFIX = "unity:"
EDITOR_PORT = 5004
SUFFIXES = {"linux": ("", ".x86_64", ".x86"), "darwin": ("", ".app"), "win32": ("", ".exe")}
"""What follows the name of an executable, by platform."""
BUILDS = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes if suffix)
CRASH_HANDLER = "UnityCrashHandler"
DEFAULT_RESTARTS = 10


@dataclass(frozen=True)
class UnitySettings:
    """The `env.kwargs` of a Unity scene.

    Args:
        behavior: name of the behavior that learns, if the scene has several; agents of others do nothing.
        port: of the first player, the next ones count up; default: 5004 for the editor, free ports for executables.
        timeout_wait: seconds to wait for a message.
        seats: rows for the agents of each behavior and team in a player, and with POCA for those of each group; default: the number of
            agents that ask first.
        no_graphics: start executables without graphics.
        env_args: further arguments of executables.
        num_areas: copies of the training area, for scenes with Unity's Training Area Replicator.
        time_scale: speed of the scene's time.
        width, height, quality_level, target_frame_rate, capture_frame_rate: of the engine.
        log_folder: folder of the players' logs; default: `unity` in the folder of the run, or a temporary one.
        package_version: version of mlagents that Unity is told.
    """

    behavior: str | None = None
    port: Annotated[int, Range(1, 65_535)] | None = None
    timeout_wait: Annotated[float, Range(0, open_low=True)] = 60.0
    seats: Annotated[int, Range(1)] | None = None
    no_graphics: bool = False
    env_args: list[str] = field(default_factory=list)
    num_areas: Annotated[int, Range(1)] = 1
    time_scale: Annotated[float, Range(0, open_low=True)] = 20.0
    width: Annotated[int, Range(1)] = 84
    height: Annotated[int, Range(1)] = 84
    quality_level: Annotated[int, Range(0)] = 5
    target_frame_rate: Annotated[int, Range(-1)] = -1
    capture_frame_rate: Annotated[int, Range(0)] = 60
    log_folder: str | None = None
    package_version: str = "1.1.0"

    def __post_init__(self) -> None:
        read_fields(self, "env.kwargs.")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.type in (str, str | None) and not isinstance(value, setting.type):  # type: ignore[arg-type]
                raise SettingError(f"env.kwargs.{setting.name} must be text, got {value!r}")
        if not isinstance(self.env_args, list | tuple):
            raise SettingError(f"env.kwargs.env_args must be a list of arguments, got {self.env_args!r}")

    def make_engine_settings(self) -> bytes:
        """Return the messages that set the engine."""
        names = ("quality_level", "time_scale", "target_frame_rate", "capture_frame_rate")
        return make_engine_settings(self.width, self.height, **{name: getattr(self, name) for name in names})

    def make_command(self, executable: Path, port: int, log: Path) -> list[str]:
        """Return the command that starts a player."""
        graphics = ["-nographics", "-batchmode"] if self.no_graphics else []
        own = list(map(str, self.env_args))
        logs = [] if "-logFile" in own else ["-logFile", str(log)]
        return [str(executable), *graphics, "--mlagents-port", str(port), *logs, *own]


def find_executable(env_id: str, platform: str = sys.platform) -> Path | None:
    """Return the executable of `unity:PATH`, whose suffix may be left out; None for the editor. Raises `SettingError`: there is none."""
    if env_id == EDITOR:
        return None
    path = Path(env_id.removeprefix(PREFIX)).absolute()
    for suffix in SUFFIXES.get(platform, ("",)):
        found = path.parent / (path.name + suffix)
        if found.suffix == ".app" and found.is_dir():
            return found / "Contents" / "MacOS" / found.stem
        if found.is_file():
            return found
    programs = [program for program in path.glob("*.exe") if not program.name.startswith(CRASH_HANDLER)] if platform == "win32" else []
    if len(programs) == 1:
        return programs[0]
    given, suffixes = Path(env_id.removeprefix(PREFIX)), SUFFIXES.get(platform, ())
    if not path.parent.is_dir():
        raise SettingError(f"env.id {env_id}: there is no folder {given.parent}")
    folder, what = (given, "this is a folder; name its executable") if path.is_dir() else (given.parent, "there is no executable")
    files = [file for file in (path if path.is_dir() else path.parent).glob("*") if file.is_file() or platform != "linux"]
    names = {file.name.removesuffix(file.suffix if file.suffix in suffixes else "") for file in files}  # elsewhere a build may be a folder
    raise SettingError(f"env.id {env_id}: {what}{nearest(str(given), {str(folder / name) for name in names})}")


def check_no_build(setting: str, env_id: str) -> None:
    """Raise `SettingError` if an environment's id is the path of a build of a scene, whose prefix was forgotten."""
    is_build = env_id.endswith(BUILDS)
    if not is_build and "/" in env_id and ":" not in env_id:
        with suppress(SettingError):
            is_build = find_executable(env_id) is not None
    if is_build:
        raise SettingError(f"{setting} {env_id} looks like a build of a scene of Unity: use unity:{env_id}")
