"""Keep transformers' progress bars, log lines and warnings out of the way, for the length of a block.

Errors still raise; what was set before the block is set again after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers through its own logging interface."""
    import transformers.modeling_gguf_pytorch_utils as gguf_loading
    from transformers.utils import logging

    verbosity, bars, gguf_bar = logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf_loading.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The one bar that does not ask transformers' logging whether it is wanted.
    gguf_loading.tqdm = logging.tqdm
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf_loading.tqdm = gguf_bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
