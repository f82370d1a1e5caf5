"""One commit on the Hugging Face Hub, by `huggingface_hub`; its errors in words."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from titan_hub.card import is_ours
from titan_hub.files import CARD, File
from titancli.errors import EnvironmentProblem, TitanError, UsageError

EXIT_UNREACHABLE = 69
"""The Hub cannot be reached. (`EX_UNAVAILABLE` of sysexits.h.)"""
ANSWER, COMMIT = 20.0, 600.0
"""Seconds for which the Hub may be silent, asked who somebody is, and asked to take files."""
LOGIN = "log in with a token that may write: hf auth login, or set HF_TOKEN"


class Unreachable(TitanError):
    """The Hub cannot be reached, or nobody may ask it."""

    exit_code = EXIT_UNREACHABLE


@dataclass(frozen=True)
class Target:
    """Where to push."""

    repository: str
    revision: str
    private: bool
    endpoint: str

    @property
    def owner(self) -> str:
        return self.repository.partition("/")[0]

    @property
    def name(self) -> str:
        return self.repository.partition("/")[2]


def target_of(repository: str, revision: str, *, private: bool) -> Target:
    """Return where to push.

    Raises:
        UsageError: the name is not that of a repository, or the revision is a commit.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        said = str(error).partition("\n")[0]
        raise UsageError(f"{repository!r} is not a repository: {said}", hint="write OWNER/NAME") from error
    if "/" not in repository:
        raise UsageError(f"{repository!r} names no owner", hint=f"write OWNER/{repository}")
    if re.fullmatch(r"[0-9a-f]{40}", revision) or not revision.strip():
        raise UsageError(f"--revision {revision!r} is not a branch", hint="give the name of a branch")
    return Target(repository, revision, private, constants.ENDPOINT)


def account(target: Target) -> None:
    """Check that the token may write into the namespace of the repository.

    Raises:
        Unreachable: the Hub does not answer.
        EnvironmentProblem: there is no token, it is refused, or it may not write there.
    """
    from huggingface_hub import HfApi, get_token, is_offline_mode

    if is_offline_mode():
        raise Unreachable("HF_HUB_OFFLINE is set: the Hugging Face Hub is not asked")
    if get_token() is None:
        raise EnvironmentProblem(f"there is no token for {target.endpoint}", hint=LOGIN)
    with _in_words(target, "ask who you are"), _patience(ANSWER):
        found = HfApi().whoami()
    role = ((found.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise EnvironmentProblem(f"the token of {found['name']} may only read", hint=LOGIN)
    spaces = [found["name"], *(one["name"] for one in found.get("orgs") or [])]
    if target.owner.lower() not in [name.lower() for name in spaces]:
        raise EnvironmentProblem(
            f"{target.repository} belongs to {target.owner}, and you are {found['name']}",
            hint=f"push to {' or '.join(f'{name}/{target.name}' for name in spaces)}, "
            f"or log in as a member of {target.owner}: hf auth login",
        )


def push(target: Target, files: list[File], message: str, say: Callable[[str], None]) -> str:
    """Push the files as one commit, all or none of them, and return a line for the user. The repository is
    created if there is none. Files on the Hub that are not among them stay.

    Raises:
        TitanError: the Hub refuses or does not answer; another push came first.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # what it says of an empty commit is said below
    with _patience(COMMIT):
        before = _prepared(HfApi(), target)
        files = _without_card_of_others(target, files, before, say)
        adds = [
            CommitOperationAdd(one.name, one.data if isinstance(one.data, bytes) else os.fspath(one.data))
            for one in files
        ]
        with _in_words(target, "push"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            done = HfApi().create_commit(
                target.repository,
                adds,
                commit_message=message,
                revision=target.revision,
                parent_commit=before.sha,
            )
    for one in caught:
        if issubclass(one.category, UserWarning):
            say(" ".join(str(one.message).split()))
    if done.oid == before.sha:
        return f"nothing has changed: {target.endpoint}/{target.repository} has these files already"
    return f"pushed: {done.commit_url}"


def _prepared(api: Any, target: Target) -> Any:
    """Return what the Hub says of the branch; repository and branch are created where there are none."""
    from huggingface_hub.errors import RevisionNotFoundError

    with _in_words(target, "create the repository"):
        api.create_repo(target.repository, private=target.private or None, exist_ok=True)
    with _in_words(target, f"read the branch {target.revision}"):
        try:
            found = api.model_info(target.repository, revision=target.revision)
        except RevisionNotFoundError:
            api.create_branch(target.repository, branch=target.revision, exist_ok=True)
            found = api.model_info(target.repository, revision=target.revision)
    if target.private and found.private is False:
        raise EnvironmentProblem(
            f"{target.repository} is public, and --private was given",
            hint="make it private in its settings, push to another, or leave out --private",
        )
    return found


def _without_card_of_others(
    target: Target, files: list[File], before: Any, say: Callable[[str], None]
) -> list[File]:
    """Return the files, without titan's card if the Hub has one that somebody wrote or changed."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    there = any(one.rfilename == CARD for one in before.siblings or [])
    if not there or not any(one.made for one in files):
        return files
    url = hf_hub_url(target.repository, CARD, revision=before.sha, endpoint=target.endpoint)
    with _in_words(target, f"read its {CARD}"):
        answer = get_session().get(url, headers=build_hf_headers())
        hf_raise_for_status(answer)
        text = answer.content.decode(errors="replace")
    if is_ours(text):
        return files
    say(f"{CARD} on the Hub is somebody's own and stays; titan hub card prints the one that was made")
    return [one for one in files if not one.made]


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Bound how long the Hub may be silent: huggingface_hub would wait forever."""
    from huggingface_hub import get_session

    session = get_session()
    before, session.timeout = session.timeout, seconds
    try:
        yield
    finally:
        session.timeout = before


@contextmanager
def _in_words(target: Target, doing: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into an error with a remedy."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    again = "the same command again pushes what is missing, and nothing twice"
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise Unreachable("HF_HUB_OFFLINE is set: the Hugging Face Hub is not asked") from error
    except LocalTokenNotFoundError as error:
        raise EnvironmentProblem(f"there is no token for {target.endpoint}", hint=LOGIN) from error
    except HfHubHTTPError as error:
        raise _refused(target, doing, error) from error
    except HTTPError as error:  # there was no answer
        where = f"{target.endpoint} cannot be reached to {doing}"
        raise Unreachable(f"{where}: {str(error) or type(error).__name__}", hint=again) from error
    except (RuntimeError, ValueError, OSError) as error:  # of an upload in parts; a card; a file that is gone
        first = " ".join(str(error).split())[:300]
        if isinstance(cause := error.__cause__, HfHubHTTPError):
            raise _refused(target, doing, cause) from error
        if isinstance(cause, HTTPError):
            raise Unreachable(
                f"{target.endpoint} cannot be reached to {doing}: {first}", hint=again
            ) from error
        raise EnvironmentProblem(f"cannot {doing} at {target.repository}: {first}", hint=again) from error


def _refused(target: Target, doing: str, error: Any) -> TitanError:
    """Return the error for a status of the Hub's."""
    status = error.response.status_code
    said = " ".join(str(error.server_message or "").split())[:300]
    what = f"{target.endpoint} refuses to {doing} ({target.repository}, HTTP {status})"
    what += f": {said}" if said else ""
    again = "the same command again pushes what is missing, and nothing twice"
    if status == 401:
        return EnvironmentProblem(f"{what}: the token is not valid", hint=LOGIN)
    if status in (403, 404):
        return EnvironmentProblem(
            what, hint="log in as somebody who may write to it, with a token that may write: hf auth login"
        )
    if status in (409, 412):
        return EnvironmentProblem(
            f"somebody else has pushed to {target.repository} meanwhile; nothing of this push is there",
            hint="look at it, then push again: "
            f"{target.endpoint}/{target.repository}/commits/{target.revision}",
        )
    if status >= 500 or status == 429:
        return Unreachable(what, hint=again)
    return EnvironmentProblem(what, hint=again)
