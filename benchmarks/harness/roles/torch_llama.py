"""Tokens of a random Llama of transformers, whose layers are split between the ranks.

    python -m harness.roles.torch_llama FOLDER WIDTH LAYERS

writes such a model to FOLDER.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

from harness.role import Call, Prepared, RankSetup
from harness.roles import torch_nothing  # noqa: F401  (registers this backend)
from harness.roles.torch_process import Rank, facts

PROMPT = 512  # tokens
DECODED = 64  # tokens after the prompt; then decoding starts again at the prompt
COMPARED = 64  # logits
VOCABULARY = 8192  # with Llama's vocabulary, a few layers would compute mostly logits


def save(folder: str, width: int, layers: int) -> None:
    """Write a random model with the proportions of Llama 3 to ``folder``."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


class Llama(Rank):
    """``threads`` is an option: the number of threads of each rank."""

    def __init__(self, setup: RankSetup) -> None:
        super().__init__(setup)
        torch.set_num_threads(setup.options["threads"])
        transformers.utils.logging.disable_progress_bar()
        self._loaded: Any = None
        self._first: dict[int, Any] = {}  # results of the prompts, by batch

    def facts(self) -> dict[str, str]:
        return facts() | {"transformers": transformers.__version__}

    def _model(self, folder: str, dtype: str) -> Any:
        """Return the model in ``folder``. Free another model before."""
        if self._loaded is None or self._loaded.name_or_path != folder:
            self._loaded, self._first = None, {}
            split = DistributedConfig(tp_size=self.size, tp_plan="auto") if self.size > 1 else None
            load = transformers.AutoModelForCausalLM.from_pretrained
            self._loaded = load(folder, dtype=dtype, distributed_config=split)
        return self._loaded

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        """Return the call, which computes the prompt or one token, and reports some logits."""
        model, batch = self._model(task["model"], task["dtype"]), task["batch"]
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(VOCABULARY, (batch, PROMPT), generator=generator)

        def read_prompt() -> Any:
            return model(prompt, use_cache=True, logits_to_keep=1)

        with torch.inference_mode():
            first = self._first[batch] = self._first.get(batch) or read_prompt()
            _rewind(first.past_key_values)
            logits = model(prompt[:, :1], cache=first.past_key_values).logits
        calls = {"prefill": read_prompt, "decode": _decoding(model, prompt, first)}
        call = torch.inference_mode()(calls[task["phase"]])
        return Prepared(call, logits[-1, -1, :COMPARED].tolist())


def _rewind(cache: Any) -> None:
    """Remove the tokens after the prompt."""
    if more := cache.get_seq_length() - PROMPT:
        cache.crop(-more)


def _decoding(model: Any, prompt: Any, first: Any) -> Call:
    """Return a call that appends one token of each sequence to the cache."""
    cache, token = first.past_key_values, first.logits[:, -1:].argmax(-1)

    def decode() -> None:
        nonlocal token
        if cache.get_seq_length() >= PROMPT + DECODED:
            _rewind(cache)
        token = model(token, cache=cache).logits[:, -1:].argmax(-1)

    return decode


def join(setup: RankSetup) -> Llama:
    """Connect to the other ranks, if there are any."""
    return Llama(setup)


if __name__ == "__main__":
    save(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
