"""`tiny-random`: a seeded Llama of 145,000 parameters with a byte tokenizer, for tests without a download.

Invariants
* The same bytes every time: the folder depends on this file and the libraries' versions only.
* Token id b is byte b; the special tokens follow, so any text round-trips exactly.
* Greedy decoding has no ties: logits have a standard deviation of about 1.6, neither flat nor one-hot.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)
CONTEXT_LENGTH = 1024
FORMAT = 1
"""Part of the cached folder's name: raised when this file changes what it writes."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SEED = 20240917
_LOGIT_STD = 1.6


def build_tiny_random(path: Path) -> None:
    """Write the model, its tokenizer and its chat template into the existing folder `path`."""
    with quiet_transformers():
        _model().save_pretrained(path)
        _tokenizer().save_pretrained(path)


def _model() -> LlamaForCausalLM:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids = {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
    config = LlamaConfig(
        vocab_size=256 + len(SPECIAL_TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        pad_token_id=ids[PAD],
        bos_token_id=ids[START],
        eos_token_id=ids[END],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if (
                weight.dim() == 1
            ):  # a norm's scale: 1, but not exactly, so that a test sees it when it is lost
                std = 0.1
            elif name == "lm_head.weight":  # its input is normalised: each of its elements is about 1
                std = _LOGIT_STD / weight.shape[1] ** 0.5
            elif name == "model.embed_tokens.weight":
                std = 1.0
            else:
                std = weight.shape[1] ** -0.5
            mean = 1.0 if weight.dim() == 1 else 0.0
            weight.normal_(mean, std, generator=generator)
    model.generation_config = GenerationConfig(
        pad_token_id=ids[PAD], bos_token_id=ids[START], eos_token_id=ids[END]
    )
    return model


def _tokenizer() -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE (GPT-2) writes for each of the 256 bytes, in byte order."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + unprintable.index(byte)) for byte in range(256)]
