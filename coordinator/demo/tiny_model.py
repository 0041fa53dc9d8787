"""A model with random weights and a tokenizer of its own, made on the spot: nothing is downloaded.

    .venv-vllm/bin/python coordinator/demo/tiny_model.py FOLDER

The rule: the same seed makes the same weights, so that two servers of one folder say the same. Eight layers of width 512
are as small as is useful: with less, the API server and not the engine is what a measurement sees.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 512
CONTEXT: Final = 32_768
# Wider than the usual 0.02: with logits that are almost equal, greedy text would hang on rounding.
SPREAD: Final = 0.2
SENTENCES: Final = (
    "A rollout calls a tool, reads what it says, and calls another one.",
    "What was saved while it ran is restored, and goes on where it was.",
    "Counting: 0 1 2 3 4 5 6 7 8 9, and again from the start.",
    "Marks: ( ) [ ] { } < > : ; , . ! ? + - * / = _ # @ % &",
)
TEMPLATE: Final = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer, trained on a few sentences."""
    tokenizers: Any = importlib.import_module("tokenizers")
    byte_level: Any = tokenizers.pre_tokenizers.ByteLevel
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    fast: Any = importlib.import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=CONTEXT
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def make_model(folder: Path, layers: int, width: int, seed: int) -> None:
    """Weights of a small Llama."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(seed)
    heads = max(2, width // 64)
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=CONTEXT,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=False,
            initializer_range=SPREAD,
        )
    )
    model.to(torch.float32).save_pretrained(folder, safe_serialization=True)


def main() -> int:
    """The exit code."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(args.folder)
    make_model(args.folder, args.layers, args.width, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
