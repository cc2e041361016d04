"""Dequantise a GGUF file once into a Hugging Face folder.

Invariants
* The folder is self-contained: float32 safetensors, config, generation config, tokenizer and chat template,
  with no trace of the quantisation. Tied embeddings stay tied.
* A file that is not whole, or whose content transformers cannot convert, raises one `ModelError`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import ModelError
from headrace.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAGIC = b"GGUF"


def check_magic(file: Path) -> None:
    """Raise a `ModelError` unless `file` can be read and starts as a GGUF file does."""
    try:
        with file.open("rb") as stream:
            head = stream.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    if head != MAGIC:
        raise ModelError(
            f"{file}: not a GGUF file (it does not start with GGUF); give a GGUF file or a folder"
        )


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the dequantised model of `file` into the existing folder `folder`.

    Raises:
        ModelError: not a GGUF file, damaged, or of an architecture that transformers cannot read from GGUF.
        OSError: `folder` cannot be written.
    """
    reader = _open(file)
    with quiet_transformers():
        try:
            model = _dequantise(file)
            tokenizer = _tokenizer(file, reader, model.config.vocab_size)
        # Damage and unknown content surface as whatever the parser that meets them raises.
        except Exception as error:
            raise ModelError(
                f"{file}: this GGUF file cannot be converted ({_one_line(error)}); it is damaged, or "
                "transformers does not read its architecture from GGUF"
            ) from error
        if len(tokenizer) > model.config.vocab_size:
            raise ModelError(
                f"{file}: this GGUF file is damaged: its tokenizer has {len(tokenizer)} tokens and its model "
                f"only {model.config.vocab_size}"
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _open(file: Path) -> GGUFReader:
    """The file's metadata, after a check that all of its fields and tensors lie within it."""
    check_magic(file)

    from gguf import GGUFReader, GGUFValueType

    class StrictReader(GGUFReader):
        """Refuses an array longer than the file, at which the plain reader goes on without end."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY and int(self._get(orig_offs + 4, np.uint64)[0]) > len(
                self.data
            ):
                raise ValueError("an array is longer than the file")
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        reader = StrictReader(file)
    # Damage surfaces as whatever the parser that meets it raises.
    except Exception as error:
        raise ModelError(
            f"{file}: this GGUF file is damaged or cut short ({_one_line(error)}); fetch it again"
        ) from error
    if not reader.tensors:
        raise ModelError(f"{file}: this GGUF file holds no weights (perhaps only a vocabulary)")
    return reader


def _dequantise(file: Path) -> PreTrainedModel:
    """The model in float32, rebuilt without the marks of quantisation, which forbid saving it."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any
    loaded, info = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are missing, first {missing[0]}")
    settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    config = type(loaded.config).from_dict(settings)
    config.dtype = torch.float32
    with torch.device("meta"):
        model: PreTrainedModel = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    return model


def _tokenizer(file: Path, reader: GGUFReader, vocab_size: int) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rule = reader.get_field("tokenizer.ggml.pre")
    if rule is not None and rule.contents() == "smollm":
        # transformers reads SmolLM's splitting rule as GPT-2's. In SmolLM's, digits are split off before
        # GPT-2's pattern applies; it matters where several spaces or line ends precede a digit.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if len(tokenizer) <= vocab_size:
        return tokenizer
    # transformers adds GPT-2's end-of-text token to vocabularies that lack it; it would have no embedding.
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["id"] < vocab_size]
    kept = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)),
        chat_template=tokenizer.chat_template,
        **{name: text for name, text in kept.items() if tokenizer.convert_tokens_to_ids(text) < vocab_size},
    )


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
