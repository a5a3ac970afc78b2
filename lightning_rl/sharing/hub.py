"""The hub: addresses `hf://USER/NAME[@REVISION]`, downloads into its cache, uploads, and its errors in one line each.

`huggingface_hub` handles tokens, the cache, the endpoint and proxies (`hf auth login`, HF_TOKEN, HF_HOME, HF_ENDPOINT).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any, NamedTuple

from lightning_rl.errors import SettingError, causes_of, missing_extra
from lightning_rl.sharing.agent import DESCRIPTION, MAX_BYTES, WEIGHTS, ZOO, agent_of, packaged_agent

PREFIX = "hf://"
CONFIG = "config.yaml"
STATISTICS = ("vec_normalize.pkl", "vecnormalize.pkl")
"""File names of observation statistics that Stable-Baselines3's tools write."""
NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@\s]+))?", re.ASCII)


MAX_LARGE, MAX_SECONDS = 1 << 31, 600.0
"""Maximum size in bytes of a file of weights, and maximum seconds of a download; descriptions and lists may have `MAX_BYTES`."""
IDS = {"sha", "oid", "sha256", "blobId", "xetHash"}
"""Entries of the hub's answers that are ids of commits and files."""


class Address(NamedTuple):
    """A repository of the hub, and a branch, tag or commit of it; None stands for its main branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def is_address(path: object) -> bool:
    """Return whether a path is an address of the hub or of an agent that comes with this package."""
    return str(path).startswith((PREFIX, "hf:/", ZOO))  # `Path` keeps one slash


def is_agent(path: str | Path) -> bool:
    """Return whether a path is the path of an agent's weights."""
    return Path(path).name == WEIGHTS


def is_zip(path: str | Path) -> bool:
    """Return whether a path is the path of an agent of Stable-Baselines3."""
    return Path(path).suffix == ".zip"


def read_address(text: str | Path) -> Address:
    """Read `hf://USER/NAME[@REVISION]`. Raises `SettingError`: it has another form."""
    match = NAME.fullmatch(re.sub("^hf:/+", "", str(text)))
    if match is None:
        raise SettingError(f"{shorten(str(text), 80)!r} is not an address of the hub: write hf://USER/NAME[@REVISION]")
    return Address(match["repo"], match["revision"])


def check_repo(repo: str) -> str:
    """Return the name of a repository. Raises `SettingError`: it is not `USER/NAME`."""
    if not NAME.fullmatch(repo) or "@" in repo:
        raise SettingError(f"repo {repo!r} must be USER/NAME, such as my-name/ppo-CartPole-v1")
    return repo


def download(text: str | Path) -> Path:
    """Download an agent into the hub's cache, and return its file: our weights, or a zip of Stable-Baselines3.

    If the hub cannot be reached, the cache is used. Agents of `zoo:` come with this package.

    Raises:
        SettingError: no such agent, repository or revision, no network, no token, or no agent in the repository.
    """
    if str(text).startswith(ZOO):
        return packaged_agent(text)
    address = read_address(text)
    hub = load_hub("an agent of the hub")
    with hub_errors(address), checked_answers(hub, address):
        folder = Path(hub.snapshot_download(address.repo, revision=address.revision, allow_patterns=[DESCRIPTION, WEIGHTS, CONFIG]))
        agent = agent_of(folder)
        if agent is not None:
            return agent
        name = choose_zip([path.name for path in folder.glob("*.zip")] or _list_files(hub, address, folder.name), address)
        wanted = [name, *STATISTICS]
        return Path(hub.snapshot_download(address.repo, revision=address.revision, allow_patterns=wanted)) / name


def _list_files(hub: ModuleType, address: Address, commit: str) -> list[str]:
    return hub.HfApi().list_repo_files(address.repo, revision=commit)


def choose_zip(files: Sequence[str], address: Address) -> str:
    """Return the file that contains an agent of Stable-Baselines3. Raises `SettingError`: there is none, or it is ambiguous."""
    zips = [name for name in files if name.endswith(".zip") and "/" not in name and name != "train_eval_metrics.zip"]
    default = f"{address.repo.partition('/')[2]}.zip"
    if default in zips:
        return default
    if not zips:
        raise SettingError(f"{address} holds no agent: neither {DESCRIPTION} of lightning_rl nor a .zip of Stable-Baselines3")
    if len(zips) > 1:
        raise SettingError(f"{address} holds several: {', '.join(sorted(zips))}; download one and name the file")
    return zips[0]


def load_hub(needed_by: str) -> ModuleType:
    """Import the package `huggingface_hub`; raise `SettingError` if it is not installed."""
    try:
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise missing_extra("huggingface_hub", "hub", needed_by) from error
    return huggingface_hub


@contextmanager
def checked_answers(hub: ModuleType, address: Address) -> Iterator[None]:
    """Limit the size and time of answers, and refuse ids that would name files outside of the cache: a mirror may not be honest."""
    import httpx2  # the client of huggingface_hub

    before = hub.get_session().event_hooks
    until = time.monotonic() + MAX_SECONDS

    class LimitedBody(httpx2.SyncByteStream):
        def __init__(self, body: Any, most: int) -> None:
            self.body, self.most = body, most

        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for part in self.body:
                size += len(part)
                if size > self.most:
                    raise SettingError(f"{address}: the hub sends more than {self.most:,} bytes as one file, which no agent needs")
                if time.monotonic() > until:
                    raise SettingError(f"{address}: the hub took longer than {MAX_SECONDS:g} s; download the files in another way")
                yield part

        def close(self) -> None:
            self.body.close()

    def check(answer: Any) -> None:
        is_json = "json" in answer.headers.get("Content-Type", "")
        is_small = is_json or answer.request.url.path.endswith((DESCRIPTION, CONFIG))
        answer.stream = LimitedBody(answer.stream, MAX_BYTES if is_small else MAX_LARGE)
        ids = [answer.headers.get("X-Repo-Commit"), None if is_json else answer.headers.get("X-Linked-ETag") or answer.headers.get("ETag")]
        if is_json and answer.request.method == "GET" and answer.is_success and "/resolve/" not in answer.request.url.path:
            answer.read()
            ids += ids_in(answer.json())
        if (wrong := next((user for user in ids if user is not None and not is_id(user)), None)) is not None:
            raise SettingError(f"{address}: the hub sends an id that is none, {shorten(repr(wrong), 60)}; nothing was downloaded")

    def make_client(on_answer: list[Any]) -> Any:  # the client makes a new one after an error
        return httpx2.Client(event_hooks={**before, "response": on_answer}, follow_redirects=True, timeout=None)

    hub.set_client_factory(partial(make_client, [check]))
    try:
        yield
    finally:
        hub.set_client_factory(partial(make_client, before["response"]))


def is_id(value: object) -> bool:
    """Return whether a value is the id of a commit or file, by which the client names files in its cache."""
    return isinstance(value, str) and not re.search(r"[/\\\0]|\.\.", value)


def ids_in(tree: object) -> Iterator[object]:
    """Yield all ids in an answer of the hub."""
    if isinstance(tree, dict):
        yield from (tree[key] for key in IDS & tree.keys())
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from ids_in(child)


@contextmanager
def hub_errors(address: Address, needs: str = "read") -> Iterator[None]:
    """Turn errors of the hub's client into one line, and silence its progress bars and warnings; `needs`: what its token must permit."""
    hub = load_hub("the hub")
    errors, utils = hub.errors, hub.utils
    were_shown, verbosity = not utils.are_progress_bars_disabled(), utils.logging.get_verbosity()
    try:
        if were_shown:
            utils.disable_progress_bars()
        utils.logging.set_verbosity_error()
        yield
    except SettingError:
        raise
    except errors.LocalTokenNotFoundError as error:
        raise SettingError(f"{address} needs a token of the hub, and there is none: run `hf auth login`, or set HF_TOKEN") from error
    except errors.GatedRepoError as error:
        raise SettingError(f"{address} is gated: ask for access on its page, and log in by `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise SettingError(
            f"there is no {address} on the hub, or it is private and your token (`hf auth login`) may not read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SettingError(f"{address}: the repository has no revision {address.revision}; name a branch, a tag or a commit") from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        answer = next((cause for cause in causes_of(error) if isinstance(cause, errors.HfHubHTTPError)), None)
        if answer is not None:  # the client reports an answer that is an error as a missing file of its cache
            status = answer.response.status_code
            way_out = f"; log in by `hf auth login` with a token that may {needs}" if status in (401, 403) else ""
            reason = shorten(str(answer.server_message or answer).strip() or "no reason given", 60, placeholder=" …")
            raise SettingError(f"{address}: the hub answers {status} ({reason}){way_out}") from error
        raise SettingError(f"{address} is not in the cache, and the hub cannot be reached: is there a network?") from error
    except errors.HFValidationError as error:
        raise SettingError(f"{address}: {error}") from error
    except Exception as error:  # the client takes any answer for one of the hub: KeyError, TypeError, AssertionError, …
        reason = shorten(f"{type(error).__name__}: {error}", 90, placeholder=" …")
        raise SettingError(f"{address}: the hub cannot be used ({reason})") from error
    finally:
        utils.logging.set_verbosity(verbosity)
        if were_shown:
            utils.enable_progress_bars()


def prepare_repo(repo: str, private: bool) -> None:
    """Check that the user is logged in, and that an existing repository holds an agent and is private if it must be.

    Raises:
        SettingError: no token, no network, a repository that holds something else, or one that is public and must be private.
    """
    hub, address = load_hub("push"), Address(check_repo(repo), None)
    with hub_errors(address, "write"):
        api = hub.HfApi()
        api.whoami()
        if not api.repo_exists(repo):
            return
        if private and not api.repo_info(repo).private:
            raise SettingError(f"{address} exists and is public: make it private on its page, or name another --repo")
        others = set(api.list_repo_files(repo)) - {".gitattributes"}
        if others and DESCRIPTION not in others:
            raise SettingError(f"{address} holds something else ({shorten(', '.join(sorted(others)), 60)}): name another --repo")


def upload(repo: str, folder: Path, private: bool, replaced: Sequence[str]) -> str:
    """Upload a folder in one commit, and delete files in `replaced` that the folder does not have. Returns the address of the commit.

    Raises `SettingError`: see `hub_errors`.
    """
    hub, address = load_hub("push"), Address(repo, None)
    with hub_errors(address, "write"):
        api = hub.HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Share an agent of lightning_rl", delete_patterns=list(replaced)
        )
    return str(Address(repo, commit.oid))
