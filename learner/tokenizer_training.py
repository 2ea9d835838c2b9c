"""A small byte-level BPE tokenizer for warm-up checkpoints, built so that a tiny model can copy what it reads.

Three choices serve copying. White space, letters, digits and punctuation never share a token, so an identifier has the
same tokens wherever it stands. Digits are single tokens, so line numbers are spelled. The vocabulary is small, so names
of the held-out split, which no training text contains, look like those of the train split: pieces to copy in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT, END)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>"
    "{% if message['tool_calls'] %}"
    '{"calls":[{% for call in message[\'tool_calls\'] %}{{ \',\' if not loop.first }}{"tool":"{{ call.function.name }}"'
    "{% for key, value in call.function.arguments.items() %}"
    ",\"{{ key }}\":{{ value | tojson(separators=(',', ':')) }}"
    "{% endfor %}}{% endfor %}]}"
    "{% else %}{{ message['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Native tool calls and their results look as those written by hand do: {"calls":[...]}, then a user message."""
# Letter runs, single digits, runs of blanks (with their line break), and other characters are kept apart.
_PIECES = r"[A-Za-z]+|[0-9]|\s+|[^\sA-Za-z0-9]"


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    max_piece_chars: int,
    model_max_length: int,
    merge_punctuation: bool = False,
) -> PreTrainedTokenizerFast:
    """Train on `texts` (no chat markup in them) and wrap for `transformers` with the chat template.

    `max_piece_chars` bounds the length of one token in characters; runs of blanks are bounded alike. With
    `merge_punctuation`, runs of other characters may share a token too.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES + ("+" if merge_punctuation else "")), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=max_piece_chars,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=model_max_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer with its template inside tokenizer_config.json's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))
