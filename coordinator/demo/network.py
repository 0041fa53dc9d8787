"""A small recurrent network over bytes, with random weights: the model behind the demo's policy.

The rule it keeps: what it says is a function of the prompt, the tools and the seed alone. Each reply is sampled with a
generator seeded from them, one at a time, so neither the order of calls nor what else runs can change a token or a
log-probability. Nothing here is trained; `grammar` makes whatever it says valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from coordinator.demo.conversation import conversation_digest
from coordinator.demo.grammar import Decoder, Reply

VOCABULARY: Final = 258
BEGIN: Final = 256
ANSWER: Final = 257
_EMBEDDING: Final = 32
_HIDDEN: Final = 64
# Wide enough for the prompt to matter to the end, small enough that no byte is certain.
_SPREAD: Final = 0.25


@dataclass(frozen=True, slots=True)
class Generation:
    """One reply: the tokens that were sampled, each with its log-probability under the network, and what they say."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    reply: Reply


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _EMBEDDING)
        self.recurrent = nn.GRU(_EMBEDDING, _HIDDEN, batch_first=True)
        self.head = nn.Linear(_HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits after the last of `ids`, and the state there."""
        out, after = self.recurrent(self.embedding(ids.unsqueeze(0)), state)
        logits: Tensor = self.head(out[0, -1])
        return logits, after


def prompt_ids(text: str) -> list[int]:
    """The tokens of a prompt: its UTF-8 bytes between two marks."""
    return [BEGIN, *text.encode(), ANSWER]


class Network:
    """The network of one seed. Raises nothing of its own; not safe for several threads at once."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        # One thread: sums are then always formed in the same order, and the servers beside us keep their core.
        torch.set_num_threads(1)
        self._model = _Recurrent().eval()
        # From a generator of our own: torch's global one belongs to whoever imports us.
        chance = torch.Generator()
        chance.manual_seed(seed)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.uniform_(-_SPREAD, _SPREAD, generator=chance)

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], decoder: Decoder, temperature: float = 1.0) -> Generation:
        """Sample one reply to the prompt `ids` within what `decoder` allows."""
        chance = torch.Generator()
        chance.manual_seed(int(conversation_digest(self.seed, ids)[:15], 16))
        logits, state = self._model(torch.tensor(ids), None)
        tokens: list[int] = []
        log_probs: list[float] = []
        while allowed := decoder.allowed():
            choices = torch.tensor(allowed)
            weights = torch.softmax(logits[choices] / temperature, dim=0)
            token = allowed[int(torch.multinomial(weights, 1, generator=chance))]
            tokens.append(token)
            # Like vLLM's: under the network itself, before the grammar took away what may not be said.
            log_probs.append(float(torch.log_softmax(logits, dim=0)[token]))
            decoder.push(token)
            logits, state = self._model(torch.tensor([token]), state)
        return Generation(tuple(tokens), tuple(log_probs), decoder.reply())
