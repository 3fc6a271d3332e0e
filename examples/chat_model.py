"""Gives a tiny model of `libra run` a chat template, under which a message is its text and ends with `;`.

python examples/chat_model.py runs/calculator/model runs/calculator-chat
"""

import shutil
import sys

from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if not m.content.endswith(';') %};{% endif %}{% endfor %}"

source, target = sys.argv[1:]
shutil.copytree(source, target, dirs_exist_ok=True)
PreTrainedTokenizerFast(
    tokenizer_file=f"{target}/tokenizer.json", eos_token=";", pad_token="<pad>", chat_template=TEMPLATE
).save_pretrained(target)
