"""Our tokenizer in transformers and TRL: the results are those of their own tokenizer."""

from pathlib import Path

import pytest

from ligermodels.text import Tokenizer
from tests.text import families
from tests.text.families import TALK, TOLD


def test_training_templates_of_trl(folder_of):
    """Those with {% generation %} give the same ids and mask; ours refuses what theirs refuses."""
    trl = pytest.importorskip("trl")
    folder = folder_of("qwen 2.5")
    ours, theirs = Tokenizer.from_folder(folder), families.theirs("qwen 2.5", folder)
    paths = sorted((Path(trl.__file__).parent / "chat_templates").glob("*_training.jinja"))
    assert len(paths) > 10
    agreed = 0
    for path in paths:
        options = {"chat_template": path.read_text(), "return_dict": True, "return_assistant_tokens_mask": True}
        for chat in (TALK[1:], [TOLD[0], {"role": "assistant", "content": " the 🦊 \n\n cat"}]):
            try:
                expected = theirs.apply_chat_template(chat, **options)
            except Exception:
                with pytest.raises(ValueError):
                    ours.apply_chat_template(chat, **options)
                continue
            assert ours.apply_chat_template(chat, **options) == expected, (path.name, chat)
            agreed += 1
    assert agreed > 10
