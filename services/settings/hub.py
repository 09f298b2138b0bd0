"""Find models of the Hugging Face Hub in its cache, and download them into it.

The cache, the token and the environment variables (`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`,
`HF_ENDPOINT`) are those of `huggingface_hub`, so that what another program has downloaded is there.
Only `csps serve` downloads: no rank, and no server that Ray starts, waits for a network.
"""

from __future__ import annotations

import re
from pathlib import Path

from csps.protocols.core.errors import ConfigError, FaultError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
WANTED = ("*.json", "*.safetensors", "*.jinja")
"""Files of a model that a rank or the router reads."""
UNWANTED = ("original/*", "consolidated*", "onnx/*", "openvino/*", "metal/*", "*.gguf")
"""Second copies of the weights in other formats."""


def is_hub_id(name: str) -> bool:
    """Return True if a name can be that of a model on the Hub, such as `Qwen/Qwen3-8B`."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).expanduser().is_dir()


def cached_model(
    name: str, *, revision: str | None = None, cache_dir: str | None = None
) -> Path | None:
    """Return the folder of a downloaded model; None if it is not in the cache, or not all of it."""
    if not is_hub_id(name):
        return None
    # Imported here: it takes a quarter of a second, and most models are folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=True,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
        )
    except LocalEntryNotFoundError:
        return None
    return Path(folder)


def download_model(name: str, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Download a model, with a progress bar, unless the cache has it; return its folder.

    Raises:
        ConfigError: there is no such model, or it is not for this user.
        FaultError: the Hub cannot be reached, and the cache does not have all of the model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=list(WANTED),
                ignore_patterns=list(UNWANTED),
            )
        )
    except GatedRepoError:
        raise ConfigError(
            f"model: {name} is only for those who accept its terms, at "
            f"https://huggingface.co/{name}; then run `hf auth login`, or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"model: {name} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"model: there is neither a directory {name!r} nor a model of this name on the Hugging "
            "Face Hub; for a private one run `hf auth login`, or set HF_TOKEN"
        ) from None
    except LocalEntryNotFoundError as error:
        cause = error.__cause__ or error
        raise FaultError(_unreachable(name, revision, cache_dir, cause)) from None
    except Exception as error:
        # The library names no base for what a proxy, a full disk or a broken connection raise.
        raise FaultError(_unreachable(name, revision, cache_dir, error)) from None


def _unreachable(
    name: str, revision: str | None, cache_dir: str | None, error: BaseException
) -> str:
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"model: {name} is not in the cache ({cache_dir or cache_folder()}), and could not be "
        f"downloaded ({why}); {download_hint(name, revision)}"
    )


def download_hint(name: str, revision: str | None = None) -> str:
    """Return what to do about a model that is not here."""
    at = f" --revision {revision}" if revision else ""
    return (
        f"run `hf download {name}{at}` where there is a connection, copy the folder, and pass it "
        "as the model"
    )


def cache_folder() -> str:
    """Return the folder of the cache."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
