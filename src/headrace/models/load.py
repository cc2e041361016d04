"""From a local folder to a model and its tokenizer in memory.

Invariants
* Every weight comes from the folder: a checkpoint with missing weights is refused, never completed at random.
* Only causal language models whose layers all attend, through transformers' attention interface, are loaded;
  every other architecture is refused by name, before its weights are read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError
from headrace.models.folder import check_folder, first_line
from headrace.models.quiet import quiet_transformers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes a model can be loaded in."""

DEFAULT_CONTEXT_LENGTH = 2048
"""For the rare architecture that states no limit on positions."""

_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_OTHER_TASKS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in evaluation mode, with what it takes to use it.

    `config` is the language model's own part of the configuration. `eos_token_ids` are sorted and may be
    empty. `context_length` is the most positions the model was made for.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: Path
    config: PreTrainedConfig
    eos_token_ids: tuple[int, ...]
    context_length: int
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    """Number of logits, at least the number of the tokenizer's tokens."""


def load_model(
    path: str | Path, dtype: str = "float32", device: str = "cpu", attn_implementation: str = "sdpa"
) -> LoadedModel:
    """Load the folder `path` (see `resolve`).

    Args:
        dtype: one of `DTYPES`.
        device: "cpu", "cuda" or "mps", as torch writes devices.
        attn_implementation: a name in transformers' attention interface.

    Raises:
        ModelError: the folder, architecture, dtype or device cannot be used.
    """
    import torch

    path = Path(path)
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    check_folder(path)
    config = read_config(path)
    refuse_unsupported(config, path)
    torch_device = _device(device, dtype)
    tokenizer = load_tokenizer(path)
    module = _load_module(path, config, getattr(torch, dtype), attn_implementation)
    vocab_size = module.get_output_embeddings().weight.shape[0]
    if len(tokenizer) > vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens and the model {vocab_size}; "
            "they do not belong together"
        )
    text_config = module.config.get_text_config(decoder=True)
    return LoadedModel(
        module=module.to(torch_device),
        tokenizer=tokenizer,
        path=path,
        config=text_config,
        eos_token_ids=_eos_token_ids(module, tokenizer, text_config),
        context_length=context_length(text_config),
        dtype=getattr(torch, dtype),
        device=torch_device,
        vocab_size=vocab_size,
    )


def read_config(path: Path) -> PreTrainedConfig:
    """The folder's configuration.

    Raises:
        ModelError: it is unreadable, or of a model type that this version of transformers does not know.
    """
    from transformers import AutoConfig

    with quiet_transformers():
        try:
            return AutoConfig.from_pretrained(path, local_files_only=True)
        # A config is validated by its own class, which may raise anything.
        except Exception as error:
            raise ModelError(f"{path}: its config.json cannot be used: {first_line(error)}") from error


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer, or one `ModelError` line."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        # A damaged tokenizer file surfaces as whatever its parser raises, a bare Exception among them.
        except Exception as error:
            raise ModelError(f"{path}: its tokenizer cannot be loaded: {first_line(error)}") from error
    # The engine checks a prompt's length against its context; the tokenizer would only add a warning of its own.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def refuse_unsupported(config: PreTrainedConfig, path: Path) -> None:
    """Raise a `ModelError` that names the architecture unless headrace can run it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise ModelError(
            f"{path}: {kind} is an encoder-decoder; headrace trains decoder-only language models"
        )
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise ModelError(
            f"{path}: its weights are quantised, which cannot be trained; take the unquantised model"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(f"{path}: {kind} is not a causal language model in transformers")
    architectures = config.architectures or [model_class.__name__]
    if all(name.endswith(_OTHER_TASKS) for name in architectures):
        raise ModelError(f"{path}: holds a {architectures[0]}, which is not a causal language model")
    if model_class._is_stateful:
        raise ModelError(
            f"{path}: {kind} keeps a recurrent state (state space or linear attention); not supported"
        )
    if odd := unsupported_layers(text):
        raise ModelError(
            f"{path}: {kind} has layers of type {', '.join(odd)}; headrace runs models whose layers are all "
            "full or sliding-window attention, or the sparse attention of DeepSeek-V3.2 and GLM-5"
        )
    if not model_class._supports_attention_backend:
        raise ModelError(f"{path}: {kind} does not use transformers' attention interface; not supported")


def unsupported_layers(config: PreTrainedConfig) -> list[str]:
    """The types of layers in which headrace cannot keep the tokens of different sequences apart."""
    from headrace.models.indexer import ROTATIONS

    known = _LAYER_TYPES | ({"indexed_attention"} if config.model_type in ROTATIONS else set())
    return sorted(set(getattr(config, "layer_types", None) or ()) - known)


def context_length(config: PreTrainedConfig) -> int:
    """The most positions the architecture states, or those it was first trained on where more would not do.

    Dynamic and long RoPE rescale every position once any sequence of a batch passes the original length. A token
    would then depend on what shares its batch, so such models are used up to that length.
    """
    positions = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT_LENGTH)
    parameters = getattr(config, "rope_parameters", None) or {}
    # Per layer type where the architecture has several, plain otherwise.
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            positions = min(positions, int(original or positions))
    return positions


def kv_bytes_per_token(config: PreTrainedConfig, dtype: str) -> int:
    """Bytes of keys and values that one token keeps over all layers: 2·layers·KV heads·head size·bytes.

    Multi-head latent attention is counted as the attention interface receives it: expanded, with keys and
    values of unequal size. Each layer with an indexer keeps one key more.
    """
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    if getattr(text, "v_head_dim", None) and getattr(text, "qk_nope_head_dim", None):
        widths = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    else:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        widths = 2 * (getattr(text, "num_key_value_heads", None) or heads) * head_dim
    indexed = (getattr(text, "layer_types", None) or []).count("indexed_attention")
    # Some of them may share the selection of an earlier layer.
    indexers = getattr(text, "indexer_types", None)
    index_widths = (indexed if indexers is None else indexers.count("full")) * getattr(
        text, "index_head_dim", 0
    )
    return (text.num_hidden_layers * widths + index_widths) * DTYPES[dtype]


def _load_module(
    path: Path, config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    # Importing this registers headrace's attention with transformers, too.
    from headrace.models.indexer import use_indexers

    with quiet_transformers():
        try:
            module, info = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            if "size mismatch" in str(error) or "mismatched" in str(error):
                raise ModelError(
                    f"{path}: its weights have other shapes than its config.json says; fetch or save the model again"
                ) from error
            raise ModelError(f"{path}: cannot be loaded: {first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{path}: {len(missing)} of {type(module).__name__}'s weights are missing, first {missing[0]}; "
            "fetch or save the model again"
        )
    use_indexers(module)
    return module


def _device(device: str, dtype: str) -> torch.device:
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ModelError(f"{device!r} is no device; use cpu, cuda or mps") from None
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            'no CUDA device can be used here; set device = "cpu", or install a CUDA build of PyTorch'
        )
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"{device}: there are only {torch.cuda.device_count()} CUDA devices")
    if wanted.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError('no Apple GPU can be used here; set device = "cpu"')
    if wanted.type == "mps" and dtype == "float64":
        raise ModelError("Apple GPUs have no float64; use float32")
    return wanted


def _eos_token_ids(
    module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> tuple[int, ...]:
    """Union of what the generation config, the tokenizer and the config call an end of sequence."""
    found: set[int] = set()
    for ids in (
        getattr(module.generation_config, "eos_token_id", None),
        tokenizer.eos_token_id,
        getattr(config, "eos_token_id", None),
    ):
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))
